"""Aliases that add fields to requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cortex.fleet.catalogue import Alias, Catalogue

from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway

MEBIBYTE = 1 << 20


async def test_node_gets_the_fields_of_the_alias(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    alias = Alias("a", set_params={"temperature": 0.5}, system="be brief", reasoning="high")
    client = await start_gateway(beast, catalogue=Catalogue(aliases={"a:high": alias, "plain": "a"}))
    for text in ("hi", "x" * MEBIBYTE):  # also a body that another process reads
        messages = [{"role": "user", "content": text}]
        assert (await client.chat("a:high", temperature=1, messages=messages))[0] == 200
        body = beast.seen[-1].body
        assert (body["model"], body["temperature"], body["reasoning_effort"]) == ("a", 0.5, "high")
        assert [message["role"] for message in body["messages"]] == ["system", "user"]
    await client.chat("plain", temperature=1)
    assert beast.seen[-1].body["temperature"] == 1
