"""A real neuron whose models sleep. On a CPU the weights stay where they are, and everything else comes and goes."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .conftest import Daemon, StartDaemon

pytestmark = pytest.mark.e2e

DEMO, TINY = "demo", "tiny"
CYCLES = 6
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon) -> Daemon:
    return start_daemon("drain_s = 5.0", "[limits]\nsleep_mb = 4096\nmax_num_seqs = 16")


def park(daemon: Daemon, model_id: str = DEMO) -> dict[str, Any]:
    status, model = daemon.call("/models/unload", {"model_id": model_id, "sleep": True})
    assert status == 200, model
    return dict(model)


def ask(daemon: Daemon, model_id: str = DEMO) -> Any:
    status, answer = daemon.answer(model_id)
    assert status == 200, answer
    return answer["choices"]


def wait_until(condition: Callable[[], bool], daemon: Daemon) -> None:
    deadline_s = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline_s, daemon.log.read_text()
        time.sleep(0.05)


def test_parked_it_is_asleep_and_a_request_wakes_it_to_the_same_answer(daemon: Daemon) -> None:
    expected = ask(daemon)
    loaded = daemon.model(DEMO)
    parked = park(daemon)
    assert parked["state"] == "asleep"
    assert parked["host_bytes"] > 50 * MEBIBYTE
    assert park(daemon)["state"] == "asleep"
    _, health = daemon.call("/health")
    (held,) = [model for model in health["models"] if model["id"] == DEMO]
    assert (held["state"], held["context_tokens"]) == ("asleep", loaded["context_tokens"])
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda _: ask(daemon), range(4)))
    assert answers == [expected] * 4
    assert daemon.model(DEMO)["state"] == "ready"
    assert daemon.model(DEMO).get("host_bytes", 0) == 0


def test_cycles_of_asleep_and_awake_leave_the_memory_where_it_was(daemon: Daemon) -> None:
    expected = ask(daemon)
    asleep: list[int] = []
    for _ in range(CYCLES):
        assert park(daemon)["state"] == "asleep"
        asleep.append(daemon.held_bytes())
        assert ask(daemon) == expected
    assert min(asleep[-2:]) - min(asleep[:2]) < 64 * MEBIBYTE


def test_a_worker_killed_while_its_model_sleeps_leaves_it_cold_and_a_request_loads_it(daemon: Daemon) -> None:
    expected = ask(daemon)
    park(daemon)
    os.kill(daemon.process_called("neuron-worker"), signal.SIGKILL)
    wait_until(lambda: daemon.model(DEMO)["state"] == "cold", daemon)
    assert "lost while it slept" in daemon.model(DEMO)["reason"]
    assert "demo: asleep → cold: its weights were lost while it slept" in daemon.log.read_text()
    assert ask(daemon) == expected


def test_over_the_budget_the_coldest_is_unloaded(start_daemon: StartDaemon, wide_model: Path) -> None:
    daemon = start_daemon("drain_s = 5.0", "[limits]\nsleep_mb = 1", loads_demo=False)
    assert daemon.call("/models/load", {"model_id": "wide", "source": str(wide_model)})[0] == 200
    assert park(daemon, "wide")["state"] == "cold", "far too large for what there is"
    source = daemon.model(TINY)["source"]
    names = [f"copy-{number}" for number in range(6)]
    for name in names:
        assert daemon.call("/models/load", {"model_id": name, "source": source})[0] == 200
        assert park(daemon, name)["state"] == "asleep"
    sleepers = [model for name in names if (model := daemon.model(name))["state"] == "asleep"]
    assert sum(model["host_bytes"] for model in sleepers) <= MEBIBYTE
    assert [model["id"] for model in sleepers] == names[-len(sleepers) :], "the first to sleep left first"
    assert 0 < len(sleepers) < len(names)
