"""What every test may rely on: no GPU test runs without a GPU, and no test meets the user's own settings."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # what workers are given; read when torch is imported


@pytest.fixture(autouse=True, scope="session")
def _plain_environment() -> None:
    """Settings of the shell that runs the tests must not leak into them."""
    for name in list(os.environ):
        if name.startswith(("CORTEX_", "NEURON_")) and name != "CORTEX_CACHE":
            del os.environ[name]


@pytest.fixture(scope="session")
def crowding() -> Callable[[], float]:
    """How many times longer than alone on its machine a program takes right now; at least 1."""

    def measure() -> float:
        wall_s, cpu_s = time.monotonic(), time.thread_time()
        while time.thread_time() - cpu_s < 0.05:
            pass
        return max(1.0, (time.monotonic() - wall_s) / 0.05)

    return measure


@pytest.fixture
def collector() -> Iterator[Any]:
    """A collector of traces, listening."""
    sys.path.insert(0, str(Path(__file__).parent / "telemetry"))
    from otlp_collector import Collector

    with Collector() as listening:
        yield listening


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first: the programs that `e2e` tests start would only stand in their way.

    `gpu` tests skip with a reason where there is no CUDA device.
    """
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none on this machine"))
