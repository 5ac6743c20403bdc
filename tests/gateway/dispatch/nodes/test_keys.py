"""The keys that a gateway sends to its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from cortex.gateway.config import Config, GatewaySection, NeuronSection
from cortex.wire.node.protocol import ModelState

from ....waiting import WAIT_S
from ...fake_neuron import GB

if TYPE_CHECKING:
    from ...fake_neuron import FakeNeuron, StartNeuron
    from ...started_gateway import StartGateway


NODE_KEY = "nk-0123456789abcdef"


@pytest.mark.parametrize("origin", ["node", "default"])
async def test_sends_the_key_of_the_node_or_the_default(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    monkeypatch.setenv("NODE_KEY", f"{NODE_KEY}\n")
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY}, key=NODE_KEY)
    if origin == "default":
        client = await start_gateway(beast, node_key_env="NODE_KEY")
    else:
        client = await start_gateway(beast, node_keys={"beast": "NODE_KEY"})
    assert (await client.chat("a"))[0] == 200


@pytest.mark.parametrize(
    ("sent", "problem"), [(None, "it needs a key: set its `key_env`"), ("wrong", "does not admit this gateway")]
)
async def test_node_that_needs_another_key_is_down_and_says_why(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, sent: str | None, problem: str
) -> None:
    monkeypatch.setenv("NODE_KEY", sent or "")
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY}, key=NODE_KEY)
    client = await start_gateway(beast, node_key_env="NODE_KEY")
    status = await client.get_until("/fleet/status", lambda status: status["nodes"][0]["problem"])
    assert problem in status["nodes"][0]["problem"]


async def test_client_gets_502_and_not_401_when_a_node_rejects_the_gateway(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    attic = await neurons("attic", sizes={"a": GB}, states={"a": ModelState.READY})
    client = await start_gateway(beast, attic, poll_interval_s=WAIT_S, max_wait_s=3.0)
    beast.key = NODE_KEY
    for _ in range(4):
        status, body = await client.chat("a")
        assert status == 200, f"the other node serves it: {body}"
    attic.key = NODE_KEY
    status, body = await client.chat("a")
    assert (status, body["error"]["code"]) in ((502, "upstream_unavailable"), (503, "overloaded"))


def test_foreign_server_gets_no_key_of_the_neurons() -> None:
    config = Config(gateway=GatewaySection(node_key_env="NODE_KEY"))
    foreign = NeuronSection(name="x", endpoint="http://x", kind="openai")
    assert config.key_variable(foreign) is None
    assert config.key_variable(NeuronSection(name="y", endpoint="http://y")) == "NODE_KEY"


async def test_client_gets_502_when_a_foreign_server_rejects_the_gateway(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def reject(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "bad key"}}, status=401)

    foreign = await neurons("foreign", sizes={"a": GB}, respond=reject)
    client = await start_gateway(foreign=(foreign,))
    status, body = await client.chat("a")
    assert (status, body["error"]["code"]) == (502, "upstream_unavailable")
    assert "bad key" in body["error"]["message"]
