"""Decides which waiting model is loaded next if memory does not suffice for all.

Requests for a ready model pass at once, so a sequence A, B, A, B, … becomes all A, then all B: two swaps. `fair_wait_s`
keeps B from starving: once the oldest request for an absent model has waited that long, the models whose room it needs
are *closed*. They finish their requests and take no new ones until it is loaded. So a request waits at most
`fair_wait_s`, plus the longest response under way, plus the loads ahead of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence, Set

import msgspec

from cortex.fleet.placement.decision import Decision, Origin, Verdict
from cortex.fleet.placement.search import may_fit, search
from cortex.fleet.topology import STARTING, Fleet, ModelOnNode, Node, Residency
from cortex.wire.node.protocol import ModelState


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that wait for one model."""

    model_id: str
    since: float
    """When the oldest of them began to wait."""
    count: int = 1
    origin: Origin = "request"
    """`background` only if all of them are."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to do for the waiting requests."""

    starts: tuple[Decision, ...] = ()
    """Loads and wakes to start now, most urgent first; together they fit."""
    waits: tuple[Decision, ...] = ()
    """Models that stay queued, with the reason."""
    rejections: tuple[Decision, ...] = ()
    """Models that waiting cannot make available."""
    closed: frozenset[ModelOnNode] = frozenset()
    """Ready models that take no new requests until an overdue model is loaded."""

    blocked: frozenset[str] = frozenset()
    """Models without room now."""
    is_any_overdue: bool = False
    last_rechecked: str = ""
    """Where the next plan continues with models that are not urgent: see `plan`."""

    @property
    def awaited(self) -> frozenset[str]:
        """The nodes where requests must end before a waiting model can be loaded."""
        places = [place for wait in self.waits for each in wait.assessments for place in (each, *each.parts)]
        blocked = [place for place in places if place.verdict is Verdict.BLOCKED]
        leaders = {occupant.leader for place in blocked for occupant in place.occupants if occupant.leader is not None}
        return frozenset(leaders | {place.node for place in blocked})

    @property
    def partly_assessed(self) -> dict[str, Origin]:
        """Waiting models that may depend on nodes that were not assessed."""
        return {wait.model_id: wait.origin for wait in self.waits if wait.num_omitted}


MAX_RECHECKS = 8
"""Models without room that one plan checks again, the most urgent first."""
MAX_OTHER_RECHECKS = 4
"""The number of others that a tick checks in rotation, because changes by time or configuration do not appear as news
of a node."""


def plan(
    waiting: Iterable[Waiting],
    fleet: Fleet,
    now: float,
    *,
    blocked: Set[str] = frozenset(),
    news: Sequence[Node] | None = None,
    last_rechecked: str = "",
) -> Plan:
    """Decide for every waiting model. Pure: the same fleet gives the same plan, whatever the order of `waiting`.

    `blocked`: models for which an earlier plan found no room. Since then only the nodes in `news` have changed, or
    anything if that is None. `last_rechecked`: from the plan before.
    """
    starts: list[Decision] = []
    waits: list[Decision] = []
    rejections: list[Decision] = []
    closed: set[ModelOnNode] = set()
    still_blocked: set[str] = set()
    is_any_overdue = False
    ordered = turns(waiting, fleet, now)
    due = [
        group.model_id
        for group in ordered
        if group.model_id in blocked
        and (news is None or is_overdue(group, fleet, now))
        and not is_under_way(group.model_id, fleet)
    ]
    urgent, others = set(due[:MAX_RECHECKS]), sorted(due[MAX_RECHECKS:]) if news is None else []
    following = bisect_right(others, last_rechecked)
    in_rotation = [*others[following:], *others[:following]][:MAX_OTHER_RECHECKS]
    for group in ordered:
        if is_under_way(group.model_id, fleet):
            continue
        is_late = is_overdue(group, fleet, now)
        is_any_overdue = is_any_overdue or is_late
        is_urgent = group.model_id in urgent or group.model_id not in blocked
        if not is_urgent and group.model_id not in in_rotation:
            origin = group.origin
            if not any(may_fit(group.model_id, node, fleet, now, origin=origin) for node in news or ()):
                still_blocked.add(group.model_id)
                continue
        decision = search(group.model_id, fleet, now, origin=group.origin)
        if decision.action in ("load", "wake"):
            starts.append(decision)
            fleet = _started(fleet, decision)
        elif decision.action == "wait":
            waits.append(decision)
            still_blocked.add(group.model_id)
            if is_late and is_urgent:  # places that others close would be open again after the next plan
                fleet, closing = _close_for(group, fleet, now)
                closed |= closing
        elif decision.action == "reject":
            rejections.append(decision)
    return Plan(
        starts=tuple(starts),
        waits=tuple(waits),
        rejections=tuple(rejections),
        closed=frozenset(closed),
        blocked=frozenset(still_blocked),
        is_any_overdue=is_any_overdue,
        last_rechecked=in_rotation[-1] if in_rotation else last_rechecked,
    )


def is_under_way(model_id: str, fleet: Fleet) -> bool:
    """Whether a node that takes requests has the model ready or is loading it, so that nothing is to be decided."""
    for node in fleet.listing(model_id):
        held = node.residencies[model_id]
        is_coming = held.state in STARTING or any(each.model_id == model_id for each in node.reservations)
        is_open = node.healthy and not node.draining
        if is_open and (is_coming or held.state is ModelState.READY) and fleet.draining_member(held) is None:
            return True
    return False


def turns(waiting: Iterable[Waiting], fleet: Fleet, now: float) -> Sequence[Waiting]:
    """The order of models: overdue ones by age, then the others by priority and age."""

    def urgency(group: Waiting) -> tuple[float | str, ...]:
        if is_overdue(group, fleet, now):
            return 0, 0, group.since, group.model_id
        return 1, -fleet.catalogue.spec(group.model_id).turn, group.since, group.model_id

    return sorted(waiting, key=urgency)


def is_overdue(group: Waiting, fleet: Fleet, now: float) -> bool:
    """Whether these requests have waited long enough to close other models; never for background requests."""
    return group.origin != "background" and now - group.since >= fleet.rules.fair_wait_s


def _close_for(group: Waiting, fleet: Fleet, now: float) -> tuple[Fleet, frozenset[ModelOnNode]]:
    """The models to close for an overdue one, and the fleet with their room reserved for it."""
    later = search(group.model_id, fleet.as_if_idle(), now, origin=group.origin)
    if later.action not in ("load", "wake") or later.node is None:
        return fleet, frozenset()
    return _with_victims(_reserved(fleet, later), later, _closed), frozenset(later.evictions)


def _started(fleet: Fleet, decision: Decision) -> Fleet:
    """The fleet after a start was ordered: its bytes reserved, its victims unloading, on every node that it takes."""
    return _with_victims(_reserved(fleet, decision), decision, _unloading)


def _reserved(fleet: Fleet, decision: Decision) -> Fleet:
    for taken in (decision.chosen, *decision.parts):
        node = None if taken is None else fleet.node(taken.node)
        if taken is None or node is None:
            continue
        reservation = taken.reservation(decision.model_id)
        fleet = fleet.with_node(msgspec.structs.replace(node, reservations=(*node.reservations, reservation)))
    return fleet


def _with_victims(fleet: Fleet, decision: Decision, changed: Callable[[Residency], Residency]) -> Fleet:
    for name, model_id in decision.evictions:
        if (node := fleet.node(name)) is not None:
            residencies = {**node.residencies, model_id: changed(node.residencies[model_id])}
            fleet = fleet.with_node(msgspec.structs.replace(node, residencies=residencies))
    return fleet


def _closed(held: Residency) -> Residency:
    return msgspec.structs.replace(held, closed=True)


def _unloading(held: Residency) -> Residency:
    return msgspec.structs.replace(held, status=msgspec.structs.replace(held.status, state=ModelState.UNLOADING))
