"""What the server accepts from clients, and how connections end."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import uvloop

from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Server
from cortex.http.ticker import Ticker

from ...waiting import WAIT_S
from ..conftest import reject
from .echo import CHUNKED, GET, POST, echo

if TYPE_CHECKING:
    from ..conftest import Harness


async def test_serves_requests_of_one_connection_in_turn(harness: Harness) -> None:
    _, port = await harness.server(echo)
    reader, writer = await harness.client(port)
    for data, expected in ((GET, b"GET /a?b=c "), (POST, b"POST /a? hello"), (GET, b"GET /a?b=c ")):
        writer.write(data)
        head, body = await harness.read_message(reader)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close" not in head
        assert body == expected


async def test_accepts_a_request_byte_by_byte(harness: Harness) -> None:
    _, port = await harness.server(echo)
    reader, writer = await harness.client(port)
    for byte in CHUNKED + b"5;why=not\r\nhello\r\n1\r\n!\r\n0\r\n\r\n":
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert (await harness.read_message(reader))[1] == b"POST /a? hello!"


async def test_serves_pipelined_requests_in_order(harness: Harness) -> None:
    running: list[Exchange] = []

    def slow(exchange: Exchange) -> None:
        assert not running, "two exchanges at once on one connection"
        running.append(exchange)
        loop = asyncio.get_running_loop()
        loop.call_later(0.002, running.clear)
        loop.call_later(0.002, echo, exchange)

    _, port = await harness.server(slow)
    requests = b"".join(POST.replace(b"hello", b"%05d" % number) for number in range(30))
    reader, writer = await harness.client(port, requests[:700])
    await harness.eventually(lambda: running)
    writer.write(requests[700:])
    for number in range(30):
        assert (await harness.read_message(reader))[1] == b"POST /a? %05d" % number


async def test_serves_a_good_request_before_a_bad_one(harness: Harness) -> None:
    _, port = await harness.server(echo)
    responses = await harness.ask(port, GET + b"GET / HTTP/1.1\r\nHost: x\r\nBad Header: x\r\n\r\n")
    assert responses.startswith(b"HTTP/1.1 200 OK")
    assert responses.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 400 " in responses


async def test_accepts_a_burst_of_connections_within_a_few_turns_of_the_loop(harness: Harness) -> None:
    server, port = await harness.server(echo)
    with ExitStack() as stack:
        for _ in range(30):  # the system completes them while the loop does nothing
            stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
        for _ in range(8):
            await asyncio.sleep(0)
        assert server.num_connections == 30


async def test_takes_the_path_of_an_absolute_target(harness: Harness) -> None:
    _, port = await harness.server(echo)
    reader, _ = await harness.client(port, b"GET http://x/y?z HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await harness.read_message(reader))[1] == b"GET /y?z "


async def test_declines_an_upgrade_and_reads_the_body(harness: Harness) -> None:
    _, port = await harness.server(echo)
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\nContent-Length"
    chunked_upgrade = (
        CHUNKED.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost") + b"5\r\nhello\r\n0\r\n\r\n"
    )
    for request in (POST.replace(b"Content-Length", upgrade), chunked_upgrade):
        for size in (1, 7, 1000):
            reader, writer = await harness.client(port)
            for start in range(0, len(request), size):
                writer.write(request[start : start + size])
                await asyncio.sleep(0)
            assert (await harness.read_message(reader))[1] == b"POST /a? hello"
            writer.write(GET)
            assert (await harness.read_message(reader))[1] == b"GET /a?b=c "


async def test_honours_http_10_and_connection_close(harness: Harness) -> None:
    _, port = await harness.server(echo)
    assert b"connection: close" in await harness.ask(port, b"GET / HTTP/1.0\r\n\r\n")
    assert b"connection: close" in await harness.ask(port, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    reader, writer = await harness.client(port, b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    head, _ = await harness.read_message(reader)
    assert b"connection: keep-alive" in head
    writer.write(GET)
    assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 200")


async def test_http_10_stream_ends_when_the_connection_closes(harness: Harness) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.start(200, ())
        exchange.write(b"one ")
        exchange.write(b"two")
        exchange.finish()

    _, port = await harness.server(stream)
    response = await harness.ask(port, b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    head, _, body = response.partition(b"\r\n\r\n")
    assert body == b"one two"
    assert b"transfer-encoding" not in head


async def test_head_request_gets_no_body(harness: Harness) -> None:
    _, port = await harness.server(echo)
    reader, writer = await harness.client(port, GET.replace(b"GET", b"HEAD"))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"content-length: 12" in head
    writer.write(GET)
    assert (await harness.read_message(reader))[1] == b"GET /a?b=c "


async def test_sends_continue_before_the_body(harness: Harness) -> None:
    _, port = await harness.server(echo)
    reader, writer = await harness.client(
        port, POST.replace(b"Content-Length", b"Expect: 100-continue\r\nContent-Length")[:-5]
    )
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"hello")
    assert (await harness.read_message(reader))[1] == b"POST /a? hello"
    # The body is already there, so the client does not wait for 100 Continue.
    writer.write(POST.replace(b"Content-Length", b"Expect: 100-continue\r\nContent-Length"))
    assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 200")


async def test_sends_no_continue_inside_another_response(harness: Harness) -> None:
    def slow(exchange: Exchange) -> None:
        exchange.start(200, ())
        exchange.write(b"slow ")
        asyncio.get_running_loop().call_later(0.03, exchange.finish)

    _, port = await harness.server(slow)
    expecting = POST.replace(b"Content-Length", b"Expect: 100-continue\r\nContent-Length")[:-5]
    reader, writer = await harness.client(port, GET + expecting)
    assert (await harness.read_message(reader))[1] == b"slow "
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"hello")
    assert (await harness.read_message(reader))[1] == b"slow "


async def test_serves_a_body_of_exactly_the_limit(harness: Harness) -> None:
    _, port = await harness.server(echo, body_bytes=100_000)
    reader, _ = await harness.client(
        port, b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000)
    )
    assert (await harness.read_message(reader))[1] == b"POST /a? " + bytes(100_000)


async def test_rejects_a_connection_whose_first_request_does_not_begin(harness: Harness) -> None:
    _, port = await harness.server(echo, head_s=0.1)
    assert (await harness.ask(port, b"")).startswith(b"HTTP/1.1 408 ")


async def test_closes_idle_connections_without_a_response(harness: Harness) -> None:
    server, port = await harness.server(echo, idle_s=0.1)
    reader, _ = await harness.client(port, GET)
    await harness.read_message(reader)
    assert await reader.read() == b""
    assert server.num_connections == 0


async def test_failing_handler_gives_an_error_response(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    def broken(exchange: Exchange) -> None:
        raise KeyError("oops")

    def broken_later(exchange: Exchange) -> None:
        exchange.start(200, (), 100)
        exchange.write(b"half")
        raise KeyError("oops")

    _, port = await harness.server(broken)
    reader, _ = await harness.client(port, GET)
    head, body = await harness.read_message(reader)
    assert head.startswith(b"HTTP/1.1 500 ")
    assert json.loads(body)["error"]["code"] == "internal_error"
    _, port = await harness.server(broken_later)
    reader, _ = await harness.client(port, GET)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await harness.read_message(reader)
    assert "oops" in caplog.text


async def test_rejects_line_breaks_in_headers(harness: Harness) -> None:
    problems = []

    def inject(exchange: Exchange) -> None:
        for name, value in ((b"a", b"b\r\nset-cookie: x"), (b"a\r\nb", b"c"), (b"a", b"b\nc"), (b"a", b"\0")):
            with pytest.raises(ValueError, match="line break"):
                exchange.respond(200, ((name, value),), b"")
            problems.append(name)
        with pytest.raises(ValueError, match="do not pass"):
            exchange.respond(200, ((b"content-length", b"5"),), b"")
        assert not exchange.started
        echo(exchange)

    _, port = await harness.server(inject)
    reader, _ = await harness.client(port, GET)
    assert (await harness.read_message(reader))[0].startswith(b"HTTP/1.1 200")
    assert len(problems) == 4


async def test_raises_on_misuse_and_aborts_a_short_response(harness: Harness) -> None:
    def short(exchange: Exchange) -> None:
        with pytest.raises(RuntimeError):
            exchange.write(b"too early")
        with pytest.raises(RuntimeError):
            exchange.finish()
        exchange.start(200, (), 10)
        with pytest.raises(RuntimeError):
            exchange.start(200, (), 10)
        exchange.write(b"short")
        exchange.finish()

    _, port = await harness.server(short)
    reader, _ = await harness.client(port, GET)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await harness.read_message(reader)


async def test_close_lets_running_responses_end_and_aborts_the_others(harness: Harness) -> None:
    exchanges: list[Exchange] = []
    server, port = await harness.server(exchanges.append)
    idle_reader, _ = await harness.client(port, GET)
    await harness.eventually(lambda: len(exchanges) == 1)
    echo(exchanges.pop())
    await harness.read_message(idle_reader)
    quick_reader, _ = await harness.client(port, GET)
    stuck_reader, _ = await harness.client(port, GET)
    await harness.eventually(lambda: len(exchanges) == 2)
    closing = asyncio.create_task(server.close(grace_s=WAIT_S))
    assert await idle_reader.read() == b""
    with pytest.raises(ConnectionRefusedError):
        await harness.client(port)
    echo(exchanges[0])
    quick_head, _ = await harness.read_message(quick_reader)
    assert b"connection: close" in quick_head
    assert await quick_reader.read() == b""
    closing.cancel()
    await server.close()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await harness.read_message(stuck_reader)
    assert server.num_connections == 0
    assert exchanges[1].disconnected


@pytest.mark.parametrize("num_turns", range(8))
def test_close_ends_connections_that_are_just_beginning(num_turns: int) -> None:
    """On uvloop, as the daemons run: it begins a connection in several turns."""

    async def close_early() -> None:
        server = Server(echo, reject, Ticker(asyncio.get_running_loop()))
        _, port = await server.listen("127.0.0.1", 0)
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(WAIT_S):
                await server.close()
        assert not server.connections

    uvloop.run(close_early())
