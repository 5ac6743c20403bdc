"""Accepts client connections and passes their requests to a handler."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence

from cortex.http.limits import Buffered, ClientLimits, ClientShares, ConnectionCounts
from cortex.http.server.connection import ClientConnection, Handler, Reject, Response, ResponseHeaders
from cortex.http.server.listener import ArrivingConnection, Listener, ThrottledLog, listen
from cortex.http.server.parser import AdmitHead
from cortex.http.ticker import Ticker
from cortex.wire.errors import CortexError

__all__ = ["AdmitHead", "Handler", "Reject", "Response", "Server"]

log = logging.getLogger(__name__)
_throttled_log = ThrottledLog(log)

_DRAIN_CHECK_S = 0.02


class Server:
    """Listens on any number of addresses. Pipelined requests of one connection are served one after the other."""

    def __init__(
        self,
        handler: Handler,
        reject: Reject,
        ticker: Ticker,
        limits: ClientLimits | None = None,
        admit_head: AdmitHead | None = None,
        *,
        response_headers: ResponseHeaders | None = None,
        buffered: Buffered | None = None,
    ) -> None:
        """`buffered` counts request bytes, if not those of this server alone."""
        self.handler = handler
        self.reject = reject
        self.ticker = ticker
        self.limits = limits or ClientLimits()
        self.admit_head = admit_head
        """None admits every head, with a body up to the limit."""
        self.response_headers = response_headers
        """None adds no headers to responses."""
        self.connections: set[ClientConnection | ArrivingConnection] = set()
        self.buffered = buffered or Buffered(self.limits.buffered_bytes)
        """Updated by the connections."""
        self.spooled = ClientShares(self.limits.spooled_bytes, self.limits.spooled_bytes_per_client)
        """Request bytes in files; updated by the connections."""
        self.num_exchanges = 0
        """Requests being served now; updated by the connections."""
        self._listeners: list[Listener] = []
        self._counts = ConnectionCounts(self.limits.num_connections, self.limits.num_connections_per_client)

    @property
    def num_connections(self) -> int:
        """Client connections open now."""
        return len(self.connections)

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Bind and accept; returns the bound address (port 0 picks one). May be called for several addresses."""
        return self.listen_on(await asyncio.to_thread(listen, host, port), tls=tls)

    def listen_on(
        self, sockets: Sequence[socket.socket], *, tls: ssl.SSLContext | None = None, is_shared: bool = False
    ) -> tuple[str, int]:
        """Accept on listening sockets; returns the address of the first. `is_shared`: see `Listener`."""
        self._listeners.append(Listener(self, sockets, tls, is_shared=is_shared))
        address = sockets[0].getsockname()
        return str(address[0]), int(address[1])

    # --- for the connections

    def enter(self, connection: ClientConnection | ArrivingConnection) -> CortexError | None:
        """Count a new connection, or return why it is rejected and not counted."""
        rejection = self._counts.enter(connection.client)
        if rejection is None:
            self.connections.add(connection)
        else:
            reason = f"connection from {connection.client or 'unknown'} rejected: {rejection.message}"
            _throttled_log.warning(rejection.code, reason)
        return rejection

    def leave(self, connection: ClientConnection | ArrivingConnection) -> None:
        """Stop counting the connection, if it was counted."""
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        self._counts.leave(connection.client)

    # --- shutdown

    async def stop_accepting(self, grace_s: float = 0.0) -> None:
        """Stop accepting, and wait a moment for requests that are on their way: to close a connection under them would
        look like a fault. Responses tell clients to reconnect."""
        for listener in self._listeners:
            listener.hold()
        if self._listeners and grace_s:
            await asyncio.sleep(self.limits.handshake_s)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(grace_s, self.limits.last_request_s)
        while loop.time() < deadline and any(connection.is_idle for connection in self.connections):
            for connection in self.connections:
                connection.announce_end()
            await asyncio.sleep(_DRAIN_CHECK_S)

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop accepting, close idle connections, let running exchanges end within `grace_s`, then abort the others."""
        await self.stop_accepting()
        for connection in tuple(self.connections):
            connection.retire()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        while self.connections and loop.time() < deadline:
            await asyncio.sleep(_DRAIN_CHECK_S)
        for connection in tuple(self.connections):
            connection.abort()
        while self.connections:
            await asyncio.sleep(0)  # an aborted connection closes within a few loop turns
