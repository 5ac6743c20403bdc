"""Messages over a stream: each one as msgpack behind its length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

T = TypeVar("T")

_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()


class MessageChannel(asyncio.Protocol, Generic[T]):
    """One end. `came` is called when there is another, `receive` with every message, in order, and `lost` once, when
    the other end is gone."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[T],
        receive: Callable[[T], None],
        *,
        came: Callable[[], None] | None = None,
        lost: Callable[[], None],
    ) -> None:
        self._decoder = decoder
        self._receive = receive
        self._came = came
        self._lost = lost
        self._pending = bytearray()
        self.is_lost = False
        """There was another end, and it is gone."""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._came is not None:
            self._came()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self.is_lost = True
        self._lost()

    def data_received(self, data: bytes) -> None:
        pending = self._pending
        pending += data
        start = 0
        while len(pending) - start >= _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            end = begin + int.from_bytes(pending[start:begin], "little")
            if len(pending) < end:
                break
            message = self._decoder.decode(pending[begin:end])
            start = end
            self._receive(message)
        del pending[:start]

    def send(self, message: msgspec.Struct) -> None:
        """Does nothing once the other end is gone."""
        if self._transport is not None:
            data = _encoder.encode(message)
            self._transport.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def close(self) -> None:
        """What was sent still arrives."""
        if self._transport is not None:
            self._transport.close()
