"""Sends a body that is not in memory, at the pace of the node."""

from __future__ import annotations

import asyncio

from cortex.http.composed_body import ComposedBody

_READ_BYTES = 128 * 1024


class BodyWriter:
    """Belongs to one connection, for one call."""

    __slots__ = ("_body", "_position", "_transport", "is_paused")

    def __init__(self, transport: asyncio.Transport, body: ComposedBody) -> None:
        self._transport = transport
        self._body = body
        self._position = 0
        self.is_paused = False
        """The node does not keep up."""

    @property
    def is_done(self) -> bool:
        return self._position == len(self._body)

    def write(self) -> None:
        """Writes until everything is sent or the transport pauses. Raises OSError, or EOFError for a file that is
        shorter than it was."""
        while not self.is_paused and not self.is_done and not self._transport.is_closing():
            data = self._body.read(self._position, _READ_BYTES)
            if not data:
                raise EOFError("the spooled body is shorter than it was")
            self._position += len(data)
            self._transport.write(data)
