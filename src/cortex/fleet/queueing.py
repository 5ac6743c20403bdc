"""Who waits and who goes first when models take turns on too little memory.

Requests for a model that is ready pass at once, so a run of A, B, A, B, … becomes all A, then all B: two swaps.
What keeps B from waiting forever is `fair_wait_s`: once the oldest request for an absent model has waited
that long, the models whose room it needs are *closed*. They finish what they have and take no new work until it
is in. So a request waits at most `fair_wait_s`, plus the longest answer under way, plus the loads ahead of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from cortex.fleet.decision import Decision, Origin
from cortex.fleet.placement import place
from cortex.fleet.topology import Fleet, MemoryReservation, ModelOnNode, Residency
from cortex.wire.node import ModelState


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that wait for one model."""

    model_id: str
    since: float
    """When the oldest of them began to wait."""
    count: int = 1
    origin: Origin = "request"
    """`background` only when all of them are."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do for those who wait."""

    starts: tuple[Decision, ...] = ()
    """Loads and wakes to begin now, most urgent first; they do not compete for the same bytes."""
    waits: tuple[Decision, ...] = ()
    """Models that stay queued, with what they wait for."""
    rejections: tuple[Decision, ...] = ()
    """Models for which waiting is in vain."""
    closed: frozenset[ModelOnNode] = frozenset()
    """Resident models that take no new work until an overdue one is in: requests for them wait, although ready."""


def plan(waiting: Iterable[Waiting], fleet: Fleet, now: float) -> Plan:
    """Decide for every waiting model. Pure: the same picture gives the same plan, whatever the order of `waiting`."""
    starts: list[Decision] = []
    waits: list[Decision] = []
    rejections: list[Decision] = []
    closed: set[ModelOnNode] = set()
    for group in turns(waiting, fleet, now):
        decision = place(group.model_id, fleet, now, origin=group.origin)
        if decision.action in ("load", "wake"):
            starts.append(decision)
            fleet = _begun(fleet, decision)
        elif decision.action == "wait":
            waits.append(decision)
            if is_overdue(group, fleet, now):
                fleet, closing = _make_way(group, fleet, now)
                closed |= closing
        elif decision.action == "refuse":
            rejections.append(decision)
    return Plan(starts=tuple(starts), waits=tuple(waits), rejections=tuple(rejections), closed=frozenset(closed))


def turns(waiting: Iterable[Waiting], fleet: Fleet, now: float) -> Sequence[Waiting]:
    """The order in which models get their turn: the overdue by age, then by priority, then by age."""

    def urgency(group: Waiting) -> tuple[float | str, ...]:
        if is_overdue(group, fleet, now):
            return 0, 0, group.since, group.model_id
        return 1, -fleet.catalogue.spec(group.model_id).priority, group.since, group.model_id

    return sorted(waiting, key=urgency)


def is_overdue(group: Waiting, fleet: Fleet, now: float) -> bool:
    """Whether these requests have waited long enough to close others. Background requests never do."""
    return group.origin != "background" and now - group.since >= fleet.rules.fair_wait_s


def _make_way(group: Waiting, fleet: Fleet, now: float) -> tuple[Fleet, frozenset[ModelOnNode]]:
    """The seats to close for an overdue model, and the picture with that room promised to it."""
    in_time = place(group.model_id, fleet.as_if_idle(), now, origin=group.origin)
    if in_time.action not in ("load", "wake") or in_time.node is None:
        return fleet, frozenset()
    closing = frozenset(ModelOnNode(in_time.node, victim) for victim in in_time.victims)
    return _begun(fleet, in_time), closing


def _begun(fleet: Fleet, decision: Decision) -> Fleet:
    """The picture after a start was ordered: its bytes promised, its victims on their way out."""
    node = fleet.node(decision.node or "")
    if node is None:
        return fleet
    promise = MemoryReservation(
        model_id=decision.model_id, devices=decision.devices, num_bytes=decision.takes_bytes or 0
    )
    leaving = {victim: _unloading(node.residencies[victim]) for victim in decision.victims}
    return fleet.with_node(
        msgspec.structs.replace(
            node, reservations=(*node.reservations, promise), residencies={**node.residencies, **leaving}
        )
    )


def _unloading(held: Residency) -> Residency:
    return msgspec.structs.replace(held, status=msgspec.structs.replace(held.status, state=ModelState.UNLOADING))
