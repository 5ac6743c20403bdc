"""Single messages over a Unix SEQPACKET socket, each with a file descriptor where one is passed along."""

from __future__ import annotations

import os
import socket
from typing import Any, Generic, TypeVar

import msgspec

from cortex.ipc.channel import ChannelError

MAX_PACKET_BYTES = 4096
"""Far above any message that is sent this way."""

T = TypeVar("T")


class PacketSocket(Generic[T]):
    """One end of the socket. Blocks or not, as the socket does."""

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
