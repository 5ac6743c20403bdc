"""Calls to nodes that keep, close or reset connections, are silent, or send malformed responses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import pytest

from cortex.http.chunks import SIZE_LINES, payload
from cortex.http.request import Headers
from cortex.http.upstream.connection import UpstreamConnection
from cortex.http.upstream.faults import ConnectFailed, ConnectionLost, MalformedResponse, UpstreamFault, UpstreamSilent
from cortex.http.upstream.pool import Pool

if TYPE_CHECKING:
    from ..conftest import Harness


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Recorder:
    """A sink that records its calls and checks their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.body = b""
        self.chunks: list[bytes] = []
        self.fault: UpstreamFault | None = None
        self.over = asyncio.Event()

    def on_head(self, status: int, headers: Headers, content_length: int | None) -> None:
        assert self.calls == []
        self.calls.append(f"head {status} {content_length}")

    def on_data(self, data: bytes) -> None:
        assert data
        assert self.calls
        assert not self.over.is_set()
        self.body += data

    def chunk_receiver(self) -> Callable[[bytes], bool]:
        return self.take_chunk

    def take_chunk(self, wire: bytes) -> bool:
        assert self.calls
        assert not self.over.is_set()
        if len(wire) >= len(SIZE_LINES) or not wire.startswith(SIZE_LINES[len(wire)]) or not wire.endswith(b"\r\n"):
            return False
        self.body += payload(wire)
        self.chunks.append(wire)
        return True

    def on_end(self) -> None:
        assert not self.over.is_set()
        self.calls.append("end")
        self.over.set()

    def on_fault(self, fault: UpstreamFault) -> None:
        assert not self.over.is_set()
        self.fault = fault
        self.over.set()


async def test_reuses_the_most_recent_connection_first(harness: Harness) -> None:
    node = await harness.responding(OK)
    pool = harness.pool(node.origin)
    for _ in range(5):
        assert (await pool.fetch(b"GET", b"/", timeout_s=30)).body == b"ok"
    assert node.num_connections == 1
    await asyncio.gather(*(pool.fetch(b"GET", b"/", timeout_s=30) for _ in range(4)))
    assert pool.num_idle == node.num_connections <= 5
    assert pool.num_calls == 0


async def test_frames_the_request_itself_and_drops_hop_by_hop_headers(harness: Harness) -> None:
    node = await harness.responding(OK)
    pool = harness.pool(node.origin + "/base/")
    headers = (
        (b"host", b"evil"),
        (b"connection", b"keep-alive, x-secret"),
        (b"x-secret", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"99"),
        (b"te", b"trailers"),
        (b"upgrade", b"h2c"),
        (b"accept-encoding", b"gzip"),
        (b"proxy-authorization", b"x"),
        (b"authorization", b"Bearer me"),
        (b"x-other", b"2"),
    )
    await pool.fetch(b"POST", b"/v1?a=b", headers, b"body", timeout_s=30)
    head, body = node.requests[0]
    assert head == (
        b"POST /base/v1?a=b HTTP/1.1\r\nauthorization: Bearer me\r\nx-other: 2\r\n"
        b"host: 127.0.0.1:%d\r\ncontent-length: 4\r\n\r\n" % node.port
    )
    assert body == b"body"


async def test_drops_hop_by_hop_headers_of_a_response_and_those_that_connection_lists(harness: Harness) -> None:
    listed = b"X-Mine: 1\r\nConnection: keep-alive, x-mine\r\nKeep-Alive: 9\r\nDate: now\r\nX-Yours: 2\r\nContent"
    node = await harness.responding(OK.replace(b"Content", listed))
    pool = harness.pool(node.origin)
    for _ in range(2):
        response = await pool.fetch(b"GET", b"/", timeout_s=30)
        assert list(response.headers) == [(b"x-yours", b"2")]


@pytest.mark.parametrize(
    ("method", "target", "header"),
    [
        (b"GET", b"/ HTTP/1.1\r\nX: y", (b"a", b"b")),
        (b"GET", b"/a b", (b"a", b"b")),
        (b"GET / HTTP/1.1\r\n", b"/", (b"a", b"b")),
        (b"HEAD", b"/", (b"a", b"b")),
        (b"GET", b"/", (b"a", b"b\r\nc: d")),
        (b"GET", b"/", (b"a\nb", b"c")),
    ],
)
async def test_rejects_requests_that_would_inject_bytes(
    harness: Harness, method: bytes, target: bytes, header: tuple[bytes, bytes]
) -> None:
    node = await harness.responding(OK)
    pool = harness.pool(node.origin)
    with pytest.raises(ValueError, match=r"cannot send|line break"):
        pool.send(method, target, (header,), b"", Recorder())
    assert pool.num_calls == 0
    assert node.num_connections == 0


@pytest.mark.parametrize("origin", ["node:13131", "ftp://node", "http://", "http://me:secret@node", "http://a?b"])
async def test_rejects_an_origin_that_is_not_an_address(harness: Harness, origin: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        harness.pool(origin)


async def test_retries_once_when_an_idle_connection_was_dead(harness: Harness) -> None:
    served = 0

    async def one_request_per_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await node.read(reader)
        served += 1
        writer.write(OK)
        await reader.readexactly(1)  # the next request has begun to arrive: die
        harness.reset(writer)

    node = await harness.node(one_request_per_connection)
    pool = harness.pool(node.origin)
    for _ in range(4):
        assert (await pool.fetch(b"POST", b"/", (), b"x" * 1000, timeout_s=30)).status == 200
    assert served == 4
    assert node.num_connections == 4


async def test_does_not_retry_when_a_new_connection_dies(harness: Harness) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        harness.reset(writer)

    node = await harness.node(die)
    pool = harness.pool(node.origin)
    with pytest.raises(ConnectionLost, match="before responding"):
        await pool.fetch(b"GET", b"/", timeout_s=30)
    assert node.num_connections == 1


async def test_does_not_retry_after_the_first_byte(harness: Harness) -> None:
    async def die_second_time(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(OK)
        await node.read(reader)
        writer.write(b"HTTP/1.1 2")
        await writer.drain()
        await asyncio.sleep(0.02)
        harness.reset(writer)

    node = await harness.node(die_second_time)
    pool = harness.pool(node.origin)
    await pool.fetch(b"GET", b"/", timeout_s=30)
    with pytest.raises(ConnectionLost, match="in the middle"):
        await pool.fetch(b"GET", b"/", timeout_s=30)
    assert node.num_connections == 1


async def test_unreachable_node_is_a_connect_failure(harness: Harness) -> None:
    node = await harness.responding(OK)
    node.close()
    await asyncio.sleep(0.01)
    with pytest.raises(ConnectFailed, match=node.origin):
        await harness.pool(node.origin).fetch(b"GET", b"/", timeout_s=30)
    with pytest.raises(ConnectFailed):
        await harness.pool("http://no-such-host.invalid:1").fetch(b"GET", b"/", timeout_s=30)


async def test_fails_a_silent_node_but_not_a_slow_one(harness: Harness) -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n")
        for _ in range(6):
            writer.write(b".")
            await asyncio.sleep(0.25)
        await reader.read()  # until the gateway hangs up

    node = await harness.node(slow)
    sink = Recorder()
    harness.pool(node.origin, silence_s=1.0).send(b"GET", b"/", (), b"", sink)
    await sink.over.wait()
    assert sink.body == b"." * 6
    assert isinstance(sink.fault, UpstreamSilent)
    await harness.eventually(lambda: node.num_open == 0)


async def test_paused_node_does_not_count_as_silent(harness: Harness) -> None:
    resumed = asyncio.Event()

    async def waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        await resumed.wait()
        await asyncio.sleep(0.1)
        writer.write(OK)
        await reader.read()

    node = await harness.node(waiting)
    sink = Recorder()
    call = harness.pool(node.origin, silence_s=1.0).send(b"GET", b"/", (), b"", sink)
    call.pause()
    await asyncio.sleep(1.5)
    call.resume()  # its silence counts from here
    resumed.set()
    await sink.over.wait()
    assert sink.body == b"ok"


async def test_call_paused_before_it_connects_reads_nothing_until_resumed(harness: Harness) -> None:
    node = await harness.responding(OK)
    sink = Recorder()
    call = harness.pool(node.origin).send(b"GET", b"/", (), b"", sink)
    call.pause()
    await asyncio.sleep(0.1)
    assert sink.calls == []
    call.resume()
    await sink.over.wait()
    assert sink.body == b"ok"


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
        await harness.pool(node.origin).fetch(b"GET", b"/", timeout_s=30)
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
        await harness.pool(node.origin).fetch(b"GET", b"/", timeout_s=30)


async def test_response_without_a_length_ends_when_the_node_closes(harness: Harness) -> None:
    async def old_style(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nold ")
        await asyncio.sleep(0.02)
        writer.write(b"style")

    node = await harness.node(old_style)
    response = await harness.pool(node.origin).fetch(b"GET", b"/", timeout_s=30)
    assert response.body == b"old style"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\nTrailer: z\r\n\r\n",
    ],
)
async def test_reads_unusual_responses_and_keeps_the_connection(harness: Harness, answer: bytes) -> None:
    node = await harness.responding(answer)
    pool = harness.pool(node.origin)
    for _ in range(3):
        response = await pool.fetch(b"GET", b"/", timeout_s=30)
        assert response.body in (b"ok", b"")
        assert b"trailer" not in dict(response.headers)
    assert node.num_connections == 1


async def test_surplus_bytes_never_become_the_next_response(harness: Harness) -> None:
    forged = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    node = await harness.responding(OK + forged)
    pool = harness.pool(node.origin)
    for _ in range(3):
        assert (await pool.fetch(b"GET", b"/", timeout_s=30)).body == b"ok"
    late = await harness.responding(OK, forged)
    pool = harness.pool(late.origin)
    for _ in range(3):
        assert (await pool.fetch(b"GET", b"/", timeout_s=30)).body == b"ok"
        async with asyncio.timeout(30):
            while pool.num_idle:
                await asyncio.sleep(0.005)  # until the late bytes have come
    assert node.num_connections == late.num_connections == 3


async def test_does_not_reuse_a_connection_that_the_node_closes(harness: Harness) -> None:
    node = await harness.responding(OK.replace(b"Content", b"Connection: close\r\nContent"))
    pool = harness.pool(node.origin)
    await pool.fetch(b"GET", b"/", timeout_s=30)
    assert pool.num_idle == 0


async def test_delivers_a_response_before_the_end_of_the_request_and_does_not_reuse_the_connection(
    harness: Harness,
) -> None:
    async def reject_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await asyncio.sleep(0.2)

    node = await harness.node(reject_early)
    pool = harness.pool(node.origin)
    response = await pool.fetch(b"POST", b"/", (), bytes(30_000_000), timeout_s=30)
    assert response.status == 413
    assert pool.num_idle == 0


async def test_closes_an_idle_connection_after_keep_s(harness: Harness) -> None:
    node = await harness.responding(OK)
    pool = harness.pool(node.origin, keep_s=0.1)
    await pool.fetch(b"GET", b"/", timeout_s=30)
    assert pool.num_idle == 1
    await harness.eventually(lambda: pool.num_idle == 0 and node.num_open == 0)


async def test_abort_reaches_the_node_in_every_phase(harness: Harness) -> None:
    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1\r\n.\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)

    node = await harness.node(stream)
    pool = harness.pool(node.origin)
    connecting = Recorder()
    pool.send(b"GET", b"/", (), b"", connecting).abort()
    assert pool.num_calls == 0
    await harness.eventually(lambda: pool.num_idle == 1)  # the connection is there for the next call
    streaming = Recorder()
    call = pool.send(b"GET", b"/", (), b"", streaming)
    await harness.eventually(lambda: len(streaming.body) > 2)
    call.abort()
    num_bytes = len(streaming.body)
    await harness.eventually(lambda: node.num_open == 0)
    assert len(streaming.body) == num_bytes
    assert not connecting.over.is_set()
    assert not streaming.over.is_set()
    call.abort()
    assert pool.num_calls == 0


async def test_fetch_has_a_total_timeout_and_a_size_limit(harness: Harness) -> None:
    node = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx")
    with pytest.raises(UpstreamSilent):
        await harness.pool(node.origin).fetch(b"GET", b"/", timeout_s=0.1)
    await harness.eventually(lambda: node.num_open == 0)
    node = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + b"x" * 99)
    with pytest.raises(MalformedResponse, match="more than"):
        await harness.pool(node.origin, fetch_body_bytes=50).fetch(b"GET", b"/", timeout_s=30)


async def test_close_lets_calls_end_and_keeps_no_connection(harness: Harness) -> None:
    node = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab", b"cd")
    pool = harness.pool(node.origin)
    await pool.fetch(b"GET", b"/", timeout_s=30)
    sink = Recorder()
    pool.send(b"GET", b"/", (), b"", sink)
    pool.close()
    await sink.over.wait()
    assert sink.body == b"abcd"
    await harness.eventually(lambda: node.num_open == 0)
    assert pool.num_idle == 0


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
