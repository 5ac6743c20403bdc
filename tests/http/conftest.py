"""Real sockets on both sides: scripted nodes, a gateway that is only the data path, and raw clients."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import pytest
import uvloop

from cortex.http.limits import ClientLimits, UpstreamLimits
from cortex.http.observer import Keepalive, ObservedRelay, Outcome, Translation
from cortex.http.relay import Relay
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import AdmitHead, Handler, Response, Server
from cortex.http.ticker import Ticker
from cortex.http.upstream.faults import UpstreamFault
from cortex.http.upstream.pool import Pool
from cortex.wire.error_encoding import OPENAI
from cortex.wire.errors import CortexError

from ..waiting import WAIT_S, until

TICK_S = 0.02


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, as when the host is killed."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@runtime_checkable
class PausableTransport(Protocol):
    """A transport that can stop reading, so that the kernel's buffers fill up."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def pausable(writer: asyncio.StreamWriter) -> PausableTransport:
    transport = writer.transport
    assert isinstance(transport, PausableTransport)
    return transport


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """A head and its body, by Content-Length or chunks. Raises IncompleteReadError when the connection closes."""
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        pieces: list[bytes] = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            pieces.append((await reader.readexactly(size + 2))[:-2])
        await reader.readexactly(2)
        return head, b"".join(pieces)
    if b"content-length:" in lower:
        length = int(lower.partition(b"content-length:")[2].partition(b"\r\n")[0])
        return head, await reader.readexactly(length)
    return head, b""


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Node:
    """An upstream that runs its script on every connection."""

    script: Script
    port: int = 0
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    server: asyncio.Server | None = None

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> Node:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        try:
            await self.script(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the gateway closed the connection, as many tests expect
        finally:
            self.num_open -= 1
            writer.close()

    async def read(self, reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        """Read the next request and record it."""
        message = await read_message(reader)
        self.requests.append(message)
        return message

    def close(self) -> None:
        if self.server is not None:
            self.server.close()


class RecordingObserver:
    """An observer that tries a list of nodes and records every call."""

    def __init__(
        self, pools: list[Pool], exchange: Exchange, translation: Callable[[], Translation] | None = None
    ) -> None:
        self.pools = list(pools)
        self.exchange = exchange
        self.translation = translation
        self.heads: list[int] = []
        self.faults: list[UpstreamFault] = []
        self.begun = False
        self.outcome: Outcome | None = None
        self.tail = b""
        self.relay: Relay | None = None
        """Set by the owner of the relay."""

    def attempt(self) -> None:
        assert self.relay is not None
        request = self.exchange.request
        target = request.path + (b"?" + request.query if request.query else b"")
        translation = self.translation() if self.translation else None
        self.relay.send(
            self.pools.pop(0), request.method, target, request.headers, request.body, translation=translation
        )

    def on_head(self, relay: ObservedRelay, status: int, headers: Headers) -> bool:
        self.heads.append(status)
        if status == 503 and self.pools:
            self.attempt()
            return False
        return True

    def on_first_data(self, relay: ObservedRelay) -> None:
        assert not self.begun
        self.begun = True

    def on_fault(self, relay: ObservedRelay, fault: UpstreamFault) -> None:
        self.faults.append(fault)
        if self.pools:
            self.attempt()
        else:
            relay.reject(502, ((b"content-type", b"application/json"),), b'{"error":"node"}', b"event: error\n\n")

    def late_response(self, relay: ObservedRelay, status: int, body: bytes) -> bytes:
        return b"event: late\ndata: %d %b\n\n" % (status, body)

    def interruption(self, relay: ObservedRelay, fault: UpstreamFault) -> bytes:
        self.faults.append(fault)
        return b"event: interrupted\n\n"

    def on_done(self, relay: ObservedRelay, outcome: Outcome) -> None:
        assert self.outcome is None, "on_done must be called once"
        self.outcome = outcome
        self.tail = bytes(relay.tail)


def reject(error: CortexError, path: bytes) -> Response:
    body = json.dumps(OPENAI.envelope(error)).encode()
    return Response(error.status, ((b"content-type", b"application/json"),), body)


class Harness:
    """Builds gateways, nodes and clients, and closes them."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ticker = Ticker(self.loop, TICK_S)
        self.servers: list[Server] = []
        self.pools: list[Pool] = []
        self.nodes: list[Node] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.observers: list[RecordingObserver] = []
        self.eventually = until
        self.read_message = read_message
        self.reset = reset
        self.pausable = pausable

    async def node(self, script: Script) -> Node:
        node = await Node(script).start()
        self.nodes.append(node)
        return node

    async def responding(self, *pieces: bytes) -> Node:
        """A node that responds to every request with `pieces`, each in its own packet."""

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await node.read(reader)
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(0.002)

        node = await self.node(script)
        return node

    def pool(self, origin: str, *, tls: ssl.SSLContext | None = None, **limits: float) -> Pool:
        pool = Pool(origin, self.ticker, UpstreamLimits(**limits), tls=tls)  # type: ignore[arg-type]
        self.pools.append(pool)
        return pool

    async def server(
        self, handler: Handler, *, admit_head: AdmitHead | None = None, **limits: float
    ) -> tuple[Server, int]:
        server = Server(handler, reject, self.ticker, ClientLimits(**limits), admit_head)  # type: ignore[arg-type]
        self.servers.append(server)
        return server, (await server.listen("127.0.0.1", 0))[1]

    async def relaying(
        self,
        *pools: Pool,
        keepalive_s: float | None = None,
        translation: Callable[[], Translation] | None = None,
        **limits: float,
    ) -> tuple[Server, int]:
        """A gateway that relays to the first pool that works."""

        def handler(exchange: Exchange) -> None:
            observer = RecordingObserver(list(pools), exchange, translation)
            self.observers.append(observer)
            keepalive = Keepalive(b": still here\n\n", keepalive_s) if keepalive_s is not None else None
            headers = ((b"x-request-id", b"r1"),)
            observer.relay = Relay(exchange, observer, self.ticker, keepalive=keepalive, extra_headers=headers)
            observer.attempt()

        return await self.server(handler, admit_head=None, **limits)

    def observer_of(self, exchange: Exchange) -> RecordingObserver:
        """An observer without nodes, for a relay that a test creates itself."""
        self.observers.append(RecordingObserver([], exchange))
        return self.observers[-1]

    async def client(
        self, port: int, data: bytes = b"", *, from_address: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(from_address, 0))
        self.writers.append(writer)
        writer.write(data)
        return reader, writer

    async def ask(self, port: int, data: bytes) -> bytes:
        """Everything that the gateway sends after `data` until it closes."""
        reader, _ = await self.client(port, data)
        async with asyncio.timeout(WAIT_S):
            return await reader.read()

    async def close(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        for server in self.servers:
            await server.close()
        for pool in self.pools:
            pool.close()
        for node in self.nodes:
            node.close()
        await until(lambda: not any(server.connections for server in self.servers))
        for server in self.servers:
            assert server.num_exchanges == 0
            assert server.buffered.num_bytes == 0
        await until(lambda: not any(pool.num_calls or pool.connections for pool in self.pools))
        await until(lambda: len(self.ticker) == 0)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """At the end of the test every counter must be back at zero."""
    harness = Harness()
    yield harness
    await harness.close()
