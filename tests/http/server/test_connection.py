"""The connection's state machine without sockets: how bytes are split must not matter."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.http.limits import ClientLimits
from cortex.http.server.connection import ClientConnection
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response, Server
from cortex.http.ticker import Ticker

from ...examples import MANY


class Wire:
    """A transport that records what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        assert isinstance(data, bytes)
        assert data
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = write_eof = close

    def can_write_eof(self) -> bool:
        return True

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return "127.0.0.1", 1

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class Drive:
    """A connection on a fake transport, and its exchanges."""

    def __init__(self, *, at_once: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.exchanges: list[Exchange] = []
        self.at_once = at_once
        self.server = Server(
            self.handle,
            lambda error, path: Response(error.status, (), error.code.encode()),
            Ticker(self.loop),
            ClientLimits(),
        )
        self.wire = Wire()
        self.connection = ClientConnection(self.server, self.loop)
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]

    def handle(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        if self.at_once:
            exchange.respond(200, (), b"")

    def turn(self) -> None:
        for _ in range(5):
            self.loop.run_until_complete(asyncio.sleep(0))

    def requests(self) -> list[tuple[bytes, bytes, bytes]]:
        return [(exchange.request.method, exchange.request.path, exchange.request.body) for exchange in self.exchanges]

    def close(self) -> None:
        self.connection.connection_lost(None)
        assert self.server.num_exchanges == 0
        assert not self.server.connections
        assert self.server.buffered.num_bytes == 0
        self.loop.close()


def encode(method: bytes, path: bytes, body: bytes, chunk_bytes: int) -> bytes:
    if not chunk_bytes:
        return b"%b %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (method, path, len(body), body)
    pieces = [body[start : start + chunk_bytes] for start in range(0, len(body), chunk_bytes)]
    chunks = b"".join(b"%x;e=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"%b %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % (method, path, chunks)


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([b"POST", b"GET", b"DELETE"]),
        st.sampled_from([b"/", b"/v1/models/a%2Fb"]),
        st.binary(max_size=30),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=5,
)


@MANY
@given(requests=REQUESTS, cuts=st.lists(st.integers(0, 800), max_size=10), at_once=st.booleans(), data=st.data())
def test_requests_do_not_depend_on_how_their_bytes_arrive(
    requests: list[tuple[bytes, bytes, bytes, int]], cuts: list[int], at_once: bool, data: st.DataObject
) -> None:
    stream = b"".join(encode(*request) for request in requests)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    drive = Drive(at_once=at_once)
    for start, end in pairwise(edges):
        drive.connection.data_received(stream[start:end])
        if data.draw(st.booleans()):
            drive.turn()
        if not at_once and drive.exchanges and data.draw(st.booleans()) and not drive.exchanges[-1].closed:
            drive.exchanges[-1].respond(200, (), b"")
    for _ in range(2 * len(requests)):
        drive.turn()
        if drive.exchanges and not drive.exchanges[-1].closed:
            drive.exchanges[-1].respond(200, (), b"")
    assert drive.requests() == [request[:3] for request in requests]
    assert drive.wire.written.count(b"HTTP/1.1 200 OK\r\n") == len(requests)
    assert not drive.wire.closed
    drive.close()


@MANY
@given(
    request=REQUESTS,
    damage=st.lists(st.tuples(st.integers(0, 300), st.binary(max_size=4)), min_size=1, max_size=4),
    junk=st.binary(max_size=40),
)
def test_damaged_bytes_never_crash(
    request: list[tuple[bytes, bytes, bytes, int]], damage: list[tuple[int, bytes]], junk: bytes
) -> None:
    stream = bytearray(b"".join(encode(*one) for one in request) + junk)
    for position, replacement in damage:
        stream[position : position + len(replacement)] = replacement
    drive = Drive(at_once=True)
    drive.connection.data_received(bytes(stream))
    for _ in range(10):
        drive.turn()
    written = drive.wire.written
    num_refusals = sum(written.count(b"HTTP/1.1 %d " % status) for status in (400, 413, 431))
    assert written.count(b"HTTP/1.1 200 OK\r\n") == len(drive.exchanges)
    assert num_refusals <= 1
    assert drive.wire.closed or not num_refusals
    if num_refusals:
        before = len(written)
        drive.connection.data_received(encode(b"GET", b"/behind", b"", 0))
        assert len(drive.wire.written) == before, "nothing is served after a rejection"
    drive.close()


def test_bytes_that_arrive_as_an_exchange_ends_stay_in_order() -> None:
    drive = Drive(at_once=False)
    first, second = (encode(b"POST", b"/", body, 0) for body in (b"first", b"second"))
    drive.connection.data_received(first + b"")
    drive.connection.data_received(second[:30])
    drive.exchanges[0].respond(200, (), b"")
    drive.connection.data_received(second[30:])  # before the loop came round
    drive.turn()
    assert [body for _, _, body in drive.requests()] == [b"first", b"second"]
    drive.close()


@pytest.mark.parametrize("seconds", [9.0, 11.0])
def test_deadline_depends_on_the_phase(seconds: float) -> None:
    drive = Drive(at_once=False)
    now = drive.loop.time()
    drive.connection.data_received(b"GET / HT")
    drive.connection.on_tick(now + seconds)
    assert (b"HTTP/1.1 408 " in drive.wire.written) == (seconds > ClientLimits().head_s)
    drive.close()


@pytest.mark.parametrize("rate", [0.9, 1.1])
def test_accepts_a_slow_body_above_the_minimum_rate(rate: float) -> None:
    limits = ClientLimits()
    drive = Drive(at_once=False)
    clock = drive.loop.time()
    drive.loop.time = lambda: clock  # type: ignore[method-assign]
    drive.connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n")
    for _ in range(100):
        clock += 0.9 * limits.body_s
        drive.connection.on_tick(clock)
        drive.connection.data_received(bytes(int(rate * 0.9 * limits.body_s * limits.body_bytes_per_s)))
    assert (b"HTTP/1.1 408 " in drive.wire.written) == (rate < 1)
    drive.close()


def test_times_out_a_body_that_stops() -> None:
    limits = ClientLimits()
    drive = Drive(at_once=False)
    now = drive.loop.time()
    drive.connection.data_received(
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n" + bytes(50_000_000)
    )
    drive.connection.on_tick(now + 0.9 * limits.body_s)
    assert drive.wire.written == b""
    drive.connection.on_tick(now + 1.5 * limits.body_s)
    assert b"HTTP/1.1 408 " in drive.wire.written
    drive.close()


def test_large_body_does_not_count_towards_the_next_head() -> None:
    drive = Drive(at_once=True)
    first, second = encode(b"POST", b"/", bytes(200_000), 0), encode(b"GET", b"/", b"", 0)
    drive.connection.data_received(first + second[:10])
    drive.turn()
    drive.connection.data_received(second[10:])
    drive.turn()
    assert len(drive.exchanges) == 2
    drive.close()


def test_running_exchange_has_no_deadline() -> None:
    drive = Drive(at_once=False)
    drive.connection.data_received(encode(b"GET", b"/", b"", 0))
    drive.connection.on_tick(drive.loop.time() + 1e9)
    assert not drive.wire.closed
    drive.close()
