"""The fleet as this gateway sees it: what nodes last reported, with what it has itself set in motion drawn over it.

A report is always a little old. A model that we are unloading must not be routed to because a poll from before
still shows it ready, and a load we have ordered holds its bytes before the node shows it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from cortex.fleet import memory, topology
from cortex.fleet.catalogue import Catalogue
from cortex.fleet.rules import EvictionRules
from cortex.fleet.topology import Fleet, MemoryReservation, ModelOnNode, Node, Residency
from cortex.wire.node import Discovery, Health, ModelState, ModelStatus

_ABSENT = frozenset({ModelState.COLD, ModelState.FAILED, ModelState.ASLEEP})


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A load that this gateway has ordered, or will once its victims are gone."""

    node: str
    model: str
    devices: tuple[int, ...]
    need_bytes: int
    """Of which the decision was sure that they are there."""
    takes_bytes: int
    """What it is reckoned with until it has loaded."""
    begun_at: float
    victims: frozenset[str] = frozenset()
    """Still to be unloaded before it can begin."""


@dataclass(frozen=True, slots=True)
class LoadFailure:
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A load ran out of memory: the model needs more than there was, and may be tried once more with that."""

    at: float
    need_bytes: int


@dataclass(slots=True)
class FleetState:
    """Mutable; owned by the dispatcher. `fleet` is redrawn after every change, never changed in place."""

    catalogue: Catalogue
    rules: EvictionRules
    fleet: Fleet = field(default_factory=Fleet)
    loads: dict[ModelOnNode, LoadJob] = field(default_factory=dict)
    unloads: dict[ModelOnNode, float] = field(default_factory=dict)
    """When each was ordered."""
    failures: dict[ModelOnNode, LoadFailure] = field(default_factory=dict)
    shortfalls: dict[ModelOnNode, Shortfall] = field(default_factory=dict)
    pins: set[ModelOnNode] = field(default_factory=set)
    """Set by hand."""
    _reported: dict[str, Node] = field(default_factory=dict)

    def expect(self, names: Iterable[str]) -> None:
        """The nodes there should be, in order; others are forgotten."""
        self._reported = {name: self._reported.get(name, Node(name=name)) for name in names}
        for jobs in (self.loads, self.unloads, self.failures, self.shortfalls):
            for key in [key for key in jobs if key.node not in self._reported]:
                del jobs[key]

    def observed(self, name: str, discovery: Discovery, health: Health, now: float, *, has_lifecycle: bool) -> None:
        before = self._reported[name]
        self._reported[name] = topology.seen(before, name, discovery, health, now, has_lifecycle=has_lifecycle)

    def missed(self, name: str, why: str, *, limit: int) -> None:
        self._reported[name] = topology.missed(self._reported[name], why, limit=limit)

    def put(self, node: str, status: ModelStatus, now: float) -> None:
        """What a node has just said about one model, ahead of its next poll."""
        reported = self._reported.get(node)
        if reported is not None:
            held = Residency(status=status, seen_at=now)
            self._reported[node] = msgspec.structs.replace(
                reported, residencies={**reported.residencies, status.id: held}
            )

    def is_asleep(self, node: str, model: str) -> bool:
        """By the node's last report."""
        held = self._reported[node].residencies.get(model) if node in self._reported else None
        return held is not None and held.state is ModelState.ASLEEP

    def forget_ready(self, node: str, model: str, now: float) -> None:
        """The node has denied having the model ready. Where it sleeps is not in question."""
        held = self._reported[node].residencies.get(model)
        if held is not None and held.state is not ModelState.ASLEEP:
            self.put(node, msgspec.structs.replace(held.status, state=ModelState.COLD, state_age_s=0.0), now)

    def count_load(self, node: str) -> None:
        reported = self._reported.get(node)
        if reported is not None:
            self._reported[node] = msgspec.structs.replace(reported, num_loads=reported.num_loads + 1)

    def forget_loads(self, node: str) -> None:
        """The node's workers are new: its loads count from zero."""
        reported = self._reported.get(node)
        if reported is not None:
            self._reported[node] = msgspec.structs.replace(reported, num_loads=0)

    def rebuild(self, now: float) -> None:
        """Draw `fleet` anew from reports and jobs; failures that are old enough are forgotten."""
        for past in (self.failures, self.shortfalls):
            for key in [s for s, it in past.items() if now - it.at >= self.rules.retry_failed_after_s]:
                del past[key]
        before = self.fleet
        self.fleet = Fleet(
            nodes=tuple(self._draw(node, now) for node in self._reported.values()),
            catalogue=self.catalogue,
            rules=self.rules,
            measured=before.measured,
        )
        measured = memory.measurements(self.fleet)
        if measured != before.measured:
            self.fleet = msgspec.structs.replace(self.fleet, measured=measured)

    def _draw(self, node: Node, now: float) -> Node:
        drawn = dict(node.residencies)
        for (name, model), since in self.unloads.items():
            if name == node.name and model in drawn and drawn[model].state not in _ABSENT:
                drawn[model] = _in_state(drawn[model], ModelState.UNLOADING, now - since, now)
        short = {
            model: shortfall.need_bytes for (name, model), shortfall in self.shortfalls.items() if name == node.name
        }
        for model in short.keys() & drawn.keys():
            if drawn[model].state is ModelState.FAILED:  # by the load that is to be tried again
                drawn[model] = _in_state(drawn[model], ModelState.COLD, 0.0, now)
        for (name, model), failure in self.failures.items():
            if name == node.name and (model not in drawn or drawn[model].state in _ABSENT):
                held = drawn.get(model) or _unlisted(model, now)
                drawn[model] = _in_state(held, ModelState.FAILED, now - failure.at, now, failure.reason)
        for (name, model), job in self.loads.items():
            if name == node.name and (model not in drawn or drawn[model].state in _ABSENT):
                held = drawn.get(model) or _unlisted(model, now)
                drawn[model] = _in_state(held, ModelState.LOADING, now - job.begun_at, now)
        for name, model in self.pins:
            if name == node.name and model in drawn:
                drawn[model] = msgspec.structs.replace(drawn[model], pinned=True)
        reservations = tuple(
            MemoryReservation(model_id=job.model, devices=job.devices, num_bytes=job.takes_bytes)
            for job in self.loads.values()
            if job.node == node.name and not _holds_its_bytes(drawn[job.model])
        )
        return msgspec.structs.replace(node, residencies=drawn, reservations=reservations, shown_needs=short)


def _holds_its_bytes(held: Residency) -> bool:
    return held.state is ModelState.READY and held.status.measured_bytes is not None


def _unlisted(model: str, now: float) -> Residency:
    return Residency(status=ModelStatus(id=model, state=ModelState.COLD), seen_at=now)


def _in_state(held: Residency, state: ModelState, age_s: float, now: float, reason: str | None = None) -> Residency:
    status = msgspec.structs.replace(
        held.status, state=state, state_age_s=age_s, reason=reason if reason is not None else held.status.reason
    )
    return msgspec.structs.replace(held, status=status, seen_at=now)
