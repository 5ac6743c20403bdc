"""Measured sizes of models are forgotten by order of the operator, at the gateway and on nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cortex.gateway.ledger.keys import generate
from cortex.wire.node.protocol import ModelState

from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway

OPERATOR, ANNA = generate("operator", operator=True), generate("anna")


async def test_forgotten_size_counts_no_more_here_nor_on_the_nodes(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": 20 * GB}, states={"a": ModelState.READY})
    attic = await neurons("attic", sizes={"a": 20 * GB})
    client = await start_gateway(beast, attic, keys=(OPERATOR.section, ANNA.section))

    def measured() -> set[str]:
        return {key[0] for key in client.gateway.dispatcher.fleet.measured}

    assert measured() == {"a"}
    beast.states["a"] = ModelState.COLD
    await attic.stop()
    url = f"{client.url}/fleet/models/a/size"
    async with client.session.delete(url, headers={"authorization": f"Bearer {ANNA.text}"}) as response:
        assert response.status == 403
    assert measured() == {"a"}
    async with client.session.delete(url, headers={"authorization": f"Bearer {OPERATOR.text}"}) as response:
        assert response.status == 200
        found = {each["node"]: each for each in msgspec.json.decode(await response.read())["nodes"]}
    assert (found["beast"]["estimate_bytes"], found["beast"]["error"]) == (1, None)
    assert "no connection to" in found["attic"]["error"]
    assert measured() == set()
