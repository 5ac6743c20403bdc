"""The relay: all bytes pass, at the pace of the slower side, however either side ends."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import TYPE_CHECKING

import pytest

from cortex.http.observer import Keepalive, Outcome
from cortex.http.passthrough import TAIL_BYTES
from cortex.http.relay import Relay
from cortex.http.request import Headers
from cortex.http.server.connection import ClientConnection
from cortex.http.server.exchange import Exchange
from cortex.http.upstream.call import UpstreamCall
from cortex.http.upstream.connection import UpstreamConnection
from cortex.http.upstream.faults import ConnectFailed, ConnectionLost, MalformedResponse
from cortex.http.upstream.pool import Pool

if TYPE_CHECKING:
    from .conftest import Harness


POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def unreachable_pool(harness: Harness) -> Pool:
    """A pool for an address where nothing listens."""
    node = await harness.responding(b"")
    node.close()
    await asyncio.sleep(0.005)
    return harness.pool(node.origin)


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
    assert harness.observers[0].tail == body[-TAIL_BYTES:]
    assert node.requests[0][1] == b"hello"
    assert b"accept-encoding" not in node.requests[0][0]


@pytest.mark.parametrize("keepalive_s", [None, 5.0])
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
    answer = await harness.ask(port, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert answer.partition(b"\r\n\r\n")[2] == b"".join(events)


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
    "answer", [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
)
async def test_relays_an_empty_response(harness: Harness, answer: bytes) -> None:
    node = await harness.responding(answer)
    _, port = await harness.relaying(harness.pool(node.origin))
    reader, writer = await harness.client(port)
    for _ in range(2):
        writer.write(POST)
        head, body = await harness.read_message(reader)
        assert head.startswith(answer[:12])
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
    async def head_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(STREAM_HEAD.replace(b"Transfer", b"X-Node: n\r\nTransfer"))
        await asyncio.sleep(0.15)
        writer.write(chunk(b"data: a\n\n") + END)
        await reader.read()

    node = await harness.node(head_first)
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=0.05)
    reader, _ = await harness.client(port, POST)
    head, body = await harness.read_message(reader)
    assert b"x-node: n" in head
    assert body.startswith(b": still here\n\n")
    assert body.endswith(b"data: a\n\n")


async def test_error_after_a_keepalive_becomes_an_event(harness: Harness) -> None:
    async def reject_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        await asyncio.sleep(0.1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\n{")
        await asyncio.sleep(0.02)
        writer.write(b"no}")
        await reader.read()

    node = await harness.node(reject_late)
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=0.05)
    reader, _ = await harness.client(port, POST)
    head, body = await harness.read_message(reader)
    assert head.startswith(b"HTTP/1.1 200")
    assert body.endswith(b": still here\n\nevent: late\ndata: 400 {no}\n\n")
    assert harness.observers[0].outcome is Outcome.COMPLETE


async def test_error_before_a_keepalive_keeps_its_status(harness: Harness) -> None:
    node = await harness.responding(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\n{no}")
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=5.0)
    reader, _ = await harness.client(port, POST)
    head, body = await harness.read_message(reader)
    assert head.startswith(b"HTTP/1.1 400")
    assert body == b"{no}"


BEFORE_THE_FIRST_BYTE = {
    "no head": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "a head": STREAM_HEAD,
    "half an event": STREAM_HEAD + chunk(b"data: hal"),
    "garbage": b"\0\1\2\3 garbage \r\n\r\n",
}


@pytest.mark.parametrize("keepalive_s", [None, 0.02], ids=["at once", "after keepalives"])
@pytest.mark.parametrize("name", BEFORE_THE_FIRST_BYTE)
async def test_replaces_a_node_that_dies_before_its_first_byte(
    harness: Harness, name: str, keepalive_s: float | None
) -> None:
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await bad.read(reader)
        writer.write(BEFORE_THE_FIRST_BYTE[name])
        await writer.drain()
        await asyncio.sleep(0.08 if keepalive_s else 0.01)
        harness.reset(writer)

    bad = await harness.node(dying)
    good = await harness.responding(STREAM_HEAD + chunk(b"data: good\n\n") + END)
    dead = await unreachable_pool(harness)
    _, port = await harness.relaying(dead, harness.pool(bad.origin), harness.pool(good.origin), keepalive_s=keepalive_s)
    reader, _ = await harness.client(port, POST)
    head, body = await harness.read_message(reader)
    assert head.startswith(b"HTTP/1.1 200")
    assert body.replace(b": still here\n\n", b"") == b"data: good\n\n"
    observer = harness.observers[0]
    assert observer.outcome is Outcome.COMPLETE
    assert isinstance(observer.faults[0], ConnectFailed)
    assert isinstance(observer.faults[1], (ConnectionLost, MalformedResponse))
    assert good.requests[0][1] == b"hello"


async def test_replaces_a_node_that_has_sent_only_keepalives(harness: Harness) -> None:
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await bad.read(reader)
        writer.write(STREAM_HEAD + chunk(b": still here\n\n") + chunk(b": a comment of its own\n\n"))
        await writer.drain()
        await asyncio.sleep(0.05)
        harness.reset(writer)

    bad = await harness.node(dying)
    good = await harness.responding(STREAM_HEAD + chunk(b": still here\n\ndata: good\n\n: later\n\n") + END)
    _, port = await harness.relaying(harness.pool(bad.origin), harness.pool(good.origin), keepalive_s=60)
    reader, _ = await harness.client(port, POST)
    _, body = await harness.read_message(reader)
    assert body == b"data: good\n\n: later\n\n"
    assert harness.observers[0].outcome is Outcome.COMPLETE


async def test_extra_headers_replace_the_nodes(harness: Harness) -> None:
    node = await harness.responding(b"HTTP/1.1 200 OK\r\nX-Request-Id: theirs\r\nContent-Length: 2\r\n\r\nhi")
    _, port = await harness.relaying(harness.pool(node.origin))
    reader, _ = await harness.client(port, POST)
    head, _ = await harness.read_message(reader)
    assert head.count(b"x-request-id") == 1
    assert b"x-request-id: r1" in head


async def test_replaces_a_response_that_the_observer_declines(harness: Harness) -> None:
    busy = await harness.responding(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy")
    good = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood")
    _, port = await harness.relaying(harness.pool(busy.origin), harness.pool(good.origin))
    reader, _ = await harness.client(port, POST)
    assert (await harness.read_message(reader))[1] == b"good"
    assert harness.observers[0].heads == [503, 200]
    await harness.eventually(lambda: busy.num_open == 0)


async def test_observer_words_the_error_when_no_node_is_left(harness: Harness) -> None:
    _, port = await harness.relaying(await unreachable_pool(harness))
    reader, writer = await harness.client(port, POST)
    head, body = await harness.read_message(reader)
    assert head.startswith(b"HTTP/1.1 502")
    assert body == b'{"error":"node"}'
    assert harness.observers[0].outcome is Outcome.REJECTED
    writer.write(POST)  # and the client may go on
    assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 502")


async def test_rejection_inside_a_started_stream_is_an_event(harness: Harness) -> None:
    async def die_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        await asyncio.sleep(0.1)

    node = await harness.node(die_late)
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=0.03)
    answer = await harness.ask(port, POST)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(chunk(b"event: error\n\n") + END)


@pytest.mark.parametrize("half", [b"", b"data: hal"], ids=["between events", "inside an event"])
async def test_stream_of_a_node_that_dies_ends_with_one_error_event(harness: Harness, half: bytes) -> None:
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(STREAM_HEAD + chunk(b"data: a\n\n"))
        await writer.drain()
        await asyncio.sleep(0.01)
        if half:
            writer.write(chunk(half))
            await writer.drain()
            await asyncio.sleep(0.01)
        harness.reset(writer)

    node = await harness.node(dying)
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=5.0)
    answer = await harness.ask(port, POST)
    assert answer.partition(b"\r\n\r\n")[2] == chunk(b"data: a\n\n") + chunk(b"event: interrupted\n\n") + END
    assert harness.observers[0].outcome is Outcome.INTERRUPTED


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 100\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"]
)
async def test_aborts_a_whole_response_that_is_interrupted(harness: Harness, framing: bytes) -> None:
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + framing)
        await writer.drain()
        await asyncio.sleep(0.02)
        harness.reset(writer)

    node = await harness.node(dying)
    _, port = await harness.relaying(harness.pool(node.origin))
    reader, _ = await harness.client(port, POST)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await harness.read_message(reader)
    assert harness.observers[0].outcome is Outcome.INTERRUPTED


@pytest.mark.parametrize("manner", ["close", "reset", "half-close"])
@pytest.mark.parametrize("phase", ["waiting", "keepalive", "head", "streaming", "not streaming", "not reading"])
async def test_disconnected_client_aborts_the_call(harness: Harness, phase: str, manner: str) -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
                writer.write(chunk(b"data: " + bytes(50_000) + b"\n\n"))
                await asyncio.wait_for(writer.drain(), 30)
        await reader.read()

    node = await harness.node(endless)
    server, port = await harness.relaying(harness.pool(node.origin), keepalive_s=0.02 if phase == "keepalive" else 5.0)
    reader, writer = await harness.client(port)
    if phase == "not reading":
        harness.pausable(writer).pause_reading()
    writer.write(POST)
    await harness.eventually(lambda: node.num_open == 1 and server.num_exchanges == 1)
    if phase in ("keepalive", "streaming", "not streaming"):
        await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.1)
    started = harness.loop.time()
    if manner == "reset":
        harness.reset(writer)
    elif manner == "half-close":
        writer.write_eof()
    else:
        writer.transport.abort()
    await harness.eventually(lambda: node.num_open == 0)
    assert harness.loop.time() - started < 1.0
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
    server, port = await harness.relaying(harness.pool(node.origin, silence_s=0.2), keepalive_s=0.05)
    reader, writer = await harness.client(port)
    harness.pausable(writer).pause_reading()
    writer.write(POST)
    held_back = 0
    while not held_back or held_back != num_written:
        held_back = num_written
        await asyncio.sleep(0.6)  # longer than silence_s: a node that we hold back is not silent
    assert held_back < 500
    (connection,) = server.connections
    assert isinstance(connection, ClientConnection)
    assert connection.transport.get_write_buffer_size() < 1_000_000
    harness.pausable(writer).resume_reading()
    _, body = await harness.read_message(reader)
    assert body.replace(b": still here\n\n", b"").count(b"\n\n") == 1000
    assert body.count(b": still here") <= 4, "no keepalives for a client that does not read"
    assert harness.observers[0].outcome is Outcome.COMPLETE


async def test_sends_no_keepalive_inside_an_event_too_long_to_hold(harness: Harness) -> None:
    async def verbose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(STREAM_HEAD + chunk(b"data: " + b"x" * 300_000))
        await asyncio.sleep(0.2)
        writer.write(chunk(b"end\n\n"))
        await asyncio.sleep(0.2)
        writer.write(END)
        await reader.read()

    node = await harness.node(verbose)
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=0.05)
    reader, _ = await harness.client(port, POST)
    _, body = await harness.read_message(reader)
    event = b"data: " + b"x" * 300_000 + b"end\n\n"
    before, _, after = body.partition(event)
    assert set(before.split(b"\n\n")) <= {b": still here", b""}, "only keepalives on a slow machine"
    assert set(after.split(b"\n\n")) == {b": still here", b""}


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


class Upper:
    """A translation to upper case that needs whole words."""

    def __init__(self) -> None:
        self.held = b""

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        return status, [(b"content-type", b"text/event-stream")]

    def push(self, data: bytes) -> bytes:
        if b"garbage" in data:
            raise MalformedResponse("the node sent garbage")
        *whole, self.held = (self.held + data).split(b" ")
        return b"".join(word.upper() + b"\n\n" for word in whole)

    def finish(self) -> bytes:
        return self.held.upper() + b"\n\n"


async def test_translation_rewrites_the_response(harness: Harness) -> None:
    node = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\none tw", b"o thr")
    _, port = await harness.relaying(harness.pool(node.origin), translation=Upper)
    reader, _ = await harness.client(port, POST)
    head, body = await harness.read_message(reader)
    assert body == b"ONE\n\nTWO\n\nTHR\n\n"
    assert b"text/event-stream" in head
    short = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\none")
    _, port = await harness.relaying(harness.pool(short.origin), translation=Upper)
    reader, _ = await harness.client(port, POST)
    head, body = await harness.read_message(reader)
    assert body == b"ONE\n\n"
    assert b"content-length: 5" in head


async def test_malformed_response_in_a_translation_is_a_fault_of_the_node(harness: Harness) -> None:
    bad = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\ngarbage")
    good = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood")
    _, port = await harness.relaying(harness.pool(bad.origin), harness.pool(good.origin), translation=Upper)
    reader, _ = await harness.client(port, POST)
    assert (await harness.read_message(reader))[1] == b"GOOD\n\n"
    bad = await harness.responding(STREAM_HEAD + chunk(b"fine so far "), chunk(b"garbage"))
    _, port = await harness.relaying(harness.pool(bad.origin), translation=Upper)
    answer = await harness.ask(port, POST)
    assert answer.endswith(chunk(b"event: interrupted\n\n") + END)


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


async def test_failing_observer_does_not_leave_the_client_waiting(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(exchange: Exchange) -> None:
        observer = harness.observer_of(exchange)
        monkeypatch.setattr(observer, "on_head", lambda relay, status, headers: 1 // 0)
        Relay(exchange, observer, harness.ticker).send(pool, b"POST", b"/", (), b"")

    node = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    pool = harness.pool(node.origin)
    _, port = await harness.server(handler)
    problems = []
    harness.loop.set_exception_handler(lambda loop, context: problems.append(context["exception"]))
    reader, _ = await harness.client(port, POST)
    assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 502")
    assert isinstance(problems[0], ZeroDivisionError)
    await harness.eventually(lambda: pool.num_calls == 0)


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
    await asyncio.sleep(0.05)
    assert num_alive() == before


async def test_nothing_leaks_when_a_third_of_200_streams_disconnect(harness: Harness) -> None:
    rng = random.Random(7)
    num_tasks = len(asyncio.all_tasks())

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
