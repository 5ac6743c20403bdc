"""A connection that has left HTTP for another protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

OnLost = Callable[[Exception | None], None]


class _SwitchedProtocol(asyncio.StreamReaderProtocol):
    """The streams of a connection, whose end is also reported to `on_lost`."""

    def __init__(self, reader: asyncio.StreamReader, on_lost: OnLost) -> None:
        super().__init__(reader)
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost(exc)


def switched(
    transport: asyncio.Transport, on_lost: OnLost, max_buffered_bytes: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams over a connected transport, in place of its protocol. `on_lost` is called once, when it has ended."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=max_buffered_bytes)
    protocol = _SwitchedProtocol(reader, on_lost)
    transport.set_protocol(protocol)
    protocol.connection_made(transport)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
