"""Accepts client connections and hands out their requests."""

from __future__ import annotations

import asyncio
import functools
import ssl
from pathlib import Path

from cortex.gateway.http.connection import Answer, Connection, Handler, Refuse
from cortex.gateway.http.limits import ClientLimits
from cortex.gateway.http.ticker import Ticker

__all__ = ["Answer", "Handler", "Refuse", "Server"]

_BACKLOG = 1024
_DRAIN_CHECK_S = 0.02


class Server:
    """The listener. Serial per connection: pipelined requests are answered one after the other."""

    def __init__(self, handler: Handler, refuse: Refuse, ticker: Ticker, limits: ClientLimits | None = None) -> None:
        self.handler = handler
        self.refuse = refuse
        self.ticker = ticker
        self.limits = limits or ClientLimits()
        self.connections: set[Connection] = set()
        """Kept by the connections themselves."""
        self.num_exchanges = 0
        """Requests being answered now; kept by the connections."""
        self._listeners: list[asyncio.Server] = []

    @property
    def num_connections(self) -> int:
        """Client connections open now."""
        return len(self.connections)

    async def listen(
        self, host: str, port: int, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> tuple[str, int]:
        """Bind and accept; returns the bound address (port 0 picks one). May be called for several addresses."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: Connection(self, loop), host, port, reuse_port=reuse_port or None, ssl=tls, backlog=_BACKLOG
        )
        self._listeners.append(listener)
        address = listener.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def listen_unix(self, path: Path) -> None:
        """Accept on a Unix socket, for programs of our own."""
        loop = asyncio.get_running_loop()
        factory = functools.partial(Connection, self, loop)
        self._listeners.append(await loop.create_unix_server(factory, str(path), backlog=_BACKLOG))

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop accepting, close idle connections, let running exchanges end within `grace_s`, then cut the rest."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in tuple(self.connections):
            connection.retire()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        while self.connections and loop.time() < deadline:
            await asyncio.sleep(_DRAIN_CHECK_S)
        for connection in tuple(self.connections):
            connection.transport.abort()
        while self.connections:
            await asyncio.sleep(0)  # an aborted connection is gone within a few turns
