"""Messages between two processes over a Unix socket, a stream or one of packets.

A frame of a stream is a four-byte length and one msgpack array of messages. It carries everything that was queued since
the previous frame, so messages are batched under load. A frame that is longer than `MAX_FRAME_BYTES` or does not decode
ends its connection, so neither side ever buffers more than that. `loop_channel` has the end on an event loop: helper
processes and workers have none, and start sooner without asyncio.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Far above any valid frame: a longer one means that the stream is corrupt."""

MAX_PACKET_BYTES = 4096
"""Far above any message that is sent as a packet."""

LENGTH = struct.Struct("<I")
"""The length prefix of a frame; it counts the bytes after the prefix."""
ENCODER = msgspec.msgpack.Encoder()

T = TypeVar("T")


class ChannelMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of messages between processes. Encoded by position: both sides are always the same version."""


class ChannelError(Exception):
    """The other side sent bytes that are not a valid message; the connection must be closed."""


class Unsendable(Exception):
    """The message cannot be encoded or is too large; the channel is still usable."""


def encode_frame(messages: Sequence[msgspec.Struct] | Sequence[msgspec.Raw]) -> bytes:
    """One frame with `messages` in order. Raises Unsendable."""
    frame = bytearray(LENGTH.size)
    try:
        ENCODER.encode_into(list(messages), frame, LENGTH.size)
    except (OverflowError, ValueError) as error:  # a number beyond 64 bits, text that is not Unicode
        raise Unsendable(f"the message cannot be encoded: {error}") from error
    body_bytes = len(frame) - LENGTH.size
    if body_bytes > MAX_FRAME_BYTES:
        raise Unsendable(f"the message has {body_bytes} bytes, the limit is {MAX_FRAME_BYTES}; send less")
    LENGTH.pack_into(frame, 0, body_bytes)
    return bytes(frame)


_one_builder = threading.Lock()
"""msgspec stores what it knows of a type with the type, and fills it in step by step. A second thread that builds a
decoder for the type meanwhile reads memory that is not set yet, and the process crashes."""


def _decoder_of(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    """The decoder of lists of `message_type`. May be called on any thread."""
    with _one_builder:
        return _build_decoder(message_type)


@lru_cache(maxsize=256)
def _build_decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(list[message_type])


class FrameDecoder(Generic[T]):
    """Turns bytes into batches of messages; keeps the incomplete frame between calls."""

    def __init__(self, message_type: Any) -> None:
        """`message_type` is the union `T` itself, which type checkers do not accept as `type[T]`."""
        self._decoder: msgspec.msgpack.Decoder[list[T]] = _decoder_of(message_type)
        self._buffer = bytearray()

    def expect(self, message_type: Any) -> None:
        """The next frames have messages of this type."""
        self._decoder = _decoder_of(message_type)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[list[T]]:
        """The frames that `data` completes. Raises ChannelError, after which the decoder must not be used."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= LENGTH.size:
                (body_bytes,) = LENGTH.unpack_from(self._buffer, start)
                if body_bytes > MAX_FRAME_BYTES:
                    raise ChannelError(f"a frame claims {body_bytes} bytes; the limit is {MAX_FRAME_BYTES}")
                end = start + LENGTH.size + body_bytes
                if len(self._buffer) < end:
                    return
                body_start, start = start + LENGTH.size, end
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


class PacketSocket(Generic[T]):
    """An end of a SEQPACKET socket: single messages, each with a file descriptor where one is passed along. Blocks or
    not, as the socket does."""

    def __init__(self, connection: socket.socket, message_type: Any) -> None:
        """`message_type` is the union `T` of received messages, which type checkers do not accept as `type[T]`."""
        self.connection = connection
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type)

    def send(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        """The other side gets its own copy of `descriptor`. Raises OSError."""
        descriptors = [] if descriptor is None else [descriptor]
        socket.send_fds(self.connection, [msgspec.msgpack.encode(message)], descriptors)

    def receive(self) -> tuple[T, int | None] | None:
        """A message and the descriptor that came with it, which the caller must close; None when the other side closed.

        Raises ChannelError for a packet that is truncated or does not decode, or OSError.
        """
        packet, descriptors, flags, _ = socket.recv_fds(self.connection, MAX_PACKET_BYTES, 1)
        if not packet:
            return None
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ChannelError(f"a packet is longer than the limit of {MAX_PACKET_BYTES} bytes")
            return self._decoder.decode(packet), descriptors[0] if descriptors else None
        except (ChannelError, msgspec.MsgspecError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, ChannelError):
                raise
            raise ChannelError(f"a packet of {len(packet)} bytes does not decode: {error}") from error
