"""Connections that switch to WebSockets: frames, handshakes, limits, and clients that do not follow the protocol."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.http.limits import Buffered
from cortex.http.request import Request
from cortex.http.server import websocket
from cortex.http.server.exchange import Exchange
from cortex.http.server.websocket import CloseCode, FrameReader, Message, Opcode, WebSocket, WebSocketFault, encode
from cortex.wire.errors import InvalidValue

from ..conftest import pausable

if TYPE_CHECKING:
    from ..conftest import Harness

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def masked(opcode: int, payload: bytes, *, final: bool = True, mask: bytes = b"abcd") -> bytes:
    """A frame of a client."""
    frame = bytearray(encode(Opcode(opcode), payload))
    head_bytes = len(frame) - len(payload)
    frame[0] = opcode | (0x80 if final else 0)
    frame[1] |= 0x80
    scrambled = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
    return bytes(frame[:head_bytes]) + mask + scrambled


@given(
    st.lists(st.tuples(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.binary(max_size=9)), max_size=4),
    st.lists(st.integers(1, 400), max_size=40),
)
def test_reads_messages_however_they_are_divided(messages: list[tuple[list[bytes], bytes]], cuts: list[int]) -> None:
    """A message has several frames with a ping between them, and arrives in pieces."""
    data, expected = b"", []
    for pieces, ping in messages:
        for index, piece in enumerate(pieces):
            is_last = index == len(pieces) - 1
            data += masked(0 if index else 1, piece, final=is_last, mask=os.urandom(4))
            if not is_last:
                data += masked(9, ping)
                expected.append(Message(Opcode.PING, ping))
        expected.append(Message(Opcode.TEXT, b"".join(pieces)))
    reader, found = FrameReader(10_000), []
    for size in cuts:
        found += reader.feed(data[:size])
        data = data[size:]
    assert found + reader.feed(data) == expected
    assert reader.num_held_bytes == 0


@pytest.mark.parametrize("num_bytes", [0, 125, 126, 65_535, 65_536])
def test_frames_of_all_lengths_read_as_they_were_written(num_bytes: int) -> None:
    payload = os.urandom(num_bytes)
    assert FrameReader(1 << 20).feed(masked(1, payload)) == [Message(Opcode.TEXT, payload)]


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (encode(Opcode.TEXT, b"not masked"), CloseCode.PROTOCOL_ERROR),
        (b"\xc1" + masked(1, b"rsv")[1:], CloseCode.PROTOCOL_ERROR),
        (b"\x83" + masked(1, b"opcode 3")[1:], CloseCode.PROTOCOL_ERROR),
        (masked(0, b"continues nothing"), CloseCode.PROTOCOL_ERROR),
        (masked(1, b"a", final=False) + masked(1, b"b"), CloseCode.PROTOCOL_ERROR),
        (masked(9, b"half a ping", final=False), CloseCode.PROTOCOL_ERROR),
        (masked(8, b"x" * 126), CloseCode.PROTOCOL_ERROR),
        (masked(2, b"binary"), CloseCode.UNSUPPORTED_DATA),
        (masked(1, b"x" * 101), CloseCode.MESSAGE_TOO_BIG),
        (masked(1, b"x" * 60, final=False) + masked(0, b"x" * 41), CloseCode.MESSAGE_TOO_BIG),
        (b"\x81\xff" + b"\xff" * 8 + b"mask", CloseCode.MESSAGE_TOO_BIG),
    ],
)
def test_rejects_frames_that_break_the_protocol_or_a_limit(frame: bytes, code: CloseCode) -> None:
    with pytest.raises(WebSocketFault) as caught:
        FrameReader(100).feed(frame)
    assert caught.value.code == code


def test_accepts_the_handshake_of_the_standard() -> None:
    pairs = [line.split(b": ") for line in HANDSHAKE.split(b"\r\n")[1:-2]]
    headers = [(name.lower(), value) for name, value in pairs]
    request = Request(b"GET", b"/", b"", headers, b"", "")
    assert websocket.is_handshake(request)
    assert dict(websocket.accept_headers(request))[b"sec-websocket-accept"] == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    for name in (b"sec-websocket-key", b"sec-websocket-version", b"connection"):
        others = [pair for pair in headers if pair[0] != name]
        for wrong in (others, [*others, (name, b"nonsense")]):
            with pytest.raises(InvalidValue, match="handshake"):
                websocket.accept_headers(Request(b"GET", b"/", b"", wrong, b"", ""))


class Echo:
    """Sends back what it gets."""

    def __init__(self, socket: WebSocket, *, is_idle: bool) -> None:
        self.socket = socket
        self.got: list[bytes] = []
        self.calls: list[str] = []
        self.is_idle = is_idle

    def on_message(self, text: bytes) -> None:
        self.got.append(text)
        self.socket.send(text)

    def on_client_full(self) -> None:
        self.calls.append("full")

    def on_client_ready(self) -> None:
        self.calls.append("ready")

    def on_closed(self) -> None:
        self.calls.append("closed")


class Opened:
    """A server whose connections all become echoes."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.echoes: list[Echo] = []
        self.buffered = Buffered(1 << 20)
        self.are_idle = True
        """Those that begin later."""

    async def start(self, **limits: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        def handle(exchange: Exchange) -> None:
            socket = WebSocket(self.server.limits, self.buffered)
            self.echoes.append(Echo(socket, is_idle=self.are_idle))
            socket.listen(self.echoes[-1])
            exchange.upgrade(websocket.accept_headers(exchange.request), socket)

        self.server, self.port = await self.harness.server(handle, admit_head=None, **limits)
        return await self.connect()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.harness.client(self.port, HANDSHAKE)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        return reader, writer


@pytest.fixture
def opened(harness: Harness) -> Opened:
    return Opened(harness)


async def closed_with(reader: asyncio.StreamReader) -> int:
    """The code of the close frame, which comes last."""
    rest = await reader.read()
    assert rest[-rest[1] - 2 :][0] == 0x88, rest
    return int.from_bytes(rest[2:4], "big")


async def test_a_connection_sends_messages_and_ends_with_both_close_frames(opened: Opened, harness: Harness) -> None:
    reader, writer = await opened.start()
    writer.write(masked(1, b"hello") + masked(9, b"?"))
    assert await reader.readexactly(7 + 3) == encode(Opcode.TEXT, b"hello") + encode(Opcode.PONG, b"?")
    assert (opened.server.num_connections, opened.server.num_exchanges) == (1, 0)
    writer.write(masked(8, (1000).to_bytes(2, "big")))
    assert await closed_with(reader) == CloseCode.NORMAL
    await harness.eventually(lambda: opened.server.num_connections == 0)
    assert opened.echoes[0].calls == ["closed"]


async def test_a_client_that_breaks_the_protocol_learns_why_and_is_disconnected(
    opened: Opened, harness: Harness
) -> None:
    reader, writer = await opened.start(linger_s=0.05)
    writer.write(masked(2, b"binary") + masked(1, b"not read any more"))
    assert await closed_with(reader) == CloseCode.UNSUPPORTED_DATA
    await harness.eventually(lambda: opened.server.num_connections == 0)
    assert (opened.echoes[0].got, opened.echoes[0].calls) == ([], ["closed"])


async def test_a_client_that_does_not_wait_for_the_switch_is_rejected(opened: Opened) -> None:
    await opened.start()
    reader, _ = await opened.harness.client(opened.port, HANDSHAKE + HANDSHAKE)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 500 ")  # of the harness, for any error


async def test_incomplete_messages_count_as_buffered_and_are_bounded(opened: Opened, harness: Harness) -> None:
    reader, writer = await opened.start(linger_s=0.05)
    writer.write(masked(1, b"x" * 1000, final=False))
    await harness.eventually(lambda: opened.buffered.num_bytes == 1000)
    opened.buffered.max_bytes = 1500
    writer.write(masked(0, b"x" * 1000, final=False))
    assert await closed_with(reader) == CloseCode.TRY_AGAIN_LATER
    await harness.eventually(lambda: opened.buffered.num_bytes == 0)


async def test_nothing_is_read_from_a_client_that_reads_nothing_and_it_is_disconnected(
    opened: Opened, harness: Harness
) -> None:
    _, writer = await opened.start(stall_s=0.3, write_buffer_bytes=10_000)
    pausable(writer).pause_reading()
    message = masked(1, b"x" * 60_000)
    for _ in range(400):
        if writer.is_closing() or "full" in opened.echoes[0].calls:
            break
        writer.write(message)
        await asyncio.sleep(0)
    await harness.eventually(lambda: "full" in opened.echoes[0].calls)
    await harness.eventually(lambda: opened.server.num_connections == 0)
    assert opened.echoes[0].calls[-1] == "closed"


async def test_a_silent_client_is_asked_whether_it_is_there(opened: Opened, harness: Harness) -> None:
    reader, writer = await opened.start(stall_s=0.3, ping_s=0.05)
    for _ in range(3):
        assert await reader.readexactly(2) == encode(Opcode.PING, b"")
        writer.write(masked(10, b""))
    assert await reader.read() == encode(Opcode.PING, b""), "it has not responded to the last one"
    await harness.eventually(lambda: opened.server.num_connections == 0)


async def test_a_connection_that_is_not_used_any_more_is_closed(opened: Opened, harness: Harness) -> None:
    opened.are_idle = False
    reader, _ = await opened.start(linger_s=0.05, unused_s=0.05)
    opened.are_idle = True
    later, _ = await opened.connect()
    assert await closed_with(later) == CloseCode.GOING_AWAY
    assert "closed" not in opened.echoes[0].calls, "something runs for it"
    opened.echoes[0].is_idle = True
    assert await closed_with(reader) == CloseCode.GOING_AWAY
    await harness.eventually(lambda: opened.server.num_connections == 0)


async def test_a_server_that_ends_closes_idle_connections_and_waits_for_others(
    opened: Opened, harness: Harness
) -> None:
    reader, _ = await opened.start(linger_s=0.05)
    busy, writer = await opened.connect()
    opened.echoes[1].is_idle = False
    closing = asyncio.create_task(opened.server.close(grace_s=30))
    assert await closed_with(reader) == CloseCode.GOING_AWAY
    writer.write(masked(1, b"last"))
    assert await busy.readexactly(6) == encode(Opcode.TEXT, b"last")
    opened.echoes[1].is_idle = True
    assert await closed_with(busy) == CloseCode.GOING_AWAY
    await closing
