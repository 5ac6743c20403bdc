"""Counts open connections, in all and for each client, and rejects those beyond a limit. Pure."""

from __future__ import annotations

import ipaddress

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
