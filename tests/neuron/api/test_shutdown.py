"""What a client gets that connects while the node ends."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import Any

from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.server import NodeApi

from ...waiting import WAIT_S

REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: 2\r\n\r\n{}"
)


async def test_client_that_is_not_accepted_yet_gets_a_response(node: Any) -> None:
    drain_gate = DrainGate()
    api = NodeApi(node, drain_gate)
    api.server.limits = replace(api.server.limits, last_request_s=WAIT_S)
    address = await api.server.listen("127.0.0.1", 0)
    with socket.create_connection(address, WAIT_S) as client:  # the loop has no turn before the shutdown
        client.sendall(REQUEST)
        drain_gate.close()
        await api.close(WAIT_S)
        response = await asyncio.to_thread(client.recv, 1000)
    assert response.startswith(b"HTTP/1.1 503 ")
    assert b"shutting down" in response
