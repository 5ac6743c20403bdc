"""Whether a model that spans nodes fits: on its lead, and a part of it on every other node that it names."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.memory import Need
from cortex.fleet.topology import Fleet, ModelOnNode, Node

from .decision import Assessment, Origin, Verdict
from .fitting import fit

_FITTING = (Verdict.FITS, Verdict.FITS_AFTER_EVICTION)
_WORST_FIRST = {verdict: -rank for rank, verdict in enumerate(Verdict)}


def fit_over_nodes(
    spec: ModelSpec, lead: Node, peers: tuple[str, ...], fleet: Fleet, now: float, *, need: Need | None, origin: Origin
) -> Assessment:
    """The assessment of the lead, which is as bad as that of the worst node. `need`: of one node's part."""
    held = lead.residencies.get(spec.id)
    count = max(spec.devices_per_node, 1 if held is None else held.status.num_devices)
    part = msgspec.structs.replace(spec, min_devices=count, nodes=())

    def assess(leaving: frozenset[ModelOnNode]) -> list[Assessment]:
        """All nodes; `leaving`: what is evicted anyway, to which each node adds."""
        found = []
        for name in (lead.name, *peers):
            node = fleet.node(name) or lead
            # All nodes take equally many devices.
            limited = msgspec.structs.replace(node, max_devices_per_model=min(node.max_devices_per_model, count))
            each = _unfit(spec, name, fleet.node(name)) or fit(
                part, limited, fleet, now, need=need, origin=origin, spans=True, leaving=leaving
            )
            leaving |= frozenset(each.evictions)
            found.append(each)
        return found

    found = assess(frozenset())
    # A victim that spans nodes too makes room on all of them, so that one chosen before it may be unnecessary.
    for eviction in sorted(_evictions(found)):
        others = _evictions(found) - {eviction}
        without = assess(others)
        if _evictions(without) <= others:
            found = without
    own, parts = found[0], tuple(found[1:])
    worst = min((own, *parts), key=lambda each: _WORST_FIRST[each.verdict])
    reasons = "; ".join((own.reason, *(f"{each.node}: {each.reason}" for each in parts)))
    if worst.verdict not in _FITTING:
        reason = own.reason if worst is own else f"{worst.node}: {worst.reason}"
        facts = {"verdict": worst.verdict, "reason": reason, "held_by": worst.held_by}
        return msgspec.structs.replace(own, **facts, victims=(), devices=(), parts=parts)
    return msgspec.structs.replace(own, verdict=worst.verdict, reason=reasons, parts=parts)


def _evictions(found: Sequence[Assessment]) -> frozenset[ModelOnNode]:
    return frozenset(eviction for each in found for eviction in each.evictions)


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
