"""The relay: all bytes pass, and a waiting client gets keepalives."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from cortex.http.observer import ERROR_TAIL_BYTES, Outcome

from ..waiting import WAIT_S
from .streams import END, POST, STREAM_HEAD, chunk

if TYPE_CHECKING:
    from .conftest import Harness


async def test_relays_status_headers_length_and_body_unchanged(harness: Harness) -> None:
    body = random.Random(1).randbytes(3_000_000)
    node = await harness.responding(
        b"HTTP/1.1 418 I'm a teapot\r\nX-Node: n\r\nX-Node: m\r\nKeep-Alive: x\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )
    server, port = await harness.relaying(harness.pool(node.origin))
    reader, writer = await harness.client(port)
    for _ in range(3):
        writer.write(POST)
        head, got = await harness.read_message(reader)
        assert got == body
        lines = head.split(b"\r\n")
        assert lines[0] == b"HTTP/1.1 418 I'm a Teapot"
        assert [line for line in lines if line.startswith(b"x-node")] == [b"x-node: n", b"x-node: m"]
        assert b"x-request-id: r1" in lines
        assert b"content-length: 3000000" in lines
        assert b"keep-alive" not in head
    assert node.num_connections == 1
    assert server.num_exchanges == 0
    assert [observer.outcome for observer in harness.observers] == [Outcome.COMPLETE] * 3
    assert harness.observers[0].tail == body[-ERROR_TAIL_BYTES:]
    assert node.requests[0][1] == b"hello"
    assert b"accept-encoding" not in node.requests[0][0]


@pytest.mark.parametrize("keepalive_s", [None, WAIT_S])
async def test_relays_each_event_as_soon_as_it_comes(harness: Harness, keepalive_s: float | None) -> None:
    turn = asyncio.Event()

    async def one_by_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(STREAM_HEAD)
        for number in range(20):
            writer.write(chunk(b"data: %d\n\n" % number))
            await turn.wait()  # the next event is written only when the client has seen this one
            turn.clear()
        writer.write(END)
        await reader.read()

    node = await harness.node(one_by_one)
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=keepalive_s)
    reader, _ = await harness.client(port, POST)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"x-accel-buffering: no" in head
    assert b"transfer-encoding: chunked" in head
    for number in range(20):
        expected = chunk(b"data: %d\n\n" % number)
        assert await reader.readexactly(len(expected)) == expected
        turn.set()
    assert await reader.readexactly(len(END)) == END
    assert harness.observers[0].begun
    assert harness.observers[0].tail.endswith(b"data: 18\n\ndata: 19\n\n"), "without the chunks' framing"


async def test_http_10_client_gets_events_without_chunks(harness: Harness) -> None:
    events = [b"data: %d\n\n" % number for number in range(10)]
    node = await harness.responding(STREAM_HEAD, *map(chunk, events), END)
    _, port = await harness.relaying(harness.pool(node.origin))
    response = await harness.ask(port, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert response.partition(b"\r\n\r\n")[2] == b"".join(events)


async def test_joins_events_that_are_cut_across_chunks(harness: Harness) -> None:
    pieces = [b"data: 1\n\nda", b"ta: 2\n\n", b"data: 3\n\n", b"data: 4", b"\n", b"\n", b"data: 5\n\n"]
    node = await harness.responding(STREAM_HEAD, *map(chunk, pieces), END)
    _, port = await harness.relaying(harness.pool(node.origin))
    reader, _ = await harness.client(port, POST)
    _, body = await harness.read_message(reader)
    assert body == b"".join(pieces)
    assert harness.observers[0].tail == body


async def test_relays_a_response_without_a_length_in_chunks(harness: Harness) -> None:
    async def old_style(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{}")

    node = await harness.node(old_style)
    _, port = await harness.relaying(harness.pool(node.origin))
    reader, _ = await harness.client(port, POST)
    head, body = await harness.read_message(reader)
    assert body == b"{}"
    assert b"transfer-encoding: chunked" in head


@pytest.mark.parametrize(
    "response", [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
)
async def test_relays_an_empty_response(harness: Harness, response: bytes) -> None:
    node = await harness.responding(response)
    _, port = await harness.relaying(harness.pool(node.origin))
    reader, writer = await harness.client(port)
    for _ in range(2):
        writer.write(POST)
        head, body = await harness.read_message(reader)
        assert head.startswith(response[:12])
        assert body == b""


async def test_sends_keepalives_on_the_wall_clock_while_waiting(harness: Harness) -> None:
    go = asyncio.Event()

    async def thinking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        await go.wait()
        writer.write(STREAM_HEAD + chunk(b"data: hal"))
        await asyncio.sleep(0.15)  # a pause inside an event: nothing may be sent here
        writer.write(chunk(b"f\n\n") + END)
        await reader.read()

    node = await harness.node(thinking)
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=0.04)
    reader, _ = await harness.client(port, POST)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"content-type: text/event-stream" in head
    assert b"x-request-id: r1" in head
    assert b"x-accel-buffering: no" in head
    expected = chunk(b": still here\n\n")
    for _ in range(3):
        assert await reader.readexactly(len(expected)) == expected
    go.set()
    body = b""
    while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
        body += (await reader.readexactly(size + 2))[:-2]
    assert body.replace(b": still here\n\n", b"") == b"data: half\n\n"
    assert harness.observers[0].outcome is Outcome.COMPLETE


async def test_first_keepalive_sends_the_nodes_head_if_it_has_come(harness: Harness) -> None:
    is_kept_alive = asyncio.Event()

    async def head_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(STREAM_HEAD.replace(b"Transfer", b"X-Node: n\r\nTransfer"))
        await is_kept_alive.wait()
        writer.write(chunk(b"data: a\n\n") + END)
        await reader.read()

    node = await harness.node(head_first)
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=2.0)
    reader, _ = await harness.client(port, POST)
    assert b"x-node: n" in await reader.readuntil(b"\r\n\r\n")
    assert await reader.readuntil(b"\n\n\r\n") == chunk(b": still here\n\n")
    is_kept_alive.set()
    assert (await reader.readuntil(END)).endswith(chunk(b"data: a\n\n") + END)


async def test_extra_headers_replace_the_nodes(harness: Harness) -> None:
    node = await harness.responding(b"HTTP/1.1 200 OK\r\nX-Request-Id: theirs\r\nContent-Length: 2\r\n\r\nhi")
    _, port = await harness.relaying(harness.pool(node.origin))
    reader, _ = await harness.client(port, POST)
    head, _ = await harness.read_message(reader)
    assert head.count(b"x-request-id") == 1
    assert b"x-request-id: r1" in head


async def test_sends_no_keepalive_inside_an_event_too_long_to_hold(harness: Harness) -> None:
    is_kept_alive = asyncio.Event()

    async def verbose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(STREAM_HEAD + chunk(b"data: " + b"x" * 300_000))
        await asyncio.sleep(0.2)
        writer.write(chunk(b"end\n\n"))
        await is_kept_alive.wait()
        writer.write(END)
        await reader.read()

    node = await harness.node(verbose)
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=0.05)
    reader, _ = await harness.client(port, POST)
    await reader.readuntil(b"\r\n\r\n")
    event = b"data: " + b"x" * 300_000 + b"end\n\n"
    body = b""
    while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
        body += (await reader.readexactly(size + 2))[:-2]
        if body.endswith(event + b": still here\n\n"):
            is_kept_alive.set()
    before, _, after = body.partition(event)
    assert set(before.split(b"\n\n")) <= {b": still here", b""}, "only keepalives on a slow machine"
    assert set(after.split(b"\n\n")) == {b": still here", b""}
