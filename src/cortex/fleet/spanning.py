"""Whether a model that spans nodes fits: on its lead, and a part of it on every other node that it names."""

from __future__ import annotations

import msgspec

from .catalogue import ModelSpec
from .decision import Assessment, Origin, Verdict
from .fitting import fit
from .memory import Need
from .topology import Fleet, Node

_FITTING = (Verdict.FITS, Verdict.FITS_AFTER_EVICTION)
_WORST_FIRST = {verdict: -rank for rank, verdict in enumerate(Verdict)}


def fit_over_nodes(
    spec: ModelSpec, lead: Node, peers: tuple[str, ...], fleet: Fleet, now: float, *, need: Need | None, origin: Origin
) -> Assessment:
    """The assessment of the lead, which is as bad as that of the worst node. `need`: of one node's part."""
    held = lead.residencies.get(spec.id)
    count = max(spec.devices_per_node, 1 if held is None else held.status.num_devices)
    part = msgspec.structs.replace(spec, min_devices=count, nodes=())
    found: dict[str, Assessment] = {}

    def assess(node: Node) -> Assessment:
        others = (each for name, each in found.items() if name != node.name)
        leaving = frozenset(eviction for other in others for eviction in other.evictions)
        # All nodes take equally many devices.
        limited = msgspec.structs.replace(node, max_devices_per_model=min(node.max_devices_per_model, count))
        return fit(part, limited, fleet, now, need=need, origin=origin, spans=True, leaving=leaving)

    # Twice: a victim that spans nodes too makes room on all of them, also on those that were assessed before.
    for name in (lead.name, *peers) * 2:
        node = fleet.node(name)
        found[name] = _unfit(spec, name, node) or assess(node or lead)
    own, *others = found.values()
    parts = tuple(others)
    worst = min((own, *parts), key=lambda each: _WORST_FIRST[each.verdict])
    reasons = "; ".join((own.reason, *(f"{each.node}: {each.reason}" for each in parts)))
    if worst.verdict not in _FITTING:
        reason = own.reason if worst is own else f"{worst.node}: {worst.reason}"
        facts = {"verdict": worst.verdict, "reason": reason, "held_by": worst.held_by}
        return msgspec.structs.replace(own, **facts, victims=(), devices=(), parts=parts)
    return msgspec.structs.replace(own, verdict=worst.verdict, reason=reasons, parts=parts)


def _unfit(spec: ModelSpec, name: str, node: Node | None) -> Assessment | None:
    """Why a node cannot take a part, whatever its memory; `None` where memory decides."""
    if node is None:
        verdict, reason = Verdict.UNHEALTHY, "the fleet has no such node; add it under [[neurons]]"
    elif not node.healthy:
        verdict, reason = Verdict.UNHEALTHY, node.problem or "no poll has succeeded yet"
    elif node.draining:
        verdict, reason = Verdict.DRAINING, node.why_draining
    elif not node.has_lifecycle or spec.harness not in node.harnesses:
        verdict, reason = Verdict.WRONG_HARNESS, "takes no parts of models"
    else:
        return None
    return Assessment(node=name, verdict=verdict, reason=reason)
