"""Every kind of flood stays within a configured bound of memory and log lines."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from cortex.http.request import Request, loggable
from cortex.http.server.exchange import Exchange
from cortex.wire.errors import InvalidAPIKey

from ..waiting import WAIT_S, at_rest

if TYPE_CHECKING:
    from .conftest import Harness


GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def post(num_bytes: int, *headers: bytes) -> bytes:
    """The head of a request that announces `num_bytes`."""
    lines = [b"POST /a HTTP/1.1", b"Host: x", b"Content-Length: %d" % num_bytes, *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def count_body(exchange: Exchange) -> None:
    exchange.respond(200, (), b"%d" % len(exchange.request.body))


def reject_strangers(request: Request) -> int:
    if request.header(b"authorization") != b"Bearer good":
        raise InvalidAPIKey("send a key")
    return 1 << 30


class Flood:
    """A client that sends the same bytes for as long as the server takes them, and reads nothing."""

    def __init__(self, writer: asyncio.StreamWriter, piece: bytes) -> None:
        self._writer = writer
        self._piece = piece
        self.num_sent_bytes = 0

    async def until_blocked(self, most_bytes: int) -> None:
        """Send until the server stops reading or closes, or `most_bytes` have gone."""
        while self.num_sent_bytes < most_bytes:
            self._writer.write(self._piece)
            draining = asyncio.create_task(self._writer.drain())
            for _ in range(50):  # turns of the loop, on which the server runs too: not of the clock
                if not draining.done():
                    await asyncio.wait({draining}, timeout=0.01)
            if not draining.done():
                draining.cancel()
                return
            try:
                draining.result()
            except ConnectionError:
                return
            self.num_sent_bytes += len(self._piece)


# --- pipelining


async def test_stops_serving_pipelined_requests_while_the_client_reads_no_response(harness: Harness) -> None:
    num_served = 0

    def large(exchange: Exchange) -> None:
        nonlocal num_served
        num_served += 1
        exchange.respond(200, (), bytes(100_000))

    _, port = await harness.server(large, write_buffer_bytes=64 * 1024)
    reader, writer = await harness.client(port)
    harness.pausable(writer).pause_reading()
    flood = Flood(writer, GET * 1000)
    await flood.until_blocked(100_000_000)
    assert flood.num_sent_bytes < 50_000_000, "the server stopped reading"
    served = await at_rest(lambda: num_served)
    assert served < 500, "the sockets buffer some responses, the server must not buffer the others"
    harness.pausable(writer).resume_reading()
    for _ in range(served + 20):  # it goes on where it stopped
        assert (await harness.read_message(reader))[1] == bytes(100_000)


async def test_bounds_the_bytes_buffered_behind_a_running_request(harness: Harness) -> None:
    exchanges: list[Exchange] = []
    server, port = await harness.server(exchanges.append)
    _, writer = await harness.client(port)
    flood = Flood(writer, GET * 1000)
    await flood.until_blocked(100_000_000)
    assert len(exchanges) == 1
    assert flood.num_sent_bytes < 50_000_000
    assert 0 < server.buffered.num_bytes < 1_000_000
    harness.reset(writer)  # noticed although nothing more is read
    await harness.eventually(lambda: server.num_connections == 0)
    assert server.buffered.num_bytes == 0


async def test_serves_a_large_request_behind_another(harness: Harness) -> None:
    _, port = await harness.server(count_body)
    reader, _ = await harness.client(port, GET + post(300_000) + bytes(300_000) + GET)
    assert [(await harness.read_message(reader))[1] for _ in range(3)] == [b"0", b"300000", b"0"]


async def test_drops_a_client_that_pipelines_and_never_reads(harness: Harness) -> None:
    server, port = await harness.server(
        lambda exchange: exchange.respond(200, (), bytes(200_000)), write_buffer_bytes=1000, stall_s=0.2
    )
    _, writer = await harness.client(port)
    harness.pausable(writer).pause_reading()
    await Flood(writer, GET * 1000).until_blocked(20_000_000)
    await harness.eventually(lambda: server.num_connections == 0)


# --- the head is judged before the body


@pytest.mark.parametrize(
    "head",
    [post(50_000_000), CHUNKED + b"2faf080\r\n", post(50_000_000, b"Connection: Upgrade", b"Upgrade: h2c")],
    ids=["length", "chunked", "upgrade"],
)
async def test_rejects_a_stranger_before_the_body_is_buffered(harness: Harness, head: bytes) -> None:
    server, port = await harness.server(count_body, admit_head=reject_strangers)
    reader, writer = await harness.client(port, head)
    response, body = await harness.read_message(reader)
    assert response.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in response
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    writer.write(bytes(1_000_000))

    def is_read() -> bool:
        assert server.buffered.num_bytes == 0
        return writer.transport.get_write_buffer_size() == 0

    await harness.eventually(is_read)


async def test_rejects_a_stranger_whose_body_comes_along_with_the_head(harness: Harness) -> None:
    server, port = await harness.server(count_body, admit_head=reject_strangers)
    reader, _ = await harness.client(port, post(60_000) + bytes(60_000))
    assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 401 ")
    assert server.buffered.num_bytes == 0


async def test_rejects_a_stranger_instead_of_asking_for_the_body(harness: Harness) -> None:
    _, port = await harness.server(count_body, admit_head=reject_strangers)
    response = await harness.ask(port, post(5, b"Expect: 100-continue"))
    assert response.startswith(b"HTTP/1.1 401 ")
    assert b"100 Continue" not in response


async def test_asks_for_the_body_of_a_request_whose_head_is_admitted(harness: Harness) -> None:
    _, port = await harness.server(count_body, admit_head=reject_strangers)
    reader, writer = await harness.client(port, post(5, b"Expect: 100-continue", b"Authorization: Bearer good"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"hello")
    assert (await harness.read_message(reader))[1] == b"5"


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_rejects_a_body_over_what_the_head_was_admitted_for(harness: Harness, framing: str) -> None:
    server, port = await harness.server(count_body, admit_head=lambda request: 10_000)
    for num_bytes, status in ((10_000, b"200"), (10_001, b"413")):
        body = bytes(num_bytes)
        request = (
            post(num_bytes) + body if framing == "length" else CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (num_bytes, body)
        )
        reader, _ = await harness.client(port, request)
        assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 %b " % status)
    await harness.eventually(lambda: server.buffered.num_bytes == 0)


async def test_admits_every_head_on_a_connection(harness: Harness) -> None:
    judged: list[bytes] = []

    def judge(request: Request) -> int:
        judged.append(request.path)
        assert request.body == b""
        return 1 << 30

    _, port = await harness.server(count_body, admit_head=judge)
    reader, writer = await harness.client(port)
    for _ in range(3):
        writer.write(post(20_000) + bytes(20_000))
        assert (await harness.read_message(reader))[1] == b"20000"
    assert judged == [b"/a"] * 3


# --- the budget of all connections together


async def test_rejects_a_body_over_the_buffer_of_all_connections(harness: Harness) -> None:
    exchanges: list[Exchange] = []
    server, port = await harness.server(exchanges.append, buffered_bytes=1_000_000)
    first, _ = await harness.client(port, post(600_000) + bytes(600_000))
    await harness.eventually(lambda: len(exchanges) == 1)
    assert server.buffered.num_bytes == 600_000
    late, _ = await harness.client(port, post(600_000))
    head, body = await harness.read_message(late)
    assert head.startswith(b"HTTP/1.1 503 ")
    assert json.loads(body)["error"]["code"] == "overloaded"
    count_body(exchanges.pop())
    assert (await harness.read_message(first))[1] == b"600000"
    assert server.buffered.num_bytes == 0
    again, _ = await harness.client(port, post(600_000) + bytes(600_000))
    await harness.eventually(lambda: len(exchanges) == 1)
    count_body(exchanges.pop())
    assert (await harness.read_message(again))[1] == b"600000"


async def test_concurrent_bodies_stay_within_the_buffer(harness: Harness) -> None:
    server, port = await harness.server(count_body, buffered_bytes=1_000_000)
    most = 0
    writers = [(await harness.client(port, post(400_000)))[1] for _ in range(10)]
    for _ in range(20):
        for writer in writers:
            if not writer.transport.is_closing():
                writer.write(bytes(19_000))
        await asyncio.sleep(0.005)
        most = max(most, server.buffered.num_bytes)
    assert 400_000 < most <= 1_000_000 + 19_000 * 10
    for writer in writers:
        writer.transport.abort()
    await harness.eventually(lambda: server.num_connections == 0)
    assert server.buffered.num_bytes == 0


async def test_joins_tiny_chunks_of_a_body(harness: Harness) -> None:
    server, port = await harness.server(count_body)
    reader, writer = await harness.client(port, CHUNKED)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(30):
        writer.write(b"2\r\nxy\r\n" * 5000)
        await writer.drain()
        await asyncio.sleep(0)
    await harness.eventually(lambda: server.buffered.num_bytes == 300_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 3 * 300_000, "one object per chunk takes twenty times as much"
    writer.write(b"0\r\n\r\n")
    assert (await harness.read_message(reader))[1] == b"300000"


# --- connections


async def test_rejects_connections_over_the_total_and_serves_again_when_one_closes(harness: Harness) -> None:
    server, port = await harness.server(count_body, num_connections=2, num_connections_per_client=5)
    kept = [await harness.client(port, GET) for _ in range(2)]
    for reader, _ in kept:
        await harness.read_message(reader)
    response = await harness.ask(port, b"")
    assert response.startswith(b"HTTP/1.1 503 ")
    assert b"connection: close" in response
    assert server.num_connections == 2
    kept[0][1].close()
    await harness.eventually(lambda: server.num_connections == 1)
    reader, _ = await harness.client(port, GET)
    assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 200 ")


async def test_rejects_connections_over_the_limit_of_one_address(harness: Harness) -> None:
    server, port = await harness.server(count_body, num_connections=5, num_connections_per_client=2)
    kept = [await harness.client(port, GET) for _ in range(2)]
    for reader, _ in kept:
        await harness.read_message(reader)
    assert (await harness.ask(port, b"")).startswith(b"HTTP/1.1 429 ")
    reader, _ = await harness.client(port, GET, from_address="127.0.0.2")
    assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 200 ")
    kept[0][1].close()
    await harness.eventually(lambda: server.num_connections == 2)
    reader, _ = await harness.client(port, GET)
    assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 200 ")


# --- time


async def test_closes_an_idle_connection_that_sends_empty_lines(harness: Harness) -> None:
    server, port = await harness.server(count_body, head_s=0.2, idle_s=0.2)
    _, writer = await harness.client(port)
    await harness.eventually(lambda: server.num_connections == 1)
    async with asyncio.timeout(WAIT_S):
        while server.num_connections:
            if not writer.transport.is_closing():
                writer.write(b"\r\n")
            await asyncio.sleep(0.02)


async def test_times_out_a_body_below_the_minimum_rate(harness: Harness) -> None:
    _, port = await harness.server(count_body, body_s=0.2, body_bytes_per_s=1000)
    reader, writer = await harness.client(port, post(10_000))
    response = asyncio.create_task(harness.read_message(reader))
    async with asyncio.timeout(WAIT_S):
        while not response.done():  # each byte comes well before a silence of `body_s`
            writer.write(b"x")
            await asyncio.sleep(0.02)
    assert response.result()[0].startswith(b"HTTP/1.1 408 ")


# --- the log


async def test_logs_a_malformed_request_in_one_debug_line(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="cortex")
    _, port = await harness.server(count_body)
    for request in (b"\x16\x03\x01\xff", b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", b"GET /\r\n\r\n"):
        caplog.clear()
        assert (await harness.ask(port, request)).startswith(b"HTTP/1.1 400 ")
        lines = [record for record in caplog.records if record.name.startswith("cortex")]
        assert [(record.levelname, record.exc_info) for record in lines] == [("DEBUG", None)]


async def test_bounds_the_path_in_a_log_line(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    def broken(exchange: Exchange) -> None:
        raise KeyError("oops")

    _, port = await harness.server(broken)
    path = b"/" + b"a" * 20_000
    reader, _ = await harness.client(port, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
    assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 500 ")
    messages = [record.getMessage() for record in caplog.records if "/aaa" in record.getMessage()]
    assert len(messages) == 1
    assert len(messages[0]) < 1000


@pytest.mark.parametrize("character", [b"\n", b"\r", b"\x1b", b"\x9b", b"\x00", "\u2028".encode()])
def test_a_client_cannot_inject_log_lines(character: bytes) -> None:
    shown = loggable(b"/a" + character + b"ERROR forged")
    assert shown.isascii()
    assert shown.isprintable()
    assert shown.startswith("/a\\")
