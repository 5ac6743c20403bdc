"""What the server rejects: ambiguous, oversized and slow requests."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from cortex.http.server.exchange import Exchange

from .echo import CHUNKED, GET, POST, echo

if TYPE_CHECKING:
    from ..conftest import Harness


AMBIGUOUS = {
    "length and chunking": CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n") + b"0\r\n\r\n",
    "chunking and length": POST.replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nContent-Length"),
    "two equal lengths": POST.replace(b"Content-Length", b"Content-Length: 5\r\nContent-Length"),
    "two lengths": POST.replace(b"Content-Length", b"Content-Length: 0\r\nContent-Length"),
    "length list": POST.replace(b"5\r\n", b"5, 5\r\n"),
    "signed length": POST.replace(b": 5", b": +5"),
    "negative length": POST.replace(b": 5", b": -5"),
    "hexadecimal length": POST.replace(b": 5", b": 0x5"),
    "empty length": POST.replace(b": 5", b": "),
    "endless length": POST.replace(b": 5", b": 99999999999999999999999"),
    "underscored length": POST.replace(b": 5", b": 1_0"),
    "two chunkings": CHUNKED.replace(b"chunked\r\n", b"chunked\r\nTransfer-Encoding: chunked\r\n") + b"0\r\n\r\n",
    "chunked then identity": CHUNKED.replace(b"chunked", b"chunked, identity") + b"0\r\n\r\n",
    "gzip then chunked": CHUNKED.replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n",
    "unknown coding": CHUNKED.replace(b"chunked", b"xchunked") + b"0\r\n\r\n",
    "quoted coding": CHUNKED.replace(b"chunked", b'"chunked"') + b"0\r\n\r\n",
    "vertical tab coding": CHUNKED.replace(b" chunked", b" \x0bchunked") + b"0\r\n\r\n",
    "chunking in HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n",
    "chunk size with prefix": CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n",
    "chunk size with sign": CHUNKED + b"+5\r\nhello\r\n0\r\n\r\n",
    "chunk size with space": CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n",
    "chunk size overflow": CHUNKED + b"fffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "chunk size ends in LF": CHUNKED + b"5\nhello\r\n0\r\n\r\n",
    "chunk longer than its size": CHUNKED + b"4\r\nhello\r\n0\r\n\r\n",
    "chunk without CRLF": CHUNKED + b"5\r\nhello0\r\n\r\n",
    "length among trailers": CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n",
    "folded header": b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    "folded coding": CHUNKED.replace(b" chunked", b"\r\n chunked") + b"0\r\n\r\n",
    "header before the first": b"GET / HTTP/1.1\r\n Host: x\r\n\r\n",
    "bare LF everywhere": GET.replace(b"\r\n", b"\n"),
    "bare LF after a header": b"GET / HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    "bare CR in a header": b"GET / HTTP/1.1\r\nHost: x\rA: b\r\n\r\n",
    "NUL in a header": b"GET / HTTP/1.1\r\nHost: x\0y\r\n\r\n",
    "control byte in a header": b"GET / HTTP/1.1\r\nHost: x\r\nA: \x01\r\n\r\n",
    "space before the colon": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length : 5\r\n\r\nhello",
    "space in a name": b"GET / HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n",
    "no colon": b"GET / HTTP/1.1\r\nHost: x\r\nnonsense\r\n\r\n",
    "empty name": b"GET / HTTP/1.1\r\nHost: x\r\n: y\r\n\r\n",
    "non-ASCII name": b"GET / HTTP/1.1\r\nHost: x\r\n\xc3\xa4: y\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    "space in the target": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "control byte in the target": b"GET /a\x01 HTTP/1.1\r\nHost: x\r\n\r\n",
    "relative target": b"GET a HTTP/1.1\r\nHost: x\r\n\r\n",
    "foreign scheme": b"GET file:///etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "tunnel": b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.2": GET.replace(b"1.1", b"1.2"),
    "HTTP/2": GET.replace(b"1.1", b"2.0"),
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown method": b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    "unknown expectation": POST.replace(b"Content-Length", b"Expect: the-worst\r\nContent-Length"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_rejects_ambiguous_requests_and_serves_nothing_after_them(harness: Harness, name: str) -> None:
    served = []

    def record(exchange: Exchange) -> None:
        served.append(exchange.request.path)
        echo(exchange)

    _, port = await harness.server(record)
    response = await harness.ask(port, AMBIGUOUS[name] + b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "malformed_http"
    assert served == []


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\n\r\n" + bytes(5_000_000),
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000000\r\nExpect: 100-continue\r\n\r\n",
        CHUNKED + b"%x\r\n" % 5_000_000 + bytes(5_000_000) + b"\r\n0\r\n\r\n",
        (CHUNKED + b"400\r\n" + bytes(1024) + b"\r\n") + (b"400\r\n" + bytes(1024) + b"\r\n") * 4000,
    ],
    ids=["length", "length, expecting", "one chunk", "many chunks"],
)
async def test_client_can_read_the_rejection_of_an_oversized_body(harness: Harness, request_bytes: bytes) -> None:
    _, port = await harness.server(echo, body_bytes=100_000)
    reader, writer = await harness.client(port)
    for start in range(0, len(request_bytes), 65536):  # a client that sends everything before it reads
        writer.write(request_bytes[start : start + 65536])
        await writer.drain()
    head, body = await harness.read_message(reader)
    assert head.startswith(b"HTTP/1.1 413 ")
    assert json.loads(body)["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 300_000,
    ],
    ids=["target", "one header", "many headers", "unfinished header"],
)
async def test_rejects_an_oversized_head(harness: Harness, request_bytes: bytes) -> None:
    _, port = await harness.server(echo)
    response = await harness.ask(port, request_bytes)
    assert response.startswith(b"HTTP/1.1 431 ")


async def test_rejects_endless_chunk_extensions(harness: Harness) -> None:
    _, port = await harness.server(echo)
    reader, writer = await harness.client(port, CHUNKED + b"1;")
    for _ in range(10):
        writer.write(b"x" * 60_000)
        await asyncio.sleep(0.005)
    head, _ = await harness.read_message(reader)
    assert head.startswith(b"HTTP/1.1 400 ")


async def test_closes_the_connection_of_a_rejected_client_that_goes_on_sending(harness: Harness) -> None:
    server, port = await harness.server(echo, linger_s=0.1)
    _, writer = await harness.client(port, b"nonsense\r\n\r\n")

    def is_closed() -> bool:
        if not writer.transport.is_closing():
            writer.write(b"x")
        return writer.transport.is_closing()

    await harness.eventually(is_closed)
    await harness.eventually(lambda: server.num_connections == 0)


async def test_times_out_slow_heads_and_bodies_with_an_error(harness: Harness) -> None:
    _, port = await harness.server(echo, head_s=0.1, body_s=0.1)
    reader, writer = await harness.client(port, b"GET /")
    received = asyncio.create_task(reader.read())
    while not received.done():  # a byte now and then does not count as progress of a head
        writer.write(b"a")
        await asyncio.sleep(0.02)
    assert (await received).startswith(b"HTTP/1.1 408 ")
    assert (await harness.ask(port, POST[:-2])).startswith(b"HTTP/1.1 408 ")


async def test_drops_a_client_that_reads_nothing(harness: Harness) -> None:
    disconnects = []

    def flood(exchange: Exchange) -> None:
        exchange.start(200, ())
        exchange.on_disconnect(lambda: disconnects.append(True))
        while not exchange.paused:
            exchange.write(bytes(65536))

    server, port = await harness.server(flood, stall_s=0.2)
    _, writer = await harness.client(port)
    harness.pausable(writer).pause_reading()
    writer.write(GET)
    await harness.eventually(lambda: bool(disconnects))
    await harness.eventually(lambda: server.num_connections == 0)
