"""Bounds on what peers can make this process hold and wait for, on each side of the relay."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from cortex.wire.errors import CortexError, Overloaded, RateLimitExceeded


class ConnectionCounts:
    """Belongs to one loop. `leave` must follow each `enter` that returned None."""

    def __init__(self, max_connections: int, max_per_client: int) -> None:
        self._max_connections = max_connections
        self._max_per_client = max_per_client
        self._by_network: dict[str, int] = {}
        """Open connections by `network_of`."""
        self.num_connections = 0

    def enter(self, client: str) -> CortexError | None:
        """Count a new connection from an address, or return why it is rejected and not counted."""
        network = network_of(client)
        num_from_client = self._by_network.get(network, 0)
        if self.num_connections >= self._max_connections:
            return Overloaded(f"{self.num_connections} connections are open, which is the limit; try again in a moment")
        if num_from_client >= self._max_per_client:
            return RateLimitExceeded(
                f"{num_from_client} connections are open from your address, which is the limit; use fewer"
            )
        self._by_network[network] = num_from_client + 1
        self.num_connections += 1
        return None

    def leave(self, client: str) -> None:
        """A connection that was counted has closed."""
        network = network_of(client)
        self.num_connections -= 1
        self._by_network[network] -= 1
        if not self._by_network[network]:
            del self._by_network[network]


def network_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 of an IPv6 address, as one host may use all of it."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(parsed) >> 64 << 64))


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds on client connections. The shared ticker checks times, so they are exact to one tick."""

    num_connections: int = 8192
    """Connections open at once."""
    num_connections_per_client: int = 1024
    """Connections open at once from one address; an IPv6 /64 network counts as one."""
    buffered_bytes: int = 1024 * 1024 * 1024
    """Request bytes that all connections together may hold: bodies of running exchanges, and bytes sent ahead."""
    head_bytes: int = 64 * 1024
    """Request line and headers together."""
    num_headers: int = 128
    body_bytes: int = 64 * 1024 * 1024
    upload_bytes: int = 2 * 1024 * 1024 * 1024
    """The longest body of a path that spools: it is written to a file as it arrives."""
    spooled_bytes: int = 8 * 1024 * 1024 * 1024
    """Request bytes in files that all connections together may hold."""
    spooled_bytes_per_client: int | None = None
    """The same for those from one address, as `num_connections_per_client` has it; None: one may hold all."""
    head_s: float = 10.0
    """From a request's first byte to the end of its head; for the first request, from the connection."""
    body_s: float = 30.0
    """Silence inside a body; also how long a whole body may take, beyond the time that `body_bytes_per_s` allows."""
    body_bytes_per_s: int = 16 * 1024
    """The lowest rate of a body after its first `body_s`."""
    idle_s: float = 75.0
    """Between requests on a connection that is kept alive."""
    stall_s: float = 120.0
    """How long a client may read nothing while response bytes wait for it."""
    linger_s: float = 3.0
    """How long a rejected client may go on sending before its connection closes, so that it can read the error."""
    write_buffer_bytes: int = 256 * 1024
    """Unsent response bytes above which the upstream is paused."""
    ping_s: float = 30.0
    """Silence of a WebSocket after which its client is pinged."""
    unused_s: float = 3600.0
    """How long an idle client of a WebSocket may send no message."""
    handshake_s: float = 0.02
    """How long clients that are connecting may take when the server stops. Others may have to retry after a second."""
    last_request_s: float = 0.5
    """How long a stopping server waits for requests on idle connections."""


class Buffered:
    """The number of request bytes in memory, or in files: of all connections of a server, and of work that outlives its
    connection. Each holder adds and subtracts its own."""

    __slots__ = ("max_bytes", "num_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self.max_bytes = max_bytes

    def has_room(self, num_bytes: int = 0) -> bool:
        """Whether `num_bytes` more are within the limit."""
        return self.num_bytes + num_bytes <= self.max_bytes


class ClientShares:
    """A `Buffered` that limits the share of each client."""

    __slots__ = ("_by_network", "_max_bytes_each", "_total")

    def __init__(self, max_bytes: int, max_bytes_each: int | None) -> None:
        self._total = Buffered(max_bytes)
        self._max_bytes_each = max_bytes if max_bytes_each is None else max_bytes_each
        self._by_network: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """The total over all clients."""
        return self._total.num_bytes

    def add(self, client: str, num_bytes: int) -> None:
        """A negative number is subtracted."""
        self._total.num_bytes += num_bytes
        network = network_of(client)
        if held := self._by_network.pop(network, 0) + num_bytes:
            self._by_network[network] = held

    def has_room(self, client: str, num_bytes: int = 0) -> bool:
        """Whether `num_bytes` more of this client are within both limits."""
        held = self._by_network.get(network_of(client), 0)
        return self._total.has_room(num_bytes) and held + num_bytes <= self._max_bytes_each


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Bounds on one node's connections."""

    connect_s: float = 5.0
    silence_s: float = 600.0
    """How long a node may send nothing while a response is due. There is no total timeout."""
    begin_s: float | None = None
    """The same until the first byte of the response. None: `silence_s`."""
    silence_when_down_s: float = 5.0
    """The same while the node is known to be down."""
    keep_s: float = 30.0
    """How long an idle connection is kept; should be less than the node's own keep-alive timeout."""
    num_kept: int = 256
    """Idle connections kept for reuse."""
    head_bytes: int = 64 * 1024
    fetch_body_bytes: int = 16 * 1024 * 1024
    """The longest response body that `Pool.fetch` accepts."""
