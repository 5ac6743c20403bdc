"""The relay when a node dies, rejects or sends garbage: another node, or an error in the client's words."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cortex.http.observer import Outcome
from cortex.http.relay import Relay
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.http.upstream.faults import ConnectFailed, ConnectionLost, MalformedResponse
from cortex.http.upstream.pool import Pool

from ..ports import free_port
from ..waiting import WAIT_S
from .streams import END, POST, STREAM_HEAD, chunk

if TYPE_CHECKING:
    from .conftest import Harness


def unreachable_pool(harness: Harness) -> Pool:
    """A pool for an address where nothing listens."""
    return harness.pool(f"http://127.0.0.1:{free_port()}")


KEEPALIVE = chunk(b": still here\n\n")


async def test_error_after_a_keepalive_becomes_an_event(harness: Harness) -> None:
    is_kept_alive = asyncio.Event()

    async def reject_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        await is_kept_alive.wait()
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\n{")
        await asyncio.sleep(0.02)
        writer.write(b"no}")
        await reader.read()

    node = await harness.node(reject_late)
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=0.05)
    reader, _ = await harness.client(port, POST)
    assert (await reader.readuntil(KEEPALIVE)).startswith(b"HTTP/1.1 200")
    is_kept_alive.set()
    rest = await reader.readuntil(END)
    assert rest.replace(KEEPALIVE, b"") == chunk(b"event: late\ndata: 400 {no}\n\n") + END
    assert harness.observers[0].outcome is Outcome.COMPLETE


async def test_error_before_a_keepalive_keeps_its_status(harness: Harness) -> None:
    node = await harness.responding(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\n{no}")
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=WAIT_S)
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
    dead = unreachable_pool(harness)
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


async def test_replaces_a_response_that_the_observer_declines(harness: Harness) -> None:
    busy = await harness.responding(b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy")
    good = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood")
    _, port = await harness.relaying(harness.pool(busy.origin), harness.pool(good.origin))
    reader, _ = await harness.client(port, POST)
    assert (await harness.read_message(reader))[1] == b"good"
    assert harness.observers[0].heads == [503, 200]
    await harness.eventually(lambda: busy.num_open == 0)


async def test_observer_words_the_error_when_no_node_is_left(harness: Harness) -> None:
    _, port = await harness.relaying(unreachable_pool(harness))
    reader, writer = await harness.client(port, POST)
    head, body = await harness.read_message(reader)
    assert head.startswith(b"HTTP/1.1 502")
    assert body == b'{"error":"node"}'
    assert harness.observers[0].outcome is Outcome.REJECTED
    writer.write(POST)  # and the client may go on
    assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 502")


async def test_rejection_inside_a_started_stream_is_an_event(harness: Harness) -> None:
    is_kept_alive = asyncio.Event()

    async def die_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        await is_kept_alive.wait()

    node = await harness.node(die_late)
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=0.03)
    reader, _ = await harness.client(port, POST)
    assert (await reader.readuntil(KEEPALIVE)).startswith(b"HTTP/1.1 200")
    is_kept_alive.set()
    rest = await reader.readuntil(END)
    assert rest.replace(KEEPALIVE, b"") == chunk(b"event: error\n\n") + END


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
    _, port = await harness.relaying(harness.pool(node.origin), keepalive_s=WAIT_S)
    response = await harness.ask(port, POST)
    assert response.partition(b"\r\n\r\n")[2] == chunk(b"data: a\n\n") + chunk(b"event: interrupted\n\n") + END
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
    response = await harness.ask(port, POST)
    assert response.endswith(chunk(b"event: interrupted\n\n") + END)


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
