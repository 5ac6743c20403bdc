"""A node with two CPU devices. Models that are divided among them, by width and by layers, respond as on one device.
A request of a higher class takes the only slot of a model. Demand adds a replica of a model, which gives way to the
load of another one; no request fails."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from ...waiting import NEVER_S, WAIT_S, wait_until
from .conftest import TINY, WIDE, nodes_of

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Daemon, StartDaemon, StartGateway

pytestmark = pytest.mark.e2e

DIVISIONS = ("tensor_parallel", "pipeline_parallel")
"""Each is also the name of the model that is divided so."""
OTHER, NODE = "other", "node"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def daemon(start_daemon: StartDaemon, tiny_model: Path, wide_model: Path) -> Daemon:
    divided = [f'[[models]]\nid = "{name}"\nsource = "{tiny_model}"\n{name} = 2' for name in DIVISIONS]
    daemon = start_daemon(
        f"drain_s = {NEVER_S}",
        "cpu_devices = 2",
        # The weights of the wide model take 60 MB, so there is room for two of them and not for three.
        "limits = { max_num_seqs = 1, add_replica_after_s = 0.2, memory_mb = 170 }",
        f'[[models]]\nid = "{WIDE}"\nsource = "{wide_model}"\nmax_replicas = 2',
        f'[[models]]\nid = "{OTHER}"\nsource = "{wide_model}"',
        *divided,
        dtype="float32",
    )
    for model in (TINY, *DIVISIONS):
        status, body = daemon.call("/models/load", {"model_id": model})
        assert status in (200, 202), body
        daemon.wait_ready(model)
    return daemon


def text_of(daemon: Daemon, **body: Any) -> str:
    status, response = daemon.call("/v1/completions", {"max_tokens": 24, "temperature": 0, **body})
    assert status == 200, response
    return str(response["choices"][0]["text"])


def test_discovery_and_status_name_the_devices(daemon: Daemon) -> None:
    _, discovery = daemon.call("/discovery")
    assert [device["kind"] for device in discovery["devices"]] == ["cpu", "cpu"]
    assert discovery["max_devices_per_model"] == 2
    assert [daemon.model(name)["devices"] for name in DIVISIONS] == [[0, 1], [0, 1]]
    assert daemon.model("pipeline_parallel")["stage_layers"] == [1, 1]
    assert len(daemon.model(TINY)["devices"]) == 1


@pytest.mark.parametrize("divided", DIVISIONS)
@pytest.mark.parametrize("prompt", ["The capital of France is", "x" * 200])
def test_greedy_response_is_the_same_as_on_one_device(daemon: Daemon, divided: str, prompt: str) -> None:
    first = text_of(daemon, model=divided, prompt=prompt)
    assert first == text_of(daemon, model=TINY, prompt=prompt)
    assert first == text_of(daemon, model=divided, prompt=prompt)  # from the prefix cache


@pytest.mark.parametrize("divided", DIVISIONS)
def test_structured_output_follows_its_schema(daemon: Daemon, divided: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    text = text_of(daemon, model=divided, prompt="A colour:", max_tokens=200, response_format=form)
    assert json.loads(text)["colour"] in ("red", "blue")


def test_request_preempts_one_of_a_lower_class_which_then_ends_as_if_alone(daemon: Daemon) -> None:
    """The model has one slot, which a request of a higher class takes. The other request goes on later."""
    fields = {"model": OTHER, "prompt": "The capital", "max_tokens": 400, "ignore_eos": True}
    alone = text_of(daemon, **fields)
    request = urllib.request.Request(
        f"{daemon.url}/v1/completions",
        json.dumps({**fields, "temperature": 0, "stream": True, "priority": 1}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        lines = [response.readline()]
        text_of(daemon, **{**fields, "prompt": "Another", "max_tokens": 2})
        load = daemon.model(OTHER)["load"]
        assert load["running"] + load["waiting"] >= 1, "the other one has ended before"
        lines += response.readlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == alone
    metrics = urllib.request.urlopen(f"{daemon.url}/metrics", timeout=WAIT_S).read().decode()
    (preemptions,) = [
        line for line in metrics.splitlines() if line.startswith(f'neuron_preemptions_total{{model="{OTHER}"')
    ]
    assert float(preemptions.split()[-1]) >= 1
    assert daemon.call("/models/unload", {"model_id": OTHER})[0] == 200


class Clients:
    """Clients of the gateway, each with one request after another until they are stopped."""

    def __init__(self, gateway: Daemon, count: int) -> None:
        self.statuses: Counter[Any] = Counter()
        self._gateway = gateway
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _ask(self, number: int) -> None:
        body = {"model": WIDE, "prompt": f"{number}", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        while not self._stopped.is_set():
            status, response = self._gateway.call("/v1/completions", body)
            self.statuses[status if status == 200 else str(response)] += 1


def test_demand_through_a_gateway_adds_a_replica_that_gives_way_to_another_model(
    daemon: Daemon, start_gateway: StartGateway
) -> None:
    for model in (TINY, *DIVISIONS):
        assert daemon.call("/models/unload", {"model_id": model})[0] == 200
    gateway = start_gateway("", {NODE: daemon})

    def listed() -> list[dict[str, Any]]:
        """The model, once the first request has begun to load it."""
        return [model for model in nodes_of(gateway)[NODE]["models"] if model["id"] == WIDE]

    def num_replicas() -> int:
        return max((model["replicas"] for model in listed()), default=0)

    with Clients(gateway, 3) as clients:
        wait_until(lambda: num_replicas() == 2, "no replica was added")
        wait_until(lambda: listed()[0]["load"]["running"] == 2, "only one replica has requests")  # each has one slot
        devices = gateway.call(f"/v1/models/{WIDE}")[1]["locations"][0]["replica_devices"]
        assert sorted(devices) == [[0], [1]]
        status, response = gateway.call("/v1/completions", {"model": OTHER, "prompt": "x", "max_tokens": 2})
        assert status == 200, response
        assert daemon.model(WIDE)["replicas"] == 1
        num_served = clients.statuses[200]
        wait_until(lambda: clients.statuses[200] > num_served + 4, "no responses after the replica was unloaded")
        assert gateway.call(f"/fleet/models/{OTHER}/unload", {})[0] in (200, 202)
        wait_until(lambda: num_replicas() == 2, "no replica was added after the other model had gone")
    assert set(clients.statuses) == {200}
