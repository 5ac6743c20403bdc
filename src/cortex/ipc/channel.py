"""Frames on a Unix socket pair: a four-byte length, then one msgpack array of messages.

A frame carries whatever had gathered since the last one, so that traffic batches itself under load:
many jobs one way, all outputs of a step the other way.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Far above any honest frame; a length beyond it means that the stream is out of step."""

_SPARE_BYTES = 16
"""Room for what a frame has around its messages."""

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

T = TypeVar("T")


class ChannelError(Exception):
    """The other side sent bytes that are no frame; the channel cannot be used any further."""


class Unsendable(Exception):
    """A message that no frame can carry; the channel is as good as before."""


def encode_frame(messages: Sequence[msgspec.Struct] | Sequence[msgspec.Raw]) -> bytes:
    """One frame that carries `messages` in order."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(list(messages), frame, _LENGTH.size)
    body_bytes = len(frame) - _LENGTH.size
    if body_bytes > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame of {body_bytes} bytes is over the limit of {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(frame, 0, body_bytes)
    return bytes(frame)


class FrameDecoder(Generic[T]):
    """Bytes in, batches of messages out; keeps the unfinished frame between calls."""

    def __init__(self, message_type: Any) -> None:
        """`message_type` is the union `T` itself, which type checkers cannot take as `type[T]`."""
        self._decoder: msgspec.msgpack.Decoder[list[T]] = msgspec.msgpack.Decoder(list[message_type])
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[list[T]]:
        """The frames that `data` completes. Raises ChannelError on what is no frame."""
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
                body = bytes(memoryview(self._buffer)[start + _LENGTH.size : end])
                start = end
                try:
                    messages = self._decoder.decode(body)
                except msgspec.MsgspecError as error:
                    raise ChannelError(f"a frame of {body_bytes} bytes does not decode: {error}") from error
                yield messages
        finally:
            del self._buffer[:start]


class BlockingChannel(Generic[T]):
    """An end whose owner may wait: `receive` belongs to one thread, `send` to one, perhaps another."""

    def __init__(self, connection: socket.socket, message_type: Any) -> None:
        """`message_type` is the union `T` of what is received, which type checkers cannot take as `type[T]`."""
        self._connection = connection
        self._decoder: FrameDecoder[T] = FrameDecoder(message_type)

    def receive(self) -> Iterator[list[T]]:
        """Batches of messages until the other side closes its end or dies."""
        while data := self._connection.recv(1 << 20):
            yield from self._decoder.feed(data)

    def send(self, messages: Sequence[msgspec.Struct]) -> None:
        """Raises ChannelError for messages that no frame can carry, OSError when there is nobody any more."""
        self._connection.sendall(encode_frame(messages))


class LoopChannel(asyncio.Protocol, Generic[T]):
    """The daemon's end. Commands sent within one turn of the loop leave in one frame."""

    def __init__(self, event_type: Any, on_event: Callable[[T], None], on_closed: Callable[[str], None]) -> None:
        """`event_type` is the union `T` itself, which type checkers cannot take as `type[T]`."""
        self._on_event = on_event
        self._on_closed = on_closed
        self._decoder: FrameDecoder[T] = FrameDecoder(event_type)
        self._transport: asyncio.Transport | None = None
        self._unsent: list[msgspec.Raw] = []
        self._unsent_bytes = 0
        self._problem: str | None = None

    def send(self, command: msgspec.Struct) -> None:
        """Queues `command` for this turn's frame; dropped when the channel is closed, whose owner was told.

        Raises Unsendable: encoded here and not with the frame, so that one bad command spoils no other.
        """
        if self._transport is None:
            return
        encoded = _encode(command)
        if self._unsent_bytes + len(encoded) > MAX_FRAME_BYTES - _SPARE_BYTES:
            self._flush()
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(msgspec.Raw(encoded))
        self._unsent_bytes += len(encoded)

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None:
            self._transport.write(encode_frame(self._unsent))
        self._unsent.clear()
        self._unsent_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # By contract, not by class: the transports of uvloop do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for events in self._decoder.feed(data):
                for event in events:
                    self._on_event(event)
        except ChannelError as error:
            self._problem = str(error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._flush()
        self._on_closed(self._problem or (str(exc) if exc else "the worker closed its channel"))


def _encode(command: msgspec.Struct) -> bytes:
    try:
        encoded = _encoder.encode(command)
    except (OverflowError, ValueError) as error:  # a number beyond 64 bits, text that is not Unicode
        raise Unsendable(f"this cannot be told to the engine: {error}") from error
    if len(encoded) > MAX_FRAME_BYTES - _SPARE_BYTES:
        raise Unsendable(f"{len(encoded)} bytes are more than a request may have on its way to the engine; send less")
    return encoded
