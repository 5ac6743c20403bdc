"""Responses of nodes: malformed, cut, unusual, and chunks wherever reads end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from cortex.http.upstream.connection import UpstreamConnection
from cortex.http.upstream.faults import ConnectionLost, MalformedResponse
from cortex.http.upstream.pool import Pool

from ...waiting import WAIT_S
from .recorder import OK, Recorder

if TYPE_CHECKING:
    from ..conftest import Harness


async def test_drops_hop_by_hop_headers_of_a_response_and_those_that_connection_lists(harness: Harness) -> None:
    listed = b"X-Mine: 1\r\nConnection: keep-alive, x-mine\r\nKeep-Alive: 9\r\nDate: now\r\nServer: s\r\n"
    listed += b"X-Yours: 2\r\nContent"
    node = await harness.responding(OK.replace(b"Content", listed))
    pool = harness.pool(node.origin)
    for _ in range(2):
        response = await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)
        assert list(response.headers) == [(b"x-yours", b"2")]


NONSENSE = {
    "garbage": b"I am not a web server\r\n\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x28",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "length and chunking": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "unknown coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok",
    "folded header": b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 2\r\n\r\nok",
    "unasked upgrade": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\nA: " + b"a" * 300_000,
    "bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
}


@pytest.mark.parametrize("name", NONSENSE)
async def test_malformed_response_is_a_fault_and_closes_the_connection(harness: Harness, name: str) -> None:
    node = await harness.responding(NONSENSE[name])
    with pytest.raises(MalformedResponse, match=node.origin):
        await harness.pool(node.origin).fetch(b"GET", b"/", timeout_s=WAIT_S)
    await harness.eventually(lambda: node.num_open == 0)


CUT = {
    "in the head": b"HTTP/1.1 200 OK\r\nContent-",
    "in a length": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
    "in a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf",
    "before the last chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
}


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("with_reset", [False, True])
async def test_incomplete_response_is_a_fault(harness: Harness, name: str, with_reset: bool) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(CUT[name])
        await writer.drain()
        await asyncio.sleep(0.02)
        if with_reset:
            harness.reset(writer)

    node = await harness.node(half)
    with pytest.raises(ConnectionLost, match="in the middle"):
        await harness.pool(node.origin).fetch(b"GET", b"/", timeout_s=WAIT_S)


async def test_response_without_a_length_ends_when_the_node_closes(harness: Harness) -> None:
    async def old_style(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nold ")
        await asyncio.sleep(0.02)
        writer.write(b"style")

    node = await harness.node(old_style)
    response = await harness.pool(node.origin).fetch(b"GET", b"/", timeout_s=WAIT_S)
    assert response.body == b"old style"


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\nTrailer: z\r\n\r\n",
    ],
)
async def test_reads_unusual_responses_and_keeps_the_connection(harness: Harness, sent: bytes) -> None:
    node = await harness.responding(sent)
    pool = harness.pool(node.origin)
    for _ in range(3):
        response = await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)
        assert response.body in (b"ok", b"")
        assert b"trailer" not in dict(response.headers)
    assert node.num_connections == 1


async def test_surplus_bytes_never_become_the_next_response(harness: Harness) -> None:
    forged = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    node = await harness.responding(OK + forged)
    pool = harness.pool(node.origin)
    for _ in range(3):
        assert (await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)).body == b"ok"
    late = await harness.responding(OK, forged)
    pool = harness.pool(late.origin)
    for _ in range(3):
        assert (await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)).body == b"ok"
        await harness.eventually(lambda: not pool.num_idle)  # the late bytes have come
    assert node.num_connections == late.num_connections == 3


class Wire(asyncio.Transport):
    """A transport without a socket: the test passes the node's bytes to the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.aborted


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BODIES = (b"data: a\n\n", b"\r\n", b"\r\n\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"x" * 17, b"2\r\n", b"data: b\n\n")


def spelled(number: int, data: bytes) -> bytes:
    """`data` as a chunk, framed in one of many equivalent ways."""
    size_lines = (b"%x", b"%X", b"0%x", b"%x;a=b")
    return size_lines[number % len(size_lines)] % len(data) + b"\r\n" + data + b"\r\n"


Line = tuple[Pool, UpstreamConnection]


@pytest.fixture
async def line(harness: Harness) -> AsyncIterator[Line]:
    """A free connection of a pool, for a test that plays the node."""
    pool = harness.pool("http://nowhere")
    connection = UpstreamConnection(pool)
    connection.connection_made(Wire())
    pool.keep(connection)
    yield pool, connection
    connection.connection_lost(None)


@pytest.mark.parametrize("is_plain", [True, False])
async def test_chunked_response_does_not_depend_on_where_reads_end(line: Line, is_plain: bool) -> None:
    """The parser does not see single whole chunks, so it must be between two chunks when they come."""
    pool, connection = line
    chunks = [spelled(0 if is_plain else number, data) for number, data in enumerate(BODIES)]
    wire = b"".join(chunks) + b"0\r\n\r\n"
    in_three = list(itertools.combinations_with_replacement(range(len(wire)), 2))
    for cuts in [*in_three, range(len(wire)), *(range(start, len(wire), 3) for start in range(3))]:
        recorder = Recorder()
        pool.send(b"GET", b"/", (), b"", recorder)
        connection.data_received(CHUNKED_HEAD)
        for begin, end in itertools.pairwise((0, *cuts, len(wire))):
            if begin < end:
                connection.data_received(wire[begin:end])
        assert recorder.body == b"".join(BODIES), cuts
        assert recorder.calls == ["head 200 None", "end"]
        assert pool.num_idle == 1, "it can carry the next call"


async def test_offers_single_whole_chunks_unparsed(line: Line) -> None:
    pool, connection = line
    recorder = Recorder()
    pool.send(b"GET", b"/", (), b"", recorder)
    connection.data_received(CHUNKED_HEAD + spelled(0, BODIES[0]))
    for data in BODIES[1:]:
        connection.data_received(spelled(0, data))
    assert recorder.chunks == [spelled(0, data) for data in BODIES[1:]]
    connection.data_received(b"0\r\n\r\n")
    assert recorder.body == b"".join(BODIES)
    assert recorder.calls == ["head 200 None", "end"]


@pytest.mark.parametrize("malformed", [b"hello\r\n", b"5\r\nhellohello\r\n", b"\r\n\r\n", b"-5\r\nhello\r\n"])
async def test_detects_malformed_bytes_after_an_unparsed_chunk(line: Line, malformed: bytes) -> None:
    pool, connection = line
    recorder = Recorder()
    pool.send(b"GET", b"/", (), b"", recorder)
    connection.data_received(CHUNKED_HEAD + spelled(0, b"hello"))
    connection.data_received(spelled(0, b"again"))
    assert recorder.chunks == [spelled(0, b"again")]
    connection.data_received(malformed)
    assert isinstance(recorder.fault, MalformedResponse)
    assert pool.num_idle == 0
