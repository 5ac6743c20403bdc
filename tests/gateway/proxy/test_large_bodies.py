"""Bodies that another process reads for the gateway."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from cortex.parsing.cost import is_read_elsewhere
from cortex.wire.node.protocol import ModelState

from ...waiting import until
from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway

BODY = {"model": "a", "messages": [{"role": "user", "content": "x"}] * 40_000}


async def test_disconnect_and_burst_of_large_requests_leave_nothing_behind(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    client = await start_gateway(beast)
    sent = msgspec.json.encode(BODY)
    assert is_read_elsewhere(sent, "openai_chat", strip_billing=False)
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    for pause_s in (0.0, 0.02, 0.1):
        _, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
        writer.write(head % len(sent) + sent)
        await writer.drain()
        await asyncio.sleep(pause_s)
        writer.transport.abort()
    await until(lambda: client.gateway.server.num_exchanges == 0)
    await until(lambda: client.gateway.server.buffered.num_bytes == 0)
    burst = await asyncio.gather(*(client.post("/v1/chat/completions", BODY) for _ in range(24)))
    assert [status for status, _ in burst] == [200] * len(burst)
    assert client.gateway.dispatcher.in_flight == {}
