"""The fleet with this gateway's own request counts."""

from __future__ import annotations

from cortex.fleet.topology import Fleet, counted_node
from cortex.gateway.dispatch.fleet_state import FleetState
from cortex.gateway.dispatch.leases import LeasePool


class CountedFleet:
    """Derived when it is asked for, where requests or reports changed something since the last time. It is asked for
    after every report, so that a decision finds few nodes to count, and none to release."""

    def __init__(self, fleet_state: FleetState, leases: LeasePool) -> None:
        self._fleet_state = fleet_state
        self._leases = leases
        self._last: Fleet | None = None

    def forget(self) -> None:
        """Other nodes make up the fleet."""
        self._last = None

    def fleet(self) -> Fleet:
        fleet, leases, recount = self._fleet_state.fleet, self._leases, self._leases.recount
        if self._last is None:
            self._last = fleet.with_in_flight(leases.in_flight)
        elif recount or fleet.measured is not self._last.measured:
            nodes = [node for name in recount if (node := fleet.node(name)) is not None]
            counted = [counted_node(node, leases.in_flight_on(node.name)) for node in nodes]
            self._last = self._last.with_nodes(counted, measured=fleet.measured, index=fleet.index)
        recount.clear()
        return self._last
