"""What every test may rely on: no GPU test runs without a GPU, and no test meets the user's own settings.

Also how the suite runs: which tests share a process when there are several, and which tests took too long.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

BUDGET_S = 20.0
"""What one phase of one test may take on a machine of two slow cores; more is reported at the end of the run."""

hypothesis.settings.register_profile(
    "patient",
    deadline=None,  # examples are slow where the machine is busy
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("patient")

# Both are read when torch is imported, here and in the programs that tests start.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # what workers are given
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process per core: more threads would wait for each other


@pytest.fixture(autouse=True, scope="session")
def _plain_environment() -> None:
    """Settings of the shell that runs the tests must not leak into them."""
    for name in list(os.environ):
        if name.startswith(("CORTEX_", "NEURON_")) and name != "CORTEX_CACHE":
            del os.environ[name]


@pytest.fixture
def collector() -> Iterator[Any]:
    """A collector of traces, listening."""
    sys.path.insert(0, str(Path(__file__).parent / "telemetry"))
    from otlp_collector import Collector

    with Collector() as listening:
        yield listening


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and skip `gpu` tests with a reason where there is no CUDA device.

    One process runs the quick tests first. Several processes begin with `e2e`, which takes longest since it is serial.
    """
    is_parallel = hasattr(config, "workerinput")
    items.sort(key=lambda item: (item.get_closest_marker("e2e") is None) == is_parallel)
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; none on this machine"))


def pytest_collection_finish() -> None:
    """What imports made stays until the end: no later collection of garbage need search it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What stays frozen at exit is reported as leaked by extension modules."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file share a process, and so do all of `tests/e2e`: they share one started stack."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneStack(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/e2e" if nodeid.startswith("tests/e2e/") else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # the order of the collection is the order of the work
    return OneStack(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tests over budget. They do not fail: a slow machine proves as much as a fast one."""
    reports = [
        each for each in itertools.chain(*terminalreporter.stats.values()) if isinstance(each, pytest.TestReport)
    ]
    slow = sorted((each for each in reports if each.duration > BUDGET_S), key=lambda each: -each.duration)
    if slow:
        terminalreporter.section(f"slower than {BUDGET_S:g} s", yellow=True)
        for report in sorted(slow, key=lambda each: -each.duration):
            terminalreporter.write_line(f"{report.duration:7.1f} s {report.when:<8} {report.nodeid}")
