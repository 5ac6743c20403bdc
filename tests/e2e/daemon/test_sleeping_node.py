"""A real gateway suspends a real neuron and wakes it for a request. Stopping the process stands for the sleep."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ...waiting import WAIT_S, wait_until
from .conftest import TINY, Daemon, StartDaemon, StartGateway, nodes_of

pytestmark = pytest.mark.e2e

STOPS_ITSELF = """suspend_command = ["sh", "-c", "kill -STOP $PPID"]"""


@pytest.fixture(scope="module")
def node(start_daemon: StartDaemon) -> Daemon:
    return start_daemon(STOPS_ITSELF)


StartSleepy = Callable[[str], Daemon]


@pytest.fixture
def start_sleepy(node: Daemon, start_gateway: StartGateway, tmp_path: Path) -> Iterator[StartSleepy]:
    """Start a gateway that suspends the node after a second and wakes it with a line of shell."""
    gateways = []

    def start(wake: str) -> Daemon:
        script = tmp_path / "wake"
        script.write_text(f"#!/bin/sh\n{wake}\n")
        script.chmod(0o755)
        section = (
            f'[neurons.wake]\ncommand = ["{script}"]\nsuspend_after_s = 1\ntimeout_s = 3\n[placement]\nmin_awake = 0\n'
        )
        gateways.append(start_gateway("", {"box": node}, sections=section))
        return gateways[0]

    yield start
    for gateway in gateways:
        gateway.process.kill()
        gateway.process.wait(WAIT_S)
    node.process.send_signal(signal.SIGCONT)


def sleep_of(gateway: Daemon) -> str:
    return str(nodes_of(gateway)["box"]["sleep"])


def stream(gateway: Daemon, **fields: Any) -> list[str]:
    """The lines of a streamed response."""
    body = {"model": TINY, "prompt": "The capital", "max_tokens": 3, "temperature": 0, "stream": True, **fields}
    request = urllib.request.Request(
        f"{gateway.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        return [line.decode().strip() for line in response]


def test_node_is_not_suspended_under_a_request(node: Daemon) -> None:
    assert node.complete(TINY)[0] == 200
    body = {"model": TINY, "prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{node.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        response.readline()
        status, reply = node.call("/suspend", {})
        assert (status, reply["error"]["code"]) == (409, "model_in_use")


def test_idle_node_sleeps_and_a_request_wakes_it_and_is_told_so(node: Daemon, start_sleepy: StartSleepy) -> None:
    gateway = start_sleepy(f"kill -CONT {node.process.pid}")
    assert any('"text"' in line for line in stream(gateway))
    wait_until(lambda: sleep_of(gateway) == "asleep", "the idle node is not suspended")
    stat = f"/proc/{node.process.pid}/stat"

    def is_stopped() -> bool:
        with open(stat) as opened:
            return opened.read().rpartition(")")[2].split()[0] == "T"

    wait_until(is_stopped, "the suspend command did not run")
    wait_until(lambda: nodes_of(gateway)["box"]["missed_polls"] > 0, "nobody noticed that it sleeps")
    status, explained = gateway.call(f"/fleet/explain/{TINY}")
    assert status == 200
    assert "asleep" in explained["text"]
    assert gateway.call("/ready")[0] == 200, "it can serve"
    lines = stream(gateway)
    assert any(line.startswith(": a node is waking up, which takes about") for line in lines)
    assert lines[-2:] == ["data: [DONE]", ""]
    assert sleep_of(gateway) == "awake"


def test_node_that_does_not_come_back_is_reported_and_its_requests_fail_with_the_reason(
    node: Daemon, start_sleepy: StartSleepy
) -> None:
    gateway = start_sleepy("true")
    wait_until(lambda: sleep_of(gateway) == "asleep", "the idle node is not suspended")
    wait_until(lambda: nodes_of(gateway)["box"]["missed_polls"] > 0, "nobody noticed that it sleeps")
    status, reply = gateway.call("/v1/completions", {"model": TINY, "prompt": "a", "max_tokens": 1})
    assert status == 502, reply
    assert "did not come back" in reply["error"]["message"]
    assert sleep_of(gateway) == "lost"
    events = [event["kind"] for event in gateway.call("/fleet/decisions")[1]["events"]]
    assert "node_lost" in events
    node.process.send_signal(signal.SIGCONT)  # it comes back after all
    wait_until(lambda: sleep_of(gateway) == "awake", "a node that responds is not used again")
