"""One model over two nodes on two loopback addresses: responses, faults of every part, clean-up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from ...ports import free_port
from ...waiting import NEVER_S, WAIT_S
from .conftest import nodes_of, text_of, until, write_model

if TYPE_CHECKING:
    from .conftest import Daemon, StartDaemon, StartGateway

pytestmark = pytest.mark.e2e

SPANNING, WHOLE, WRONG_KEY = "spanning", "whole", "wrong key"
SHARED = ("shared", "shared too", "shared as well")
PEER_KEY = "key-of-the-second-node"


class Cable:
    """The connections of the lead to its peer, which a test can cut."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.2", port)
        self._listener = socket.create_server(("127.0.0.2", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@dataclass
class Pair:
    """Two nodes with two devices each. The first leads, on its device 0; each has another model on its device 1."""

    start_daemon: StartDaemon
    model: Path
    ports: list[int]
    cable: Cable = field(init=False)
    lead: Daemon = field(init=False)
    peer: Daemon = field(init=False)

    def __post_init__(self) -> None:
        self.cable = Cable(self.ports[1])
        self.start_peer()
        entry = f'source = "{self.model}"\ntensor_parallel = 2\ndevices = [0]'
        endpoint = f"http://127.0.0.2:{self.cable.port}"
        self.lead = self._start(
            f"127.0.0.1:{self.ports[0]}",
            "",
            f'[[peers]]\nname = "second"\nendpoint = "{endpoint}"\nkey_env = "PEER_KEY"',
            f'[[peers]]\nname = "third"\nendpoint = "{endpoint}"\nkey_env = "WRONG_KEY"',
            f'[[models]]\nid = "{SPANNING}"\n{entry}\nnodes = ["first", "second"]',
            f'[[models]]\nid = "{WRONG_KEY}"\n{entry}\nnodes = ["first", "third"]',
        )

    def start_peer(self) -> None:
        self.peer = self._start(f"127.0.0.2:{self.ports[1]}", PEER_KEY)

    def _start(self, listen: str, key: str, *settings: str) -> Daemon:
        whole = f'[[models]]\nid = "{WHOLE}"\nsource = "{self.model}"\ndevices = [1]'
        daemon = self.start_daemon(
            f"drain_s = {NEVER_S}",
            "cpu_devices = 2",
            "limits.step_timeout_s = 20.0",
            "limits.sleep_mb = 64",
            *settings,
            whole,
            listen=listen,
            key=key,
            environment={"PEER_KEY": PEER_KEY, "WRONG_KEY": "x" * 20},
        )
        daemon.call("/models/load", {"model_id": WHOLE})
        return daemon

    def shares(self) -> list[dict[str, Any]]:
        return list(self.peer.call("/health")[1]["shares"])


@pytest.fixture(scope="module")
def pair(start_daemon: StartDaemon, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model = write_model(tmp_path_factory.mktemp("long"), inner=128, context_tokens=8192)
    return Pair(start_daemon, model, [free_port(), free_port()])


def worker(daemon: Daemon, device: int) -> int:
    """The process of a device, which is named after none: one of its threads is."""
    workers = [process_id for process_id, name in daemon.descendants().items() if name == "neuron-worker"]
    (found,) = [process_id for process_id in workers if f"cpu-dev-{device}" in thread_names(process_id)]
    return found


def thread_names(process_id: int) -> set[str]:
    try:
        return {task.joinpath("comm").read_text().strip() for task in Path(f"/proc/{process_id}/task").iterdir()}
    except OSError:
        return set()  # it has ended


class Response:
    """A streamed response of the lead, read as far as the test wants. It ends long after what the test does to it."""

    def __init__(self, daemon: Daemon, model: str, max_tokens: int = 8000) -> None:
        body = json.dumps({"model": model, "prompt": "x", "max_tokens": max_tokens, "temperature": 0, "stream": True})
        request = urllib.request.Request(
            f"{daemon.url}/v1/completions", body.encode(), {"content-type": "application/json"}
        )
        self._lines = urllib.request.urlopen(request, timeout=WAIT_S)
        while not (line := self._lines.readline()).startswith(b"data:"):
            assert line, "it ended before its first token"  # and not one of the keepalives before it

    def rest(self) -> str:
        return str(self._lines.read().decode())


def test_the_model_spans_both_nodes_and_responds_as_on_one_device(pair: Pair) -> None:
    status, body = pair.lead.call("/models/load", {"model_id": SPANNING})
    assert status == 200, (body, pair.lead.log.read_text(), pair.peer.log.read_text())
    assert (body["nodes"], body["devices"], body["num_devices"]) == (["first", "second"], [0], 1)
    (share,) = pair.shares()
    assert (share["model_id"], share["lead"], share["state"], share["devices"]) == (SPANNING, "first", "ready", [0])
    assert share["num_bytes"] > 0
    for prompt in ("The capital of France is", "x" * 200):
        assert text_of(pair.lead, SPANNING, prompt) == text_of(pair.lead, WHOLE, prompt)


@pytest.mark.parametrize("fault", ["worker of the lead", "worker of the peer", "connection", "hanging peer worker"])
def test_fault_fails_the_request_with_a_retryable_error_and_the_model_comes_back_alone(pair: Pair, fault: str) -> None:
    pair.lead.call("/models/load", {"model_id": SPANNING})
    expected = text_of(pair.lead, WHOLE)
    bystanders = [worker(daemon, 1) for daemon in (pair.lead, pair.peer)]
    faulty = worker(pair.lead if fault == "worker of the lead" else pair.peer, 0)
    response = Response(pair.lead, SPANNING)
    if fault == "connection":
        pair.cable.cut()
    else:
        os.kill(faulty, signal.SIGSTOP if fault.startswith("hanging") else signal.SIGKILL)
    assert "recovering" in response.rest()
    pair.lead.wait_ready(SPANNING)
    assert text_of(pair.lead, SPANNING) == expected
    assert [worker(daemon, 1) for daemon in (pair.lead, pair.peer)] == bystanders
    assert len(pair.shares()) == 1


def test_model_comes_back_when_the_peer_was_killed_and_starts_again(pair: Pair) -> None:
    pair.lead.call("/models/load", {"model_id": SPANNING})
    bystander = worker(pair.lead, 1)
    response = Response(pair.lead, SPANNING)
    pair.peer.process.kill()
    pair.peer.process.wait(WAIT_S)
    assert "recovering" in response.rest()
    assert pair.lead.model(SPANNING)["state"] == "recovering"
    pair.start_peer()
    pair.lead.wait_ready(SPANNING)
    assert text_of(pair.lead, SPANNING) == text_of(pair.lead, WHOLE)
    assert worker(pair.lead, 1) == bystander


def test_peer_that_is_restarted_lets_the_response_end_and_the_model_comes_back(pair: Pair) -> None:
    pair.lead.call("/models/load", {"model_id": SPANNING})
    workers = [worker(pair.lead, device) for device in (0, 1)]
    response = Response(pair.lead, SPANNING, max_tokens=60)
    pair.peer.process.terminate()
    assert response.rest().rstrip().endswith("data: [DONE]")
    pair.peer.process.wait(WAIT_S)
    pair.start_peer()
    pair.lead.wait_ready(SPANNING)
    assert text_of(pair.lead, SPANNING) == text_of(pair.lead, WHOLE)
    assert [worker(pair.lead, device) for device in (0, 1)] == workers


def test_wrong_key_and_a_second_model_on_the_device_are_rejected(pair: Pair) -> None:
    pair.lead.call("/models/load", {"model_id": SPANNING})
    status, body = pair.lead.call("/models/load", {"model_id": WRONG_KEY})
    assert "it has a part of spanning, which spans nodes" in body["error"]["message"]
    pair.lead.call("/models/unload", {"model_id": SPANNING})
    status, body = pair.lead.call("/models/load", {"model_id": WRONG_KEY})
    assert status >= 400
    assert "does not accept the key" in body["error"]["message"]
    assert pair.shares() == []


@pytest.fixture(scope="module")
def gateway(pair: Pair, start_gateway: StartGateway) -> Daemon:
    """A gateway over both nodes. Its catalogue has models that span them."""
    models = (f'[[models]]\nid = "{name}"\nsource = "{pair.model}"\nnodes = ["beast", "second"]\n' for name in SHARED)
    return start_gateway("".join(models), {"beast": pair.lead, "second": pair.peer})


def test_gateway_plans_loads_serves_and_shows_it(pair: Pair, gateway: Daemon) -> None:
    status, body = gateway.call("/fleet/models/shared/load", {"dry_run": True})
    assert "and a part on second" in json.dumps(body), body
    assert text_of(gateway, "shared") == text_of(pair.lead, WHOLE)
    (held,) = [model for model in nodes_of(gateway)["beast"]["models"] if model["id"] == "shared"]
    assert (held["state"], held["nodes"]) == ("ready", ["beast", "second"])
    until(
        lambda: (
            [(share["model_id"], share["state"]) for share in nodes_of(gateway)["second"]["shares"]]
            == [("shared", "ready")]
        ),
        "the part is not shown",
    )
    status, body = gateway.call("/fleet/models/shared/unload", {})
    assert status == 200, body
    assert pair.shares() == []


def test_models_over_the_same_nodes_replace_each_other_and_drain_with_each_of_them(pair: Pair, gateway: Daemon) -> None:
    expected = text_of(pair.lead, WHOLE)
    for name in SHARED * 2:  # three models on two devices, which have a part of one of them each
        assert text_of(gateway, name) == expected
    held = {share["model_id"]: share["state"] for share in pair.shares()}
    assert list(held.values()) == ["ready", "ready"], "on a CPU, evicted models are unloaded"
    gateway.call(f"/fleet/models/{quote(SHARED[-1])}/unload", {"sleep": True})
    assert {share["model_id"]: share["state"] for share in pair.shares()}[SHARED[-1]] == "asleep"
    assert text_of(gateway, SHARED[-1]) == expected
    gateway.call("/fleet/nodes/second/drain", {})
    status, body = gateway.call("/v1/completions", {"model": SHARED[-1], "prompt": "x", "max_tokens": 1})
    assert (status, body["error"]["code"]) == (503, "draining")
    assert "second has a part of it, and is drained" in body["error"]["message"]
    gateway.call("/fleet/nodes/second/undrain", {})
    assert text_of(gateway, SHARED[-1]) == expected
    for name in SHARED:
        gateway.call(f"/fleet/models/{quote(name)}/unload", {})
    assert pair.shares() == []


def test_lead_that_is_killed_leaves_nothing_on_the_peer_and_unload_does_neither(pair: Pair) -> None:
    pair.lead.call("/models/load", {"model_id": SPANNING})
    bystander = worker(pair.peer, 1)
    status, body = pair.lead.call("/models/unload", {"model_id": SPANNING})
    assert (status, body["state"]) == (200, "cold")
    assert pair.shares() == []
    pair.lead.call("/models/load", {"model_id": SPANNING})
    assert len(pair.shares()) == 1
    pair.lead.process.kill()
    pair.lead.process.wait(WAIT_S)
    until(lambda: pair.shares() == [], "the peer keeps its part")
    assert text_of(pair.peer, WHOLE)
    assert worker(pair.peer, 1) == bystander
