"""Calls to nodes that keep, close or reset connections, or are silent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cortex.http.upstream.faults import ConnectFailed, ConnectionLost, MalformedResponse, UpstreamSilent

from ...ports import free_port
from ...waiting import WAIT_S
from .recorder import OK, Recorder

if TYPE_CHECKING:
    from ..conftest import Harness


async def test_reuses_the_most_recent_connection_first(harness: Harness) -> None:
    node = await harness.responding(OK)
    pool = harness.pool(node.origin)
    for _ in range(5):
        assert (await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)).body == b"ok"
    assert node.num_connections == 1
    await asyncio.gather(*(pool.fetch(b"GET", b"/", timeout_s=WAIT_S) for _ in range(4)))
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
    await pool.fetch(b"POST", b"/v1?a=b", headers, b"body", timeout_s=WAIT_S)
    head, body = node.requests[0]
    assert head == (
        b"POST /base/v1?a=b HTTP/1.1\r\nauthorization: Bearer me\r\nx-other: 2\r\n"
        b"host: 127.0.0.1:%d\r\ncontent-length: 4\r\n\r\n" % node.port
    )
    assert body == b"body"


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
        assert (await pool.fetch(b"POST", b"/", (), b"x" * 1000, timeout_s=WAIT_S)).status == 200
    assert served == 4
    assert node.num_connections == 4


async def test_does_not_retry_when_a_new_connection_dies(harness: Harness) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await node.read(reader)
        harness.reset(writer)

    node = await harness.node(die)
    pool = harness.pool(node.origin)
    with pytest.raises(ConnectionLost, match="before responding"):
        await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)
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
    await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)
    with pytest.raises(ConnectionLost, match="in the middle"):
        await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)
    assert node.num_connections == 1


async def test_unreachable_node_is_a_connect_failure(harness: Harness) -> None:
    origin = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectFailed, match=origin):
        await harness.pool(origin).fetch(b"GET", b"/", timeout_s=WAIT_S)
    with pytest.raises(ConnectFailed, match=r"no connection to http://no-such-host.invalid:1: [A-Z]"):  # no `[Errno`
        await harness.pool("http://no-such-host.invalid:1").fetch(b"GET", b"/", timeout_s=WAIT_S)


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
    pool, later = harness.pool(node.origin, silence_s=1.0), Recorder()
    call = pool.send(b"GET", b"/", (), b"", sink)
    call.pause()
    pool.send(b"GET", b"/", (), b"", later)
    await later.over.wait()
    assert isinstance(later.fault, UpstreamSilent)
    call.resume()  # its silence counts from here
    resumed.set()
    await sink.over.wait()
    assert sink.body == b"ok"


async def test_call_paused_before_it_connects_reads_nothing_until_resumed(harness: Harness) -> None:
    node = await harness.responding(OK)
    sink = Recorder()
    pool = harness.pool(node.origin)
    call = pool.send(b"GET", b"/", (), b"", sink)
    call.pause()
    assert (await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)).body == b"ok"
    assert sink.calls == []
    call.resume()
    await sink.over.wait()
    assert sink.body == b"ok"


async def test_does_not_reuse_a_connection_that_the_node_closes(harness: Harness) -> None:
    node = await harness.responding(OK.replace(b"Content", b"Connection: close\r\nContent"))
    pool = harness.pool(node.origin)
    await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)
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
    response = await pool.fetch(b"POST", b"/", (), bytes(30_000_000), timeout_s=WAIT_S)
    assert response.status == 413
    assert pool.num_idle == 0


async def test_closes_an_idle_connection_after_keep_s(harness: Harness) -> None:
    node = await harness.responding(OK)
    pool = harness.pool(node.origin, keep_s=0.1)
    await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)
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
    with pytest.raises(UpstreamSilent, match=r"did not respond to /health within 0\.1 s"):
        await harness.pool(node.origin).fetch(b"GET", b"/health?since=7", timeout_s=0.1)
    await harness.eventually(lambda: node.num_open == 0)
    node = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + b"x" * 99)
    with pytest.raises(MalformedResponse, match="more than"):
        await harness.pool(node.origin, fetch_body_bytes=50).fetch(b"GET", b"/", timeout_s=WAIT_S)


async def test_close_lets_calls_end_and_keeps_no_connection(harness: Harness) -> None:
    node = await harness.responding(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab", b"cd")
    pool = harness.pool(node.origin)
    await pool.fetch(b"GET", b"/", timeout_s=WAIT_S)
    sink = Recorder()
    pool.send(b"GET", b"/", (), b"", sink)
    pool.close()
    await sink.over.wait()
    assert sink.body == b"abcd"
    await harness.eventually(lambda: node.num_open == 0)
    assert pool.num_idle == 0
