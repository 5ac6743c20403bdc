"""The deadline for the head of a request, with raw connections to the API of a node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cortex.http.limits import ClientLimits

from ...waiting import WAIT_S
from .served import served

HEAD_S = 1.0
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

Open = Callable[[], Any]


@pytest.fixture
async def open_connection(node: Any) -> AsyncIterator[Open]:
    writers: list[asyncio.StreamWriter] = []
    limits = ClientLimits(head_s=HEAD_S, num_connections=1, body_bytes=1000)
    async with served(node, limits=limits) as address, asyncio.timeout(WAIT_S):

        async def open() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*address)
            writers.append(writer)
            return reader, writer

        yield open
        for writer in writers:
            writer.close()


async def drip(writer: asyncio.StreamWriter) -> None:
    """Sends a header that never ends, faster than any deadline of a pause."""
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ")
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(HEAD_S / 20)


async def outlast_deadline(node: Any) -> None:
    """Returns when a head that begins now has missed the deadline."""
    async with served(node, limits=ClientLimits(head_s=HEAD_S)) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HEAD[:10])
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()


async def read_response(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head


@pytest.mark.parametrize("is_dripping", [False, True], ids=["silent", "dripping"])
@pytest.mark.parametrize("num_requests", [0, 1], ids=["first request", "later request"])
async def test_connection_whose_head_does_not_arrive_is_closed_and_makes_room(
    open_connection: Open, is_dripping: bool, num_requests: int
) -> None:
    reader, writer = await open_connection()
    for _ in range(num_requests):
        writer.write(HEAD)
        assert b" 200 " in await read_response(reader)
    if not is_dripping and num_requests:
        writer.write(HEAD[:10])
    dripping = asyncio.create_task(drip(writer)) if is_dripping else None
    try:
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    except ConnectionResetError:
        assert is_dripping, "a byte that arrives after the close may overtake the response"
    if dripping is not None:
        dripping.cancel()
    writer.close()
    response = b""
    while b" 200 " not in response:  # until the first connection has ended
        other_reader, other_writer = await open_connection()
        other_writer.write(HEAD)
        response = await read_response(other_reader)


async def test_connection_without_a_begun_head_stays_after_its_first_request(node: Any, open_connection: Open) -> None:
    reader, writer = await open_connection()
    for _ in range(2):
        writer.write(HEAD)
        assert b" 200 " in await read_response(reader)
        await outlast_deadline(node)


async def test_deadline_does_not_apply_to_a_body(node: Any, open_connection: Open) -> None:
    reader, writer = await open_connection()
    body = b'{"model":"none"}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body))
    for byte in body:
        await asyncio.sleep(2 * HEAD_S / len(body))
        writer.write(bytes([byte]))
    assert b" 400 " in await read_response(reader)
    await outlast_deadline(node)
    writer.write(HEAD)
    assert b" 200 " in await read_response(reader)


async def test_malformed_request_is_rejected_at_once(open_connection: Open) -> None:
    reader, writer = await open_connection()
    writer.write(b"nonsense\r\n\r\n")
    assert b" 400 " in (await reader.read())[:20]
