"""Messages between two processes over a Unix stream socket.

A frame is a four-byte length and one msgpack array of messages. It carries everything that was queued since the
previous frame, so messages are batched under load. A frame that is longer than `MAX_FRAME_BYTES` or does not decode
ends its connection, so neither side ever buffers more than that.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Far above any valid frame: a longer one means that the stream is corrupt."""

_ARRAY_HEADER_BYTES = 16
"""Upper bound of what a frame holds besides its messages."""

_JOINED_BYTES = 64 * 1024
"""Frames up to this size are copied into one piece: writing several pieces costs more."""

_LENGTH = struct.Struct("<I")
# Of msgpack: an array with a length of 32 bits, bytes with a length of 32 bits, and no bytes.
_ARRAY_HEADER = struct.Struct(">BI")
_BYTES_HEADER = struct.Struct(">BI")
_BYTES = 0xC6
_NO_BYTES = b"\xc4\x00"
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


class ChannelMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of messages between processes. Encoded by position: both sides are always the same version."""


class ChannelError(Exception):
    """The other side sent bytes that are not a valid message; the connection must be closed."""


class Unsendable(Exception):
    """The message cannot be encoded or is too large; the channel is still usable."""


def encode_frame(messages: Sequence[msgspec.Struct] | Sequence[msgspec.Raw]) -> bytes:
    """One frame with `messages` in order. Raises Unsendable."""
    frame = bytearray(_LENGTH.size)
    try:
        _encoder.encode_into(list(messages), frame, _LENGTH.size)
    except (OverflowError, ValueError) as error:  # a number beyond 64 bits, text that is not Unicode
        raise Unsendable(f"the message cannot be encoded: {error}") from error
    body_bytes = len(frame) - _LENGTH.size
    if body_bytes > MAX_FRAME_BYTES:
        raise Unsendable(f"the message has {body_bytes} bytes, the limit is {MAX_FRAME_BYTES}; send less")
    _LENGTH.pack_into(frame, 0, body_bytes)
    return bytes(frame)


class FrameDecoder(Generic[T]):
    """Turns bytes into batches of messages; keeps the incomplete frame between calls."""

    def __init__(self, message_type: Any) -> None:
        """`message_type` is the union `T` itself, which type checkers do not accept as `type[T]`."""
        self._decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[message_type])
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[list[T]]:
        """The frames that `data` completes. Raises ChannelError, after which the decoder must not be used."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (body_bytes,) = _LENGTH.unpack_from(self._buffer, start)
                if body_bytes > MAX_FRAME_BYTES:
                    raise ChannelError(f"a frame claims {body_bytes} bytes; the limit is {MAX_FRAME_BYTES}")
                end = start + _LENGTH.size + body_bytes
                if len(self._buffer) < end:
                    return
                body_start, start = start + _LENGTH.size, end
                try:
                    # Decoded in place: copying a body of a client's size would delay the loop.
                    with memoryview(self._buffer) as frames, frames[body_start:end] as body:
                        messages = self._decoder.decode(body)
                except msgspec.MsgspecError as error:
                    raise ChannelError(f"a frame of {body_bytes} bytes does not decode: {error}") from error
                yield messages
        finally:
            del self._buffer[:start]


class BlockingChannel(Generic[T]):
    """An end for threads. One thread may call `receive` and one, perhaps another, `send`."""

    def __init__(self, connection: socket.socket, message_type: Any) -> None:
        """`message_type` is the union `T` of received messages, as in `FrameDecoder`."""
        self._connection = connection
        self._decoder: FrameDecoder[T] = FrameDecoder(message_type)

    def receive(self) -> Iterator[list[T]]:
        """Batches of messages until the other side closes its end or dies. Raises ChannelError or OSError."""
        while data := self._connection.recv(1 << 20):
            yield from self._decoder.feed(data)

    def send(self, messages: Sequence[msgspec.Struct]) -> None:
        """Blocks until the frame is written. Raises Unsendable, or OSError when the other side is gone."""
        self._connection.sendall(encode_frame(messages))


class LoopChannel(asyncio.Protocol, Generic[T]):
    """An end on an event loop. Messages sent within one iteration of the loop leave in one frame."""

    def __init__(self, message_type: Any, on_message: Callable[[T], None], on_closed: Callable[[str], None]) -> None:
        """`on_closed` is called once, with the reason. `message_type` is the union `T`, as in `FrameDecoder`."""
        self._on_message = on_message
        self._on_closed = on_closed
        self._decoder: FrameDecoder[T] = FrameDecoder(message_type)
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        """Parts of the next frame."""
        self._num_unsent = 0
        self._unsent_bytes = 0
        self._problem: str | None = None

    async def attach(self, connection: socket.socket) -> None:
        """Takes `connection` over. Messages are received from now on."""
        connection.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def send(self, message: msgspec.Struct, payload: bytes = b"") -> None:
        """Queues `message` for the next frame; does nothing once the channel is closed.

        A `payload` takes the place of the last field of an array-like message, which must be `b""`. It may be large: it
        is not copied. Raises Unsendable: each message is encoded here, so that an invalid one does not affect the
        others.
        """
        if self._transport is None:
            return
        parts = _encode(message, payload)
        num_bytes = sum(map(len, parts))
        if self._unsent_bytes + num_bytes > MAX_FRAME_BYTES - _ARRAY_HEADER_BYTES:
            self._flush()
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += parts
        self._num_unsent += 1
        self._unsent_bytes += num_bytes

    def close(self) -> None:
        """Closes the connection after everything sent so far."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None:
            count = _array_header(self._num_unsent)
            length = _LENGTH.pack(len(count) + self._unsent_bytes)
            if self._unsent_bytes <= _JOINED_BYTES:
                self._transport.write(b"".join((length, count, *self._unsent)))
            else:
                self._transport.writelines((length, count, *self._unsent))
        self._unsent = []
        self._num_unsent = self._unsent_bytes = 0

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not isinstance: the transports of uvloop do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for messages in self._decoder.feed(data):
                for message in messages:
                    self._on_message(message)
        except ChannelError as error:
            self._problem = str(error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._flush()
        self._on_closed(self._problem or (str(exc) if exc else "the other side closed the channel"))


def _encode(message: msgspec.Struct, payload: bytes) -> list[bytes]:
    """The parts of an encoded message. Raises Unsendable."""
    try:
        encoded = _encoder.encode(message)
    except (OverflowError, ValueError) as error:
        raise Unsendable(f"the message cannot be encoded: {error}") from error
    num_bytes = len(encoded) + len(payload)
    if num_bytes > MAX_FRAME_BYTES - _ARRAY_HEADER_BYTES:
        raise Unsendable(f"the message has {num_bytes} bytes, the limit is {MAX_FRAME_BYTES}; send less")
    if not payload:
        return [encoded]
    assert encoded.endswith(_NO_BYTES), "the payload takes the place of an empty last field"
    return [encoded[: -len(_NO_BYTES)] + _BYTES_HEADER.pack(_BYTES, len(payload)), payload]


def _array_header(count: int) -> bytes:
    """How an array of `count` messages begins in msgpack."""
    return b"\x91" if count == 1 else _ARRAY_HEADER.pack(0xDD, count)
