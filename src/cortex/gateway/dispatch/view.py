"""Read access to what a dispatcher knows and would decide now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from cortex.fleet.catalogue import Catalogue, Cost, ModelSpec
from cortex.fleet.demand import Demand
from cortex.fleet.placement.decision import Decision, Origin, Verdict
from cortex.fleet.placement.place import place, place_new
from cortex.fleet.placement.search import Feasibility, search
from cortex.fleet.sleeping import as_if_awake
from cortex.fleet.topology import STARTING, Fleet, ModelOnNode, counted_node
from cortex.gateway.dispatch.fleet_state import FleetState
from cortex.gateway.dispatch.leases import LeasePool
from cortex.gateway.dispatch.queues import Queues
from cortex.wire.errors import CortexError, NodeNotFound, shorten
from cortex.wire.words import duration


class CountedFleet:
    """The fleet with this gateway's own request counts. Derived on access, for nodes that requests or reports have
    changed. Accessed after every report, so that a decision has few nodes to count and none to release."""

    def __init__(self, fleet_state: FleetState, leases: LeasePool) -> None:
        self._fleet_state = fleet_state
        self._leases = leases
        self._last: Fleet | None = None

    def forget(self) -> None:
        """The fleet has other nodes."""
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


class DispatchView:
    """Fleet state, leases and queues, for reading: nothing here changes them. Belongs to the loop's thread."""

    def __init__(self, fleet_state: FleetState, clock: Callable[[], float]) -> None:
        self._fleet_state = fleet_state
        self._clock = clock
        self._demand = Demand()
        fleet_state.fleet = msgspec.structs.replace(fleet_state.fleet, demand=self._demand)
        self._leases = LeasePool(fleet_state, self._demand, clock)
        self._queues = Queues(self._demand)
        self._counted = CountedFleet(fleet_state, self._leases)
        self.resolve = fleet_state.resolve
        self.check_pictures = self._leases.check_pictures

    @property
    def fleet(self) -> Fleet:
        """The current fleet, with this gateway's own request counts."""
        return self._counted.fleet()

    @property
    def now(self) -> float:
        """On the clock that the fleet's times use."""
        return self._clock()

    @property
    def starting_nodes(self) -> list[str]:
        """Nodes that have not reported yet, shortly after the configuration named them."""
        return self._fleet_state.starting(self._clock())

    @property
    def catalogue(self) -> Catalogue:
        return self._fleet_state.settings.catalogue

    @property
    def queue_depths(self) -> dict[str, int]:
        return self._queues.depths

    def queued(self, model: str) -> dict[str, dict[str, int]]:
        """How many requests of each class wait for `model`: in this gateway's queue (under an empty name) and for a
        slot on each node. Only places where any wait."""
        nodes = self._fleet_state.fleet.listing(model)
        waiting = {node.name: node.residencies[model].status.load.waiting_by_class for node in nodes}
        return {name: counts for name, counts in {"": self._queues.by_class(model), **waiting}.items() if counts}

    @property
    def awaited_models(self) -> frozenset[str]:
        """Models that requests wait for which may evict others."""
        return frozenset(model for model in self._queues.models if self._queues.origin(model) != "background")

    @property
    def in_flight(self) -> dict[ModelOnNode, int]:
        """Requests open at each model on each node; only those with any."""
        return self._leases.in_flight

    def is_ready(self, model: str, node: str) -> bool:
        return any(here.name == node for here, _ in self._fleet_state.fleet.replicas(model))

    @property
    def pins(self) -> frozenset[ModelOnNode]:
        """The operator's pins, in addition to the catalogue's."""
        return frozenset(self._fleet_state.pins)

    @property
    def lacks_pinned(self) -> bool:
        """Whether a model that the operator pinned is absent, so that the next tick loads it."""
        return any(map(self._fleet_state.is_absent, self._fleet_state.pins))

    @property
    def drained(self) -> frozenset[str]:
        """Nodes that the operator drained."""
        return self._fleet_state.drained

    def awaited_victims(self, target: ModelOnNode) -> frozenset[str]:
        """The models that must be unloaded before the load at `target` can begin."""
        job = self._fleet_state.loads.get(target)
        return frozenset() if job is None else frozenset(victim.model for victim in job.victims)

    def explain(self, model: str, origin: Origin = "request", *, only_on: str | None = None) -> Decision:
        """What would be decided now. Changes nothing. Raises NodeNotFound."""
        self.check_node(only_on)
        return place(model, self.fleet, self._clock(), origin=origin, only_on=only_on)

    def check_node(self, node: str | None) -> None:
        """Raises NodeNotFound for a name that no node has."""
        if node is not None and node not in self._fleet_state:
            known = ", ".join(self._fleet_state) or "none"
            raise NodeNotFound(f"There is no node {shorten(node)}; the fleet has {known}.", param="node")

    def sleepers_for(self, decision: Decision, *, only_on: str | None = None) -> frozenset[str]:
        """The sleeping nodes with which the model of `decision` could be served, anywhere or on one node."""
        sleeping, now, model = self._fleet_state.sleeping, self._clock(), decision.model_id
        reserves = sleeping.reserves if only_on is None else sleeping.away & {only_on}
        if not reserves:
            return frozenset()
        if only_on is not None and not self._fleet_state.reported(only_on).devices:
            return reserves  # its models are not known yet
        awake = as_if_awake(self.fleet, reserves)
        if only_on is None:
            later = search(model, awake, now, origin=decision.origin)
        else:
            later = place(model, awake, now, origin=decision.origin, only_on=only_on)
        if later.action in ("load", "wake"):
            return reserves & {later.node or "", *(part.node for part in later.parts)}
        ready = (Verdict.RESIDENT, Verdict.STARTING)
        able = [each.node for each in later.assessments if each.verdict in ready and each.node in reserves]
        return frozenset({min(able, key=lambda name: sleeping.expected_wait_s(name, now))} if able else ())

    def why_away(self, node: str) -> str | None:
        """Why a node that may sleep serves nothing now, as text; None if it is awake."""
        return self._fleet_state.sleeping.problem(node, self._clock())

    def waking_stage(self, nodes: Sequence[str]) -> str:
        """What an order waits for: `waking beast, about 45 s`."""
        sleeping, now = self._fleet_state.sleeping, self._clock()
        away = [name for name in nodes if name in sleeping.away]
        if not away:
            return "starting"
        return f"waking {', '.join(away)}, about {duration(max(sleeping.expected_wait_s(name, now) for name in away))}"

    def explain_new(self, model: str, num_bytes: int) -> Decision:
        """Where an operator could load a model that no node has yet."""
        return place_new(model, num_bytes, self.fleet, self._clock())

    def feasibility(self) -> Feasibility:
        """The nodes that could serve each model: now, after making room, or once they are awake."""
        fleet, reserves = self._fleet_state.fleet, self._fleet_state.sleeping.reserves
        return Feasibility(as_if_awake(fleet, reserves) if reserves else fleet, self._clock())

    def context_tokens(self, name: str) -> int | None:
        """The context of the model that a request names; None where it is not known, or there is no such model."""
        try:
            return self._leases.context_tokens(self.resolve(name).model_id)
        except CortexError:
            return None

    def spec(self, name: str) -> ModelSpec:
        """The entry of the model that a request names; an empty one where there is no such model."""
        try:
            return self.catalogue.spec(self.resolve(name).model_id)
        except CortexError:
            return ModelSpec(id=name)

    def loading_state(self, model: str) -> str:
        """What a request for the model waits for, in a few words."""
        for node in self.fleet.listing(model):
            held = node.residencies[model]
            is_ordered = any(each.model_id == model for each in node.reservations)
            if held.state in STARTING or is_ordered:
                progress = held.status.progress
                share = progress.done_bytes / progress.total_bytes if progress and progress.total_bytes else None
                stage = f": {progress.stage}" if progress is not None else ""
                return f"{model} is being loaded{stage}{'' if share is None else f' {share:.0%}'}"
        return f"{model} waits for its turn"

    def cost(self, name: str) -> Cost:
        """The prices of the model that a request names."""
        return self.spec(name).cost
