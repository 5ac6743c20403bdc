"""Models whose layers a gateway divides among two nodes on two loopback addresses, by the memory of their devices."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from ...ports import free_port
from .conftest import nodes_of, text_of, until, write_model

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Daemon, StartDaemon, StartGateway

pytestmark = pytest.mark.e2e

MODELS = ("staged", "staged too")
NODES = ("large", "small")
MEMORY_MB = (96, 32)
NUM_LAYERS = 8
PEER_KEY = "key-of-the-second-node"


PROMPTS = ("The capital of France is", "x" * 200)


class Nodes(NamedTuple):
    lead: Daemon
    peer: Daemon
    expected: dict[str, str]
    """Prompt → response of the lead while it has the whole model on its device."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("deep"), inner=8192, num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def nodes(start_daemon: StartDaemon, source: Path) -> Nodes:
    models = [f'[[models]]\nid = "{name}"\nsource = "{source}"' for name in ("whole", *MODELS)]
    ports = free_port(), free_port()

    def start(number: int, *settings: str, key: str = "") -> Daemon:
        return start_daemon(
            "drain_s = 1.0",
            "limits.sleep_mb = 256",
            f"[[devices]]\nindex = 0\nmemory_mb = {MEMORY_MB[number]}",
            *settings,
            listen=f"127.0.0.{number + 1}:{ports[number]}",
            key=key,
            environment={"PEER_KEY": PEER_KEY},
            waits=False,
        )

    endpoint = f"http://127.0.0.2:{ports[1]}"
    peer = f'[[peers]]\nname = "{NODES[1]}"\nendpoint = "{endpoint}"\nkey_env = "PEER_KEY"'
    found = Nodes(start(0, peer, *models), start(1, key=PEER_KEY), {})
    for daemon in (found.lead, found.peer):
        daemon.wait_for("cold", "tiny")
    found.expected.update({prompt: text_of(found.lead, "whole", prompt) for prompt in PROMPTS})
    assert found.lead.call("/models/unload", {"model_id": "whole"})[0] == 200
    return found


@pytest.fixture(scope="module")
def gateway(nodes: Nodes, source: Path, start_gateway: StartGateway) -> Daemon:
    spec = f'nodes = {json.dumps(NODES)}\npipeline_parallel = 2\nsource = "{source}"'
    models = "".join(f'[[models]]\nid = "{name}"\n{spec}\n' for name in MODELS)
    return start_gateway(models, dict(zip(NODES, nodes[:2], strict=True)))


def explained(gateway: Daemon, model: str) -> str:
    """The reason of the lead."""
    status, body = gateway.call(f"/fleet/models/{model.replace(' ', '%20')}/load", {"dry_run": True})
    assert status == 200, body
    (reason,) = [node["reason"] for node in body["nodes"] if node["node"] == NODES[0]]
    return str(reason)


def layers(gateway: Daemon, model: str) -> list[int]:
    fleet = nodes_of(gateway)
    (held,) = [each for each in fleet[NODES[0]]["models"] if each["id"] == model]
    parts = [each["stage_layers"] for each in fleet[NODES[1]]["shares"] if each["model_id"] == model]
    return [count for each in (held["stage_layers"], *parts) for count in each]


def states(nodes: Nodes) -> dict[str, Any]:
    return {share["model_id"]: share["state"] for share in nodes.peer.call("/health")[1]["shares"]}


def test_gateway_divides_layers_by_memory_and_says_so_and_the_tokens_are_those_of_one_device(
    nodes: Nodes, gateway: Daemon
) -> None:
    planned = explained(gateway, "staged")
    assert "layers by memory" in planned
    assert "small with 32 MiB free has the fewest" in planned
    for prompt in PROMPTS:
        assert text_of(gateway, "staged", prompt) == nodes.expected[prompt]
    until(lambda: len(layers(gateway, "staged")) == 2, "the part is not shown")
    assert sum(layers(gateway, "staged")) == NUM_LAYERS
    assert layers(gateway, "staged")[0] > 2 * layers(gateway, "staged")[1] > 0
    large, small = layers(gateway, "staged")
    assert f"layers: {large} on device 0, {small} on device 0 of small" in explained(gateway, "staged")
    status, body = gateway.call("/fleet/models/staged/unload", {})
    assert status == 200, body
    assert states(nodes) == {}


def test_staged_models_replace_each_other_sleep_and_drain_with_each_of_their_nodes(
    nodes: Nodes, gateway: Daemon
) -> None:
    expected = nodes.expected[PROMPTS[0]]
    for name in MODELS * 2:  # each node has one device, with a part of one of them
        assert text_of(gateway, name) == expected
    assert states(nodes) == {MODELS[1]: "ready"}, "on a CPU, evicted models are unloaded"
    gateway.call(f"/fleet/models/{MODELS[1].replace(' ', '%20')}/unload", {"sleep": True})
    assert states(nodes) == {MODELS[1]: "asleep"}
    assert text_of(gateway, MODELS[1]) == expected
    gateway.call("/fleet/nodes/small/drain", {})
    status, body = gateway.call("/v1/completions", {"model": MODELS[1], "prompt": "x", "max_tokens": 1})
    assert (status, body["error"]["code"]) == (503, "draining")
    assert "small has a part of it, and is drained" in body["error"]["message"]
    gateway.call("/fleet/nodes/small/undrain", {})
    assert text_of(gateway, MODELS[1]) == expected
    for name in MODELS:
        gateway.call(f"/fleet/models/{name.replace(' ', '%20')}/unload", {})
    assert states(nodes) == {}
