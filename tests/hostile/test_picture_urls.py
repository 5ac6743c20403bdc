"""A gateway that fetches pictures connects to nothing that a client chooses inside the operator's network."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cortex.gateway.config import PicturesSection
from cortex.wire.node.protocol import Capabilities, ModelState

from ..gateway.fake_neuron import GB
from ..waiting import WAIT_S

if TYPE_CHECKING:
    from ..gateway.fake_neuron import StartNeuron
    from ..gateway.started_gateway import StartGateway


def hostile_urls(port: int) -> list[str]:
    return [
        f"{scheme}://{host}:{port}/x.png"
        for scheme in ("https", "http", "HTTPS", "file", "gopher", "ftp")
        for host in (
            "127.0.0.1",
            "localhost",
            "0",
            "0.0.0.0",
            "127.1",
            "2130706433",
            "0x7f000001",
            "[::1]",
            "[::]",
            "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]",
            "user@127.0.0.1",
            "127.0.0.1#@example.org",
            "127.0.0.1%00.example.org",
        )
    ] + ["https://169.254.169.254/latest/meta-data", "file:///etc/passwd", "https://[fe80::1%25lo]/x", "https://"]


async def test_no_address_of_the_inside_is_connected_to(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    connections: list[Any] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer.get_extra_info("peername"))
        writer.close()

    sees = {"m": Capabilities(tools=True, vision=True)}
    node = await neurons("beast", sizes={"m": GB}, states={"m": ModelState.READY}, capabilities=sees)
    client = await start_gateway(node, pictures=PicturesSection(urls=True, timeout_s=WAIT_S))
    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for url in hostile_urls(port):
            part = {"type": "image_url", "image_url": {"url": url}}
            body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
            status, reply = await client.post("/v1/chat/completions", body)
            if url.lower().startswith("http"):
                assert (status, reply["error"]["param"]) == (400, "messages[0].content[0]"), url
                assert str(port) not in reply["error"]["message"]
    assert not connections


async def test_conversation_that_is_nested_deeply_is_not_searched_to_its_end(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    node = await neurons("beast", sizes={"m": GB}, states={"m": ModelState.READY})
    client = await start_gateway(node, pictures=PicturesSection(urls=True))
    inner = '{"type":"image","source":{"type":"url","url":"https://127.0.0.1/x"}}'
    for depth in (3, 100, 900, 5000):
        content = '[{"content":' * depth + f"[{inner}]" + "}]" * depth
        body = f'{{"model":"m","messages":{content}}}'.encode()
        status, reply = await client.post("/v1/chat/completions", body)
        assert status < 500, (depth, reply)
