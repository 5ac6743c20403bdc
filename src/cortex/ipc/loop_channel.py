"""The end of a channel on an event loop."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from cortex.ipc.channel import ENCODER, LENGTH, MAX_FRAME_BYTES, ChannelError, FrameDecoder, Unsendable

_ARRAY_HEADER_BYTES = 16
"""Upper bound of a frame's overhead."""

_JOINED_BYTES = 64 * 1024
"""Frames up to this size are copied into one piece: writing several pieces costs more."""

# msgpack prefixes: an array with a length of 32 bits, bytes with a length of 32 bits, and no bytes.
_ARRAY_HEADER = struct.Struct(">BI")
_BYTES_HEADER = struct.Struct(">BI")
_BYTES = 0xC6
_NO_BYTES = b"\xc4\x00"

T = TypeVar("T")


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

    def expect(self, message_type: Any) -> None:
        """The next messages that are received have this type."""
        self._decoder.expect(message_type)

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
            length = LENGTH.pack(len(count) + self._unsent_bytes)
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
        encoded = ENCODER.encode(message)
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
