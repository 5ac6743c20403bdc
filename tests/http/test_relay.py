"""Client and node joined: every byte, both paces, and every way in which either can leave."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from cortex.http.passthrough import TAIL_BYTES
from cortex.http.relay import Keepalive, Outcome, Relay
from cortex.http.server.connection import ClientConnection
from cortex.http.server.exchange import Exchange
from cortex.http.upstream.call import UpstreamCall
from cortex.http.upstream.connection import UpstreamConnection
from cortex.http.upstream.faults import ConnectFailed, ConnectionLost, MalformedResponse

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def refused_pool(stage):
    """A pool for an address where nobody listens."""
    node = await stage.answering(b"")
    node.close()
    await asyncio.sleep(0.005)
    return stage.pool(node.origin)


async def test_a_whole_answer_keeps_its_status_headers_length_and_bytes(stage):
    body = random.Random(1).randbytes(3_000_000)
    node = await stage.answering(
        b"HTTP/1.1 418 I'm a teapot\r\nX-Node: n\r\nX-Node: m\r\nKeep-Alive: x\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )
    server, port = await stage.relaying(stage.pool(node.origin))
    reader, writer = await stage.client(port)
    for _ in range(3):
        writer.write(POST)
        head, got = await stage.read_message(reader)
        assert got == body
        lines = head.split(b"\r\n")
        assert lines[0] == b"HTTP/1.1 418 I'm a Teapot"
        assert [line for line in lines if line.startswith(b"x-node")] == [b"x-node: n", b"x-node: m"]
        assert b"x-request-id: r1" in lines
        assert b"content-length: 3000000" in lines
        assert b"keep-alive" not in head
    assert node.num_connections == 1
    assert server.num_exchanges == 0
    assert [books.outcome for books in stage.books] == [Outcome.COMPLETE] * 3
    assert stage.books[0].tail == body[-TAIL_BYTES:]
    assert node.requests[0][1] == b"hello"
    assert b"accept-encoding" not in node.requests[0][0]


@pytest.mark.parametrize("keepalive_s", [None, 5.0])
async def test_a_stream_is_passed_on_as_it_comes(stage, keepalive_s):
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

    node = await stage.node(one_by_one)
    _, port = await stage.relaying(stage.pool(node.origin), keepalive_s=keepalive_s)
    reader, _ = await stage.client(port, POST)
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"x-accel-buffering: no" in head
    assert b"transfer-encoding: chunked" in head
    for number in range(20):
        expected = chunk(b"data: %d\n\n" % number)
        assert await reader.readexactly(len(expected)) == expected
        turn.set()
    assert await reader.readexactly(len(END)) == END
    assert stage.books[0].begun
    assert stage.books[0].tail.endswith(b"data: 18\n\ndata: 19\n\n"), "without the chunks' framing"


async def test_a_client_that_knows_no_chunks_gets_the_events_bare(stage):
    events = [b"data: %d\n\n" % number for number in range(10)]
    node = await stage.answering(STREAM_HEAD, *map(chunk, events), END)
    _, port = await stage.relaying(stage.pool(node.origin))
    answer = await stage.ask(port, POST.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert answer.partition(b"\r\n\r\n")[2] == b"".join(events)


async def test_events_cut_across_chunks_are_passed_on_whole(stage):
    pieces = [b"data: 1\n\nda", b"ta: 2\n\n", b"data: 3\n\n", b"data: 4", b"\n", b"\n", b"data: 5\n\n"]
    node = await stage.answering(STREAM_HEAD, *map(chunk, pieces), END)
    _, port = await stage.relaying(stage.pool(node.origin))
    reader, _ = await stage.client(port, POST)
    _, body = await stage.read_message(reader)
    assert body == b"".join(pieces)
    assert stage.books[0].tail == body


async def test_a_node_without_a_length_is_relayed_in_chunks(stage):
    async def old_style(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{}")

    node = await stage.node(old_style)
    _, port = await stage.relaying(stage.pool(node.origin))
    reader, _ = await stage.client(port, POST)
    head, body = await stage.read_message(reader)
    assert body == b"{}"
    assert b"transfer-encoding: chunked" in head


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
)
async def test_an_empty_answer_is_an_answer(stage, answer):
    node = await stage.answering(answer)
    _, port = await stage.relaying(stage.pool(node.origin))
    reader, writer = await stage.client(port)
    for _ in range(2):
        writer.write(POST)
        head, body = await stage.read_message(reader)
        assert head.startswith(answer[:12])
        assert body == b""


async def test_a_waiting_stream_says_so_on_the_wall_clock(stage):
    go = asyncio.Event()

    async def thinking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        await go.wait()
        writer.write(STREAM_HEAD + chunk(b"data: hal"))
        await asyncio.sleep(0.15)  # a pause inside an event: nothing may be said here
        writer.write(chunk(b"f\n\n") + END)
        await reader.read()

    node = await stage.node(thinking)
    _, port = await stage.relaying(stage.pool(node.origin), keepalive_s=0.04)
    reader, _ = await stage.client(port, POST)
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
    assert stage.books[0].outcome is Outcome.COMPLETE


async def test_a_keepalive_takes_the_nodes_own_head_when_it_is_there(stage):
    async def head_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(STREAM_HEAD.replace(b"Transfer", b"X-Node: n\r\nTransfer"))
        await asyncio.sleep(0.15)
        writer.write(chunk(b"data: a\n\n") + END)
        await reader.read()

    node = await stage.node(head_first)
    _, port = await stage.relaying(stage.pool(node.origin), keepalive_s=0.05)
    reader, _ = await stage.client(port, POST)
    head, body = await stage.read_message(reader)
    assert b"x-node: n" in head
    assert body.startswith(b": still here\n\n")
    assert body.endswith(b"data: a\n\n")


async def test_a_refusal_after_a_keepalive_is_told_inside_the_stream(stage):
    async def refuse_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        await asyncio.sleep(0.1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\n{")
        await asyncio.sleep(0.02)
        writer.write(b"no}")
        await reader.read()

    node = await stage.node(refuse_late)
    _, port = await stage.relaying(stage.pool(node.origin), keepalive_s=0.05)
    reader, _ = await stage.client(port, POST)
    head, body = await stage.read_message(reader)
    assert head.startswith(b"HTTP/1.1 200")
    assert body.endswith(b": still here\n\nevent: late\ndata: 400 {no}\n\n")
    assert stage.books[0].outcome is Outcome.COMPLETE


async def test_a_prompt_refusal_keeps_its_own_status_even_when_a_stream_was_asked_for(stage):
    node = await stage.answering(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\n{no}")
    _, port = await stage.relaying(stage.pool(node.origin), keepalive_s=5.0)
    reader, _ = await stage.client(port, POST)
    head, body = await stage.read_message(reader)
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
async def test_a_node_that_dies_before_its_first_byte_is_replaced(stage, name, keepalive_s):
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await bad.read(reader)
        writer.write(BEFORE_THE_FIRST_BYTE[name])
        await writer.drain()
        await asyncio.sleep(0.08 if keepalive_s else 0.01)
        stage.reset(writer)

    bad = await stage.node(dying)
    good = await stage.answering(STREAM_HEAD + chunk(b"data: good\n\n") + END)
    dead = await refused_pool(stage)
    _, port = await stage.relaying(dead, stage.pool(bad.origin), stage.pool(good.origin), keepalive_s=keepalive_s)
    reader, _ = await stage.client(port, POST)
    head, body = await stage.read_message(reader)
    assert head.startswith(b"HTTP/1.1 200")
    assert body.replace(b": still here\n\n", b"") == b"data: good\n\n"
    books = stage.books[0]
    assert books.outcome is Outcome.COMPLETE
    assert isinstance(books.faults[0], ConnectFailed)
    assert isinstance(books.faults[1], (ConnectionLost, MalformedResponse))
    assert good.requests[0][1] == b"hello"


async def test_a_nodes_own_keepalives_begin_nothing_and_it_can_still_be_replaced(stage):
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await bad.read(reader)
        writer.write(STREAM_HEAD + chunk(b": still here\n\n") + chunk(b": a comment of its own\n\n"))
        await writer.drain()
        await asyncio.sleep(0.05)
        stage.reset(writer)

    bad = await stage.node(dying)
    good = await stage.answering(STREAM_HEAD + chunk(b": still here\n\ndata: good\n\n: later\n\n") + END)
    _, port = await stage.relaying(stage.pool(bad.origin), stage.pool(good.origin), keepalive_s=60)
    reader, _ = await stage.client(port, POST)
    _, body = await stage.read_message(reader)
    assert body == b"data: good\n\n: later\n\n"
    assert stage.books[0].outcome is Outcome.COMPLETE


async def test_our_headers_stand_instead_of_the_nodes(stage):
    node = await stage.answering(b"HTTP/1.1 200 OK\r\nX-Request-Id: theirs\r\nContent-Length: 2\r\n\r\nhi")
    _, port = await stage.relaying(stage.pool(node.origin))
    reader, _ = await stage.client(port, POST)
    head, _ = await stage.read_message(reader)
    assert head.count(b"x-request-id") == 1
    assert b"x-request-id: r1" in head


async def test_an_answer_that_the_caller_declines_is_replaced(stage):
    busy = await stage.answering(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy")
    good = await stage.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood")
    _, port = await stage.relaying(stage.pool(busy.origin), stage.pool(good.origin))
    reader, _ = await stage.client(port, POST)
    assert (await stage.read_message(reader))[1] == b"good"
    assert stage.books[0].heads == [503, 200]
    await stage.eventually(lambda: busy.num_open == 0)


async def test_when_no_node_is_left_the_caller_words_the_refusal(stage):
    _, port = await stage.relaying(await refused_pool(stage))
    reader, writer = await stage.client(port, POST)
    head, body = await stage.read_message(reader)
    assert head.startswith(b"HTTP/1.1 502")
    assert body == b'{"error":"node"}'
    assert stage.books[0].outcome is Outcome.REJECTED
    writer.write(POST)  # and the client may go on
    assert (await stage.read_message(reader))[0].startswith(b"HTTP/1.1 502")


async def test_a_refusal_inside_a_started_stream_is_an_event(stage):
    async def die_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        await asyncio.sleep(0.1)

    node = await stage.node(die_late)
    _, port = await stage.relaying(stage.pool(node.origin), keepalive_s=0.03)
    answer = await stage.ask(port, POST)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(chunk(b"event: error\n\n") + END)


@pytest.mark.parametrize("half", [b"", b"data: hal"], ids=["between events", "inside an event"])
async def test_a_node_that_dies_in_the_middle_of_a_stream_leaves_one_error_event(stage, half):
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(STREAM_HEAD + chunk(b"data: a\n\n"))
        await writer.drain()
        await asyncio.sleep(0.01)
        if half:
            writer.write(chunk(half))
            await writer.drain()
            await asyncio.sleep(0.01)
        stage.reset(writer)

    node = await stage.node(dying)
    _, port = await stage.relaying(stage.pool(node.origin), keepalive_s=5.0)
    answer = await stage.ask(port, POST)
    assert answer.partition(b"\r\n\r\n")[2] == chunk(b"data: a\n\n") + chunk(b"event: interrupted\n\n") + END
    assert stage.books[0].outcome is Outcome.INTERRUPTED


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 100\r\n\r\nhalf", b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"]
)
async def test_a_whole_answer_that_breaks_off_is_broken_off(stage, framing):
    async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + framing)
        await writer.drain()
        await asyncio.sleep(0.02)
        stage.reset(writer)

    node = await stage.node(dying)
    _, port = await stage.relaying(stage.pool(node.origin))
    reader, _ = await stage.client(port, POST)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await stage.read_message(reader)
    assert stage.books[0].outcome is Outcome.INTERRUPTED


@pytest.mark.parametrize("manner", ["close", "reset", "half-close"])
@pytest.mark.parametrize("phase", ["waiting", "keepalive", "head", "streaming", "not streaming", "not reading"])
async def test_a_client_that_leaves_takes_the_call_with_it(stage, phase, manner):
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

    node = await stage.node(endless)
    server, port = await stage.relaying(stage.pool(node.origin), keepalive_s=0.02 if phase == "keepalive" else 5.0)
    reader, writer = await stage.client(port)
    if phase == "not reading":
        writer.transport.pause_reading()
    writer.write(POST)
    await stage.eventually(lambda: node.num_open == 1 and server.num_exchanges == 1)
    if phase in ("keepalive", "streaming", "not streaming"):
        await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.1)
    started = stage.loop.time()
    if manner == "reset":
        stage.reset(writer)
    elif manner == "half-close":
        writer.write_eof()
    else:
        writer.transport.abort()
    await stage.eventually(lambda: node.num_open == 0)
    assert stage.loop.time() - started < 1.0
    assert stage.books[0].outcome is Outcome.CLIENT_DISCONNECTED
    assert server.num_exchanges == 0
    assert len(stage.ticker) <= 1  # a half-closed connection may linger for a turn


async def test_a_slow_client_slows_the_node_down_instead_of_filling_memory(stage):
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

    node = await stage.node(flood)
    server, port = await stage.relaying(stage.pool(node.origin, silence_s=0.2), keepalive_s=0.05)
    reader, writer = await stage.client(port)
    writer.transport.pause_reading()
    writer.write(POST)
    await asyncio.sleep(0.6)  # longer than silence_s: a node that we hold back is not silent
    held_back = num_written
    await asyncio.sleep(0.2)
    assert num_written == held_back < 500
    (connection,) = server.connections
    assert connection.transport.get_write_buffer_size() < 1_000_000
    writer.transport.resume_reading()
    _, body = await stage.read_message(reader)
    assert body.replace(b": still here\n\n", b"").count(b"\n\n") == 1000
    assert body.count(b": still here") <= 4, "nothing is added for a client that does not read"
    assert stage.books[0].outcome is Outcome.COMPLETE


async def test_nothing_is_said_inside_an_event_too_long_to_hold(stage):
    async def verbose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(STREAM_HEAD + chunk(b"data: " + b"x" * 300_000))
        await asyncio.sleep(0.2)
        writer.write(chunk(b"end\n\n"))
        await asyncio.sleep(0.2)
        writer.write(END)
        await reader.read()

    node = await stage.node(verbose)
    _, port = await stage.relaying(stage.pool(node.origin), keepalive_s=0.05)
    reader, _ = await stage.client(port, POST)
    _, body = await stage.read_message(reader)
    event = b"data: " + b"x" * 300_000 + b"end\n\n"
    before, _, after = body.partition(event)
    assert set(before.split(b"\n\n")) <= {b": still here", b""}, "a slow machine says so before the first bytes"
    assert set(after.split(b"\n\n")) == {b": still here", b""}


async def test_a_node_asked_while_the_client_is_full_waits_too(stage):
    calls = []

    class UpstreamCall:
        def pause(self):
            calls.append("pause")

        def abort(self):
            calls.append("abort")

    class Pool:
        def send(self, *request, silence_s):
            calls.append("send")
            return UpstreamCall()

    def handler(exchange: Exchange) -> None:
        exchange.start(200, ())
        while not exchange.paused:
            exchange.write(bytes(65536))
        Relay(exchange, stage.open_books(exchange), stage.ticker).send(Pool(), b"GET", b"/", (), b"")

    _, port = await stage.server(handler)
    _, writer = await stage.client(port)
    writer.transport.pause_reading()
    writer.write(POST)
    await stage.eventually(lambda: calls == ["send", "pause"])
    writer.transport.abort()
    await stage.eventually(lambda: calls[-1] == "abort")


class Upper:
    """A translation to capitals that needs whole words."""

    def __init__(self) -> None:
        self.held = b""

    def head(self, status, headers):
        return status, [(b"content-type", b"text/event-stream")]

    def push(self, data):
        if b"nonsense" in data:
            raise MalformedResponse("the node talks nonsense")
        *whole, self.held = (self.held + data).split(b" ")
        return b"".join(word.upper() + b"\n\n" for word in whole)

    def finish(self):
        return self.held.upper() + b"\n\n"


async def test_a_translation_rewrites_the_answer(stage):
    node = await stage.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\none tw", b"o thr")
    _, port = await stage.relaying(stage.pool(node.origin), translation=Upper)
    reader, _ = await stage.client(port, POST)
    head, body = await stage.read_message(reader)
    assert body == b"ONE\n\nTWO\n\nTHR\n\n"
    assert b"text/event-stream" in head
    short = await stage.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\none")
    _, port = await stage.relaying(stage.pool(short.origin), translation=Upper)
    reader, _ = await stage.client(port, POST)
    head, body = await stage.read_message(reader)
    assert body == b"ONE\n\n"
    assert b"content-length: 5" in head


async def test_nonsense_found_by_a_translation_is_the_nodes_fault(stage):
    bad = await stage.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nnonsense")
    good = await stage.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood")
    _, port = await stage.relaying(stage.pool(bad.origin), stage.pool(good.origin), translation=Upper)
    reader, _ = await stage.client(port, POST)
    assert (await stage.read_message(reader))[1] == b"GOOD\n\n"
    bad = await stage.answering(STREAM_HEAD + chunk(b"fine so far "), chunk(b"nonsense"))
    _, port = await stage.relaying(stage.pool(bad.origin), translation=Upper)
    answer = await stage.ask(port, POST)
    assert answer.endswith(chunk(b"event: interrupted\n\n") + END)


async def test_a_request_that_waits_for_its_node_hears_us_and_may_leave(stage):
    def handler(exchange: Exchange) -> None:
        books = stage.open_books(exchange)
        books.relay = Relay(exchange, books, stage.ticker, keepalive=Keepalive(b": wait\n\n", 0.03))

    node = await stage.answering(STREAM_HEAD + chunk(b"data: a\n\n") + END)
    pool = stage.pool(node.origin)
    server, port = await stage.server(handler)
    reader, _ = await stage.client(port, POST)
    await reader.readuntil(chunk(b": wait\n\n") * 2)
    stage.books[0].relay.send(pool, b"POST", b"/", (), b"")
    assert (await reader.readuntil(END)).endswith(chunk(b"data: a\n\n") + END)
    reader, writer = await stage.client(port, POST)
    await reader.readuntil(chunk(b": wait\n\n"))
    writer.close()
    await stage.eventually(lambda: stage.books[1].outcome is Outcome.CLIENT_DISCONNECTED)
    gone = stage.books[1].relay
    gone.send(pool, b"POST", b"/", (), b"")
    gone.reject(503, (), b"", b"")
    assert server.num_exchanges == pool.num_calls == 0
    assert len(node.requests) == 1
    late = Relay(gone.exchange, stage.open_books(gone.exchange), stage.ticker)
    assert late.closed
    assert stage.books[2].outcome is Outcome.CLIENT_DISCONNECTED


async def test_an_observer_that_fails_does_not_leave_the_client_waiting(stage):
    def handler(exchange: Exchange) -> None:
        books = stage.open_books(exchange)
        books.on_head = lambda relay, status, headers: 1 // 0
        Relay(exchange, books, stage.ticker).send(pool, b"POST", b"/", (), b"")

    node = await stage.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    pool = stage.pool(node.origin)
    _, port = await stage.server(handler)
    problems = []
    stage.loop.set_exception_handler(lambda loop, context: problems.append(context["exception"]))
    reader, _ = await stage.client(port, POST)
    assert (await stage.read_message(reader))[0].startswith(b"HTTP/1.1 502")
    assert isinstance(problems[0], ZeroDivisionError)
    await stage.eventually(lambda: pool.num_calls == 0)


async def test_what_is_over_is_not_kept_in_memory(stage):
    kinds = (ClientConnection, UpstreamConnection, Exchange, Relay, UpstreamCall, asyncio.BaseTransport)

    def num_alive() -> int:
        gc.collect()
        return sum(isinstance(thing, kinds) for thing in gc.get_objects())

    async def some_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(STREAM_HEAD + chunk(b"data: a\n\n"))
        await reader.read()

    before = num_alive()
    node = await stage.node(some_and_close)
    pool = stage.pool(node.origin)
    server, port = await stage.relaying(pool, keepalive_s=0.05)
    for _ in range(20):
        reader, writer = await stage.client(port, POST)
        await reader.readuntil(b"data: a\n\n")
        stage.reset(writer)
    del reader, writer
    await stage.eventually(lambda: not server.connections and not pool.connections and node.num_open == 0)
    stage.books.clear()
    stage.writers.clear()
    await asyncio.sleep(0.05)
    assert num_alive() == before


async def test_200_streams_of_which_a_third_leave_leave_nothing_behind(stage):
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

    node = await stage.node(stream)
    pool = stage.pool(node.origin)
    server, port = await stage.relaying(pool, keepalive_s=0.05)
    expected = b"".join(b"data: %d\n\n" % number for number in range(20))

    async def visit(leaves: bool) -> bool:
        await asyncio.sleep(rng.uniform(0, 0.2))
        reader, writer = await stage.client(port, POST)
        if leaves:
            await asyncio.sleep(rng.uniform(0, 0.4))
            stage.reset(writer) if rng.random() < 0.5 else writer.close()
            return True
        _, body = await stage.read_message(reader)
        writer.close()
        return body.replace(b": still here\n\n", b"") == expected

    results = await asyncio.gather(*(visit(number % 3 == 0) for number in range(200)))
    assert all(results)
    await stage.eventually(lambda: server.num_connections == 0 and server.num_exchanges == 0)
    assert pool.num_calls == 0
    await stage.eventually(lambda: node.num_open == pool.num_idle)
    assert len(stage.ticker) == pool.num_idle
    outcomes = [books.outcome for books in stage.books]
    assert set(outcomes) <= {Outcome.COMPLETE, Outcome.CLIENT_DISCONNECTED}
    assert outcomes.count(Outcome.COMPLETE) >= 133
    pool.close()
    await stage.eventually(lambda: node.num_open == 0 and len(stage.ticker) == 0)
    await stage.eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)
