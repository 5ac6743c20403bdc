"""Accepts client connections and passes their requests to a handler."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl

from cortex.http.limits import Buffered, ClientLimits
from cortex.http.server.connection import (
    ClientConnection,
    CountedConnection,
    Handler,
    Reject,
    Response,
    ResponseHeaders,
)
from cortex.http.server.handshake import TLSListener, bind
from cortex.http.server.parser import AdmitHead
from cortex.http.ticker import Ticker
from cortex.wire.errors import CortexError, Overloaded, RateLimitExceeded

__all__ = ["AdmitHead", "Handler", "Reject", "Response", "Server"]

_BACKLOG = 1024
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
    ) -> None:
        self.handler = handler
        self.reject = reject
        self.ticker = ticker
        self.limits = limits or ClientLimits()
        self.admit_head = admit_head
        """None admits every head, with a body up to the limit."""
        self.response_headers = response_headers
        """None adds no headers to responses."""
        self.connections: set[CountedConnection] = set()
        self.buffered = Buffered()
        """Updated by the connections."""
        self.num_exchanges = 0
        """Requests being served now; updated by the connections."""
        self._listeners: list[asyncio.Server | TLSListener] = []
        self._num_by_network: dict[str, int] = {}
        """Open connections by `_network`."""

    @property
    def num_connections(self) -> int:
        """Client connections open now."""
        return len(self.connections)

    async def listen(self, host: str, port: int, *, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Bind and accept; returns the bound address (port 0 picks one). May be called for several addresses."""
        loop = asyncio.get_running_loop()
        listener: asyncio.Server | TLSListener
        if tls is None:
            listener = await loop.create_server(lambda: ClientConnection(self, loop), host, port, backlog=_BACKLOG)
        else:
            listener = TLSListener(self, tls, await asyncio.to_thread(bind, host, port, _BACKLOG))
        self._listeners.append(listener)
        address = listener.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    # --- for the connections

    def enter(self, connection: CountedConnection) -> CortexError | None:
        """Count a new connection, or return why it is rejected and not counted."""
        network = _network(connection.client)
        num_from_client = self._num_by_network.get(network, 0)
        if self.num_connections >= self.limits.num_connections:
            return Overloaded(f"{self.num_connections} connections are open, which is the limit; try again in a moment")
        if num_from_client >= self.limits.num_connections_per_client:
            return RateLimitExceeded(
                f"{num_from_client} connections are open from your address, which is the limit; use fewer"
            )
        self._num_by_network[network] = num_from_client + 1
        self.connections.add(connection)
        return None

    def leave(self, connection: CountedConnection) -> None:
        """Stop counting the connection, if it was counted."""
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        network = _network(connection.client)
        self._num_by_network[network] -= 1
        if not self._num_by_network[network]:
            del self._num_by_network[network]

    # --- shutdown

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop accepting, close idle connections, let running exchanges end within `grace_s`, then abort the others."""
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
            connection.abort()
        while self.connections:
            await asyncio.sleep(0)  # an aborted connection closes within a few loop turns


def _network(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 of an IPv6 address, as one host may use all of it."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(parsed) >> 64 << 64))
