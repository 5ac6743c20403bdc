"""Clients that disconnect or read slowly: the node is aborted or held back, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import TYPE_CHECKING

import pytest

from cortex.http.observer import Keepalive, Outcome
from cortex.http.relay import Relay
from cortex.http.server.connection import ClientConnection
from cortex.http.server.exchange import Exchange
from cortex.http.upstream.call import UpstreamCall
from cortex.http.upstream.connection import UpstreamConnection

from ..waiting import WAIT_S, at_rest
from .streams import END, POST, STREAM_HEAD, chunk

if TYPE_CHECKING:
    from .conftest import Harness


@pytest.mark.parametrize("manner", ["close", "reset", "half-close"])
@pytest.mark.parametrize("phase", ["waiting", "keepalive", "head", "streaming", "not streaming", "not reading"])
async def test_disconnected_client_aborts_the_call(harness: Harness, phase: str, manner: str) -> None:
    num_written = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_written
        await node.read(reader)
        if phase == "head":
            writer.write(STREAM_HEAD)
        elif phase == "streaming":
            writer.write(STREAM_HEAD + chunk(b"data: a\n\n"))
        elif phase == "not streaming":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        elif phase == "not reading":
            writer.write(STREAM_HEAD)
            writer.transport.set_write_buffer_limits(high=0)
            while not reader.at_eof():
                num_written += 1
                writer.write(chunk(b"data: " + bytes(50_000) + b"\n\n"))
                await asyncio.wait_for(writer.drain(), WAIT_S)
        await reader.read()

    node = await harness.node(endless)
    server, port = await harness.relaying(harness.pool(node.origin), keepalive_s=0.02 if phase == "keepalive" else 60)
    reader, writer = await harness.client(port)
    if phase == "not reading":
        harness.pausable(writer).pause_reading()
    writer.write(POST)
    await harness.eventually(lambda: node.num_open == 1 and server.num_exchanges == 1)
    if phase in ("keepalive", "streaming", "not streaming"):
        await reader.readuntil(b"\r\n\r\n")
    elif phase == "not reading":
        await at_rest(lambda: num_written)
    else:
        await harness.eventually(lambda: node.requests)
    if manner == "reset":
        harness.reset(writer)
    elif manner == "half-close":
        writer.write_eof()
    else:
        writer.transport.abort()
    await harness.eventually(lambda: node.num_open == 0)  # long before a keepalive would have failed
    assert harness.observers[0].outcome is Outcome.CLIENT_DISCONNECTED
    assert server.num_exchanges == 0
    assert len(harness.ticker) <= 1  # a half-closed connection may linger for a turn


async def test_slow_client_pauses_the_node(harness: Harness) -> None:
    num_written = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_written
        await node.read(reader)
        writer.write(STREAM_HEAD)
        piece = chunk(b"data: " + b"x" * 65_528 + b"\n\n")
        for _ in range(1000):
            writer.write(piece)
            await writer.drain()
            num_written += 1
        writer.write(END)
        await reader.read()

    node = await harness.node(flood)
    server, port = await harness.relaying(harness.pool(node.origin, silence_s=1.0), keepalive_s=0.05)
    reader, writer = await harness.client(port)
    harness.pausable(writer).pause_reading()
    writer.write(POST)
    await harness.eventually(lambda: num_written)
    held_back = await at_rest(lambda: num_written, for_s=1.2)  # longer than silence_s: a held back node is not silent
    assert held_back < 500
    (connection,) = server.connections
    assert isinstance(connection, ClientConnection)
    assert connection.transport.get_write_buffer_size() < 1_000_000
    harness.pausable(writer).resume_reading()
    _, body = await harness.read_message(reader)
    assert body.replace(b": still here\n\n", b"").count(b"\n\n") == 1000
    assert b": still here\n\n" * 5 not in body, "no keepalives for a client that does not read"
    assert harness.observers[0].outcome is Outcome.COMPLETE


async def test_call_starts_paused_while_the_client_is_full(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class UpstreamCall:
        def pause(self) -> None:
            calls.append("pause")

        def abort(self) -> None:
            calls.append("abort")

    def send(*request: object) -> UpstreamCall:
        calls.append("send")
        return UpstreamCall()

    pool = harness.pool("http://nowhere")
    monkeypatch.setattr(pool, "send", send)

    def handler(exchange: Exchange) -> None:
        exchange.start(200, ())
        while not exchange.paused:
            exchange.write(bytes(65536))
        Relay(exchange, harness.observer_of(exchange), harness.ticker).send(pool, b"GET", b"/", (), b"")

    _, port = await harness.server(handler)
    _, writer = await harness.client(port)
    harness.pausable(writer).pause_reading()
    writer.write(POST)
    await harness.eventually(lambda: calls == ["send", "pause"])
    writer.transport.abort()
    await harness.eventually(lambda: calls[-1] == "abort")


async def test_request_without_a_node_gets_keepalives_and_may_disconnect(harness: Harness) -> None:
    def handler(exchange: Exchange) -> None:
        observer = harness.observer_of(exchange)
        observer.relay = Relay(exchange, observer, harness.ticker, keepalive=Keepalive(b": wait\n\n", 0.03))

    node = await harness.responding(STREAM_HEAD + chunk(b"data: a\n\n") + END)
    pool = harness.pool(node.origin)
    server, port = await harness.server(handler)
    reader, _ = await harness.client(port, POST)
    await reader.readuntil(chunk(b": wait\n\n") * 2)
    waiting = harness.observers[0].relay
    assert waiting is not None
    waiting.send(pool, b"POST", b"/", (), b"")
    assert (await reader.readuntil(END)).endswith(chunk(b"data: a\n\n") + END)
    reader, writer = await harness.client(port, POST)
    await reader.readuntil(chunk(b": wait\n\n"))
    writer.close()
    await harness.eventually(lambda: harness.observers[1].outcome is Outcome.CLIENT_DISCONNECTED)
    gone = harness.observers[1].relay
    assert gone is not None
    gone.send(pool, b"POST", b"/", (), b"")
    gone.reject(503, (), b"", b"")
    assert server.num_exchanges == pool.num_calls == 0
    assert len(node.requests) == 1
    late = Relay(gone.exchange, harness.observer_of(gone.exchange), harness.ticker)
    assert late.closed
    assert harness.observers[2].outcome is Outcome.CLIENT_DISCONNECTED


async def test_finished_exchanges_are_not_kept_in_memory(harness: Harness) -> None:
    kinds = (ClientConnection, UpstreamConnection, Exchange, Relay, UpstreamCall, asyncio.BaseTransport)

    def num_alive() -> int:
        gc.collect()
        return sum(isinstance(thing, kinds) for thing in gc.get_objects())

    async def some_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(STREAM_HEAD + chunk(b"data: a\n\n"))
        await reader.read()

    before = num_alive()
    node = await harness.node(some_and_close)
    pool = harness.pool(node.origin)
    server, port = await harness.relaying(pool, keepalive_s=0.05)
    for _ in range(20):
        reader, writer = await harness.client(port, POST)
        await reader.readuntil(b"data: a\n\n")
        harness.reset(writer)
    del reader, writer
    await harness.eventually(lambda: not server.connections and not pool.connections and node.num_open == 0)
    harness.observers.clear()
    harness.writers.clear()
    await harness.eventually(lambda: num_alive() == before)


async def test_nothing_leaks_when_a_third_of_200_streams_disconnect(harness: Harness) -> None:
    rng = random.Random(7)

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await node.read(reader)
            await asyncio.sleep(rng.uniform(0, 0.1))
            writer.write(STREAM_HEAD)
            for number in range(20):
                writer.write(chunk(b"data: %d\n\n" % number))
                await writer.drain()
                await asyncio.sleep(0.02)
            writer.write(END)

    node = await harness.node(stream)
    pool = harness.pool(node.origin)
    server, port = await harness.relaying(pool, keepalive_s=0.05)
    num_tasks = len(asyncio.all_tasks())
    expected = b"".join(b"data: %d\n\n" % number for number in range(20))

    async def visit(disconnects: bool) -> bool:
        await asyncio.sleep(rng.uniform(0, 0.2))
        reader, writer = await harness.client(port, POST)
        if disconnects:
            await asyncio.sleep(rng.uniform(0, 0.4))
            harness.reset(writer) if rng.random() < 0.5 else writer.close()
            return True
        _, body = await harness.read_message(reader)
        writer.close()
        return body.replace(b": still here\n\n", b"") == expected

    results = await asyncio.gather(*(visit(number % 3 == 0) for number in range(200)))
    assert all(results)
    await harness.eventually(lambda: server.num_connections == 0 and server.num_exchanges == 0)
    assert pool.num_calls == 0
    await harness.eventually(lambda: node.num_open == pool.num_idle)
    assert len(harness.ticker) == pool.num_idle
    outcomes = [observer.outcome for observer in harness.observers]
    assert set(outcomes) <= {Outcome.COMPLETE, Outcome.CLIENT_DISCONNECTED}
    assert outcomes.count(Outcome.COMPLETE) >= 133
    pool.close()
    await harness.eventually(lambda: node.num_open == 0 and len(harness.ticker) == 0)
    await harness.eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)
