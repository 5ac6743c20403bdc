"""A real neuron whose models sleep. On a CPU the weights stay where they are, and everything else comes and goes."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from ....waiting import wait_until
from ..conftest import WIDE
from .conftest import SLEEP_MB

if TYPE_CHECKING:
    from pathlib import Path

    from ..conftest import Daemon

pytestmark = pytest.mark.e2e

CYCLES = 6
MEBIBYTE = 1 << 20


def put_to_sleep(daemon: Daemon, model_id: str = WIDE) -> dict[str, Any]:
    status, model = daemon.call("/models/unload", {"model_id": model_id, "sleep": True})
    assert status == 200, model
    return dict(model)


def ask(daemon: Daemon, model_id: str = WIDE) -> Any:
    status, response = daemon.complete(model_id)
    assert status == 200, response
    return response["choices"]


def test_sleeping_model_is_woken_by_a_request_and_responds_as_before(daemon: Daemon) -> None:
    expected = ask(daemon)
    loaded = daemon.model(WIDE)
    asleep = put_to_sleep(daemon)
    assert asleep["state"] == "asleep"
    assert asleep["host_bytes"] > 20 * MEBIBYTE
    assert put_to_sleep(daemon)["state"] == "asleep"
    _, health = daemon.call("/health")
    (held,) = [model for model in health["models"] if model["id"] == WIDE]
    assert (held["state"], held["context_tokens"]) == ("asleep", loaded["context_tokens"])
    with ThreadPoolExecutor(4) as clients:
        responses = list(clients.map(lambda _: ask(daemon), range(4)))
    assert responses == [expected] * 4
    assert daemon.model(WIDE)["state"] == "ready"
    assert daemon.model(WIDE).get("host_bytes", 0) == 0


def test_memory_is_the_same_after_cycles_of_sleep_and_wake(daemon: Daemon) -> None:
    expected = ask(daemon)
    asleep: list[int] = []
    for _ in range(CYCLES):
        assert put_to_sleep(daemon)["state"] == "asleep"
        asleep.append(daemon.held_bytes())
        assert ask(daemon) == expected
    assert min(asleep[-2:]) - min(asleep[:2]) < 64 * MEBIBYTE


def test_model_is_cold_after_its_worker_was_killed_in_its_sleep_and_a_request_loads_it(daemon: Daemon) -> None:
    expected = ask(daemon)
    put_to_sleep(daemon)
    os.kill(daemon.process_called("neuron-worker"), signal.SIGKILL)
    wait_until(lambda: daemon.model(WIDE)["state"] == "cold", daemon.log.read_text)
    assert "lost while it slept" in daemon.model(WIDE)["reason"]
    assert f"{WIDE}: asleep → cold: its weights were lost while it slept" in daemon.log.read_text()
    assert ask(daemon) == expected


def test_least_recently_used_sleeping_model_is_unloaded_over_the_budget(daemon: Daemon, wide_model: Path) -> None:
    names = [f"copy-{number}" for number in range(8)]
    for name in names:
        assert daemon.call("/models/load", {"model_id": name, "source": str(wide_model)})[0] == 200
        assert put_to_sleep(daemon, name)["state"] == "asleep"
    sleepers = [model for name in names if (model := daemon.model(name))["state"] == "asleep"]
    assert sum(model["host_bytes"] for model in sleepers) <= SLEEP_MB * MEBIBYTE
    assert [model["id"] for model in sleepers] == names[-len(sleepers) :], "the first to sleep left first"
    assert 0 < len(sleepers) < len(names)
    for name in names:
        assert daemon.call("/models/unload", {"model_id": name})[0] == 200
