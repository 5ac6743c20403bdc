"""How the result of a load on a node is reported to the dispatcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cortex.gateway.dispatch.effects import result_of
from cortex.wire.errors import UpstreamUnavailable
from cortex.wire.node.contexts import ContextSize, ContextSizes
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


async def test_model_is_not_loaded_again_after_another_gateway_has_done_it(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    sizes = (ContextSize(tokens=1, num_bytes=GB), ContextSize(tokens=16_384, num_bytes=2 * GB))
    contexts = ContextSizes(
        limit_tokens=16_384,
        full_tokens=16_384,
        wanted_tokens=16_384,
        empty_tokens=16_384,
        full_bytes=2 * GB,
        sizes=sizes,
    )
    node = await neurons("n", sizes={"m": GB}, states={"m": ModelState.READY}, contexts={"m": contexts})
    node.context_tokens = 4096
    clients = [await start_gateway(node, poll_interval_s=3600.0) for _ in range(2)]
    chat = {"model": "m", "stream": False, "messages": [{"role": "user", "content": "x"}]}
    for client in clients:
        status, body = await client.post("/api/chat", chat | {"options": {"num_ctx": 16_384}})
        assert (status, body.get("error")) == (200, None)
        node.context_tokens = 16_384
    assert [request.seen_context_tokens for request in node.unload_requests] == [4096, 4096]
    assert len(node.load_requests) == 1


async def test_order_that_fails_unexpectedly_ends_as_a_fault_of_the_node() -> None:
    async def order() -> None:
        raise KeyError("benjy")

    nodes: dict[str, int] = {}
    for call in (order, lambda: nodes["gone"]):
        result = await result_of(call)  # type: ignore[arg-type]
        assert isinstance(result, UpstreamUnavailable)
        assert "unexpected KeyError" in result.message
