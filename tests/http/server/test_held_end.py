"""The end of a response that waits for something else than its client."""

from __future__ import annotations

import asyncio

from cortex.http.request import Headers, Request
from cortex.http.server.deferred_end import DeferredEnd
from cortex.http.server.exchange import Exchange, ResponseTransport, SwitchedConnection

from ...waiting import NEVER_S, WAIT_S


class RecordedConnection:
    """Keeps what an exchange writes, and how it ended."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.ends: list[object] = []
        self.ended = asyncio.Event()

    @property
    def transport(self) -> ResponseTransport:
        return self

    def exchange_ended(self, keep_alive: bool) -> None:
        self.ends.append(keep_alive)
        self.ended.set()

    def upgrade(self, headers: Headers, switched: SwitchedConnection) -> None:
        raise AssertionError("nothing is upgraded here")

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abort(self) -> None:
        self.ends.append("aborted")


def begun(max_bytes: int = 1000, max_held_s: float = NEVER_S) -> tuple[RecordedConnection, Exchange, DeferredEnd]:
    connection = RecordedConnection()
    exchange = Exchange(Request(b"POST", b"/v1/responses", b"", (), b"", "127.0.0.1"), connection)
    held = DeferredEnd.of(exchange, max_bytes, max_held_s)
    exchange.start(200, (), None, b"first")
    return connection, exchange, held


async def test_end_is_sent_after_its_release() -> None:
    connection, exchange, held = begun()
    assert b"first" in connection.written.pop()
    held.hold()
    write = exchange.chunk_writer()
    assert write is not None
    write(b"4\r\nlast\r\n")
    exchange.finish()
    assert (connection.written, connection.ends) == ([], [])
    for _ in range(2):
        held.release()
        assert (connection.written, connection.ends) == ([b"4\r\nlast\r\n0\r\n\r\n"], [True])


async def test_what_is_released_before_the_end_passes() -> None:
    connection, exchange, held = begun()
    held.hold()
    held.release()
    held.hold()
    exchange.finish(keep_alive=False)
    assert connection.written[-1] == b"0\r\n\r\n"
    assert connection.ends == [False]


async def test_holds_a_bounded_number_of_bytes() -> None:
    connection, exchange, held = begun(max_bytes=100)
    connection.written.clear()
    held.hold()
    for _ in range(10):
        exchange.write(b"x" * 30)
    assert sum(map(len, connection.written)) > 300
    exchange.finish()
    assert connection.ends == [True]


async def test_aborted_response_is_not_sent_later() -> None:
    connection, exchange, held = begun()
    connection.written.clear()
    held.hold()
    exchange.write(b"rest")
    exchange.abort()
    held.release()
    assert (connection.written, connection.ends) == ([], ["aborted"])


async def test_end_does_not_wait_for_ever() -> None:
    connection, exchange, held = begun(max_held_s=0.01)
    held.hold()
    exchange.finish()
    assert not connection.ends
    await asyncio.wait_for(connection.ended.wait(), WAIT_S)
    assert connection.written[-1] == b"0\r\n\r\n"
