"""Bodies that are written to a file as they arrive: bounded memory, bounded disk, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from cortex.http.composed_body import ComposedBody, FileRange, new_spool
from cortex.http.limits import ClientLimits, ClientShares
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.http.server.parser import Spooled
from cortex.http.server.server import Response, Server
from cortex.http.ticker import Ticker
from cortex.http.upstream.faults import UpstreamFault
from cortex.http.upstream.pool import Pool

from ...waiting import WAIT_S, until

MIB = 1 << 20


def num_spools() -> int:
    """Files without a name that this process has open."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing itself
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("(deleted)" in link for link in links)


@pytest.fixture(autouse=True)
def no_file_is_left() -> Iterator[None]:
    before = num_spools()
    yield
    assert num_spools() <= before, "files of earlier tests may have been closed meanwhile"


class Whole:
    """A sink that collects a response."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status, self._body = 0, b""

    def on_head(self, status: int, headers: Headers, content_length: int | None) -> None:
        self._status = status

    def chunk_receiver(self) -> None: ...

    def on_data(self, data: bytes) -> None:
        self._body += data

    def on_end(self) -> None:
        self.ended.set_result((self._status, self._body))

    def on_fault(self, fault: UpstreamFault) -> None:
        self.ended.set_exception(fault)


class Site:
    """A server that keeps the requests that it gets, and a pool of connections to it."""

    def __init__(self, **limits: Any) -> None:
        self.requests: list[Any] = []
        self.responds_early = False
        bounds = ClientLimits(body_bytes=MIB, **limits)
        ticker = Ticker(asyncio.get_running_loop())
        self.server = Server(
            self._handle,
            lambda error, _: Response(error.status, (), error.message.encode()),
            ticker,
            bounds,
            lambda _: Spooled(bounds.upload_bytes),
        )
        self._ticker = ticker

    async def __aenter__(self) -> Site:
        host, port = await self.server.listen("127.0.0.1", 0)
        self.pool = Pool(f"http://{host}:{port}", self._ticker)
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.pool.close()
        await self.server.close()
        assert self.server.spooled.num_bytes == 0
        assert self.server.buffered.num_bytes == 0

    def _handle(self, exchange: Exchange) -> None:
        request = exchange.request
        upload = request.upload
        self.requests.append(request.body if upload is None else upload[: len(upload)])
        exchange.respond(200, (), b"file" if upload is not None else b"memory")

    async def send(self, body: Any) -> tuple[int, bytes]:
        sink = Whole()
        self.pool.send(b"POST", b"/x", (), body, sink)
        return await asyncio.wait_for(sink.ended, WAIT_S)


@pytest.mark.parametrize("num_bytes", [0, 1000, MIB, MIB + 1, 9 * MIB + 7])
async def test_a_long_body_arrives_through_a_file(num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    async with Site() as site:
        for _ in range(2):  # on the same connection
            assert await site.send(data) == (200, b"file" if num_bytes > MIB else b"memory")
        assert site.requests == [data, data]


async def test_a_body_of_pieces_is_sent_as_one() -> None:
    file = new_spool()
    stored = os.urandom(3 * MIB)
    file.write(stored)
    body = ComposedBody((b"first", FileRange(file, 10, 2 * MIB), b"", FileRange(file, 5, 7), b"last"))
    whole = b"first" + stored[10 : 10 + 2 * MIB] + stored[5:12] + b"last"
    assert len(body) == len(whole)
    assert body[4 : 2 * MIB + 20] == whole[4 : 2 * MIB + 20]
    for wanted in (
        b"first",
        b"last",
        whole[2 * MIB - 3 : 2 * MIB + 30],
        whole[(1 << 18) - 2 : (1 << 18) + 2],
        b"\0" * 99,
    ):
        assert body.find(wanted) == whole.find(wanted)
    async with Site() as site:
        assert await site.send(body) == (200, b"file")
        assert site.requests == [whole]


@pytest.mark.parametrize(
    ("limits", "status", "reason"),
    [
        ({"upload_bytes": 3 * MIB}, 413, b"send less"),
        ({"spooled_bytes": 3 * MIB}, 503, b"on disk"),
        ({"spooled_bytes_per_client": 3 * MIB}, 503, b"on disk"),
    ],
)
async def test_disk_is_bounded(limits: dict[str, int], status: int, reason: bytes) -> None:
    async with Site(**limits) as site:
        found, message = await site.send(bytes(4 * MIB))
        assert (found, reason in message) == (status, True), message
        assert await site.send(bytes(2 * MIB)) == (200, b"file")


def test_one_client_leaves_room_for_others() -> None:
    shares = ClientShares(100, 60)
    shares.add("2001:db8::1", 50)
    assert [shares.has_room(client, 20) for client in ("2001:db8::2", "10.0.0.1")] == [False, True]
    shares.add("10.0.0.1", 40)
    assert not shares.has_room("10.0.0.1", 20)  # there is no more in all
    shares.add("2001:db8::2", -50)
    shares.add("10.0.0.1", -40)
    assert shares.num_bytes == 0
    assert shares.has_room("2001:db8::1", 60)


async def test_a_client_that_leaves_leaves_no_file() -> None:
    async with Site() as site:
        port = int(site.pool.origin.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            writer.write(b"100000\r\n" + bytes(MIB) + b"\r\n")
        await writer.drain()
        await until(lambda: site.server.spooled.num_bytes)
        writer.close()
        await until(lambda: not site.server.num_connections)
        assert site.server.spooled.num_bytes == 0


async def test_a_disk_that_is_full_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cortex.http.composed_body.new_spool", full)
    async with Site() as site:
        status, message = await site.send(bytes(2 * MIB))
        assert (status, message) == (
            503,
            b"the request body cannot be written to disk (No space left on device); try again later",
        )
