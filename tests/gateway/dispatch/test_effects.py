"""How the result of a load on a node is reported to the dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cortex.gateway.dispatch.effects import result_of
from cortex.wire.errors import UpstreamUnavailable
from cortex.wire.node.protocol import ModelState

from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


async def test_failed_load_is_not_out_of_memory_because_of_the_words_in_its_message(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    killed = (502, "load_failed", "the worker was killed by SIGKILL (was the host out of memory? see dmesg)")
    node = await neurons("n", sizes={"old": 4 * GB, "a": GB}, states={"old": ModelState.READY}, load_faults=[killed])
    client = await start_gateway(node)
    status, body = await client.chat("a")
    assert (status, body["error"]["code"]) == (502, "load_failed")
    assert node.unload_requests == [], "nothing is evicted for it"
    assert len(node.load_requests) == 1


async def test_order_that_fails_unexpectedly_ends_as_a_fault_of_the_node() -> None:
    async def order() -> None:
        raise KeyError("benjy")

    nodes: dict[str, int] = {}
    for call in (order, lambda: nodes["gone"]):
        result = await result_of(call)  # type: ignore[arg-type]
        assert isinstance(result, UpstreamUnavailable)
        assert "unexpected KeyError" in result.message
