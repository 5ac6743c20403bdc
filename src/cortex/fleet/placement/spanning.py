"""Whether a model that spans nodes fits: on its lead, and a part of it on every other node that it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.memory import Need
from cortex.fleet.topology import Fleet, ModelOnNode, Node
from cortex.formats.units import gib

from .decision import RANK, SHORT_RANK, Assessment, Origin, Verdict
from .fitting import Fitting, capacity_bytes

_FITTING = (Verdict.ASLEEP, Verdict.FITS, Verdict.FITS_SOON, Verdict.FITS_AFTER_EVICTION)

_Fit = Callable[[Fitting], Assessment | None]
_Found = list[Assessment]
"""The assessment of the lead, then those of the other nodes."""


def fit_over_nodes(
    spec: ModelSpec, lead: Node, peers: tuple[str, ...], fleet: Fleet, now: float, *, need: Need | None, origin: Origin
) -> Assessment:
    """The assessment of the lead, which is as bad as that of the worst node. `need`: of the whole model."""
    span = _Span(spec, lead, peers, fleet, now, need, origin)
    waking = span.wake()
    if waking is not None and _worst(waking).verdict in _FITTING:
        return _joined(waking, by_layers=span.by_layers)
    found = _joined(span.load(), by_layers=span.by_layers)
    if span.by_layers and need is not None and found.verdict is Verdict.TOO_SMALL:
        have = gib(sum(span.capacities()))
        reason = f"needs {gib(need.least_bytes)} on {len(span.names)} nodes, which have {have} together"
        return msgspec.structs.replace(found, reason=reason)
    return found


class _Span:
    """A model on all of its nodes."""

    def __init__(
        self,
        spec: ModelSpec,
        lead: Node,
        peers: tuple[str, ...],
        fleet: Fleet,
        now: float,
        need: Need | None,
        origin: Origin,
    ) -> None:
        self.names = (lead.name, *peers)
        self.by_layers = lead.divides_by_layers(spec)
        held = lead.residencies.get(spec.id)
        self._count = max(spec.devices_per_node(len(self.names)), 1 if held is None else held.status.num_devices)
        by = (
            {"tensor_parallel": 1, "pipeline_parallel": self._count}
            if self.by_layers
            else {"tensor_parallel": self._count}
        )
        self._part = msgspec.structs.replace(spec, nodes=(), **by)
        self._spec, self._lead, self._fleet, self._now, self._need = spec, lead, fleet, now, need
        self._origin = origin

    def wake(self) -> _Found | None:
        """`None`: a part is not asleep, or has no room where it is."""
        return self._fit_all(self._needs_asleep(), Fitting.wake)

    def load(self) -> _Found:
        """In equal parts, or by layers: by the memory that is free, or by that of the empty nodes with evictions."""
        need = self._need
        if need is None or not self.by_layers:
            each_need = None if need is None else need.part_of(len(self.names))
            return self._fit_all([each_need] * len(self.names), Fitting.load) or []
        best = min((self._by_free_memory(need), self._divided(need, self.capacities())), key=_badness)
        for eviction in sorted(_evictions(best)):
            # Without it other nodes may take more layers.
            gone = _evictions(best) - {eviction}
            found = self._on(self._fleet.without(gone))._by_free_memory(need)  # noqa: SLF001 - of the same class
            if _worst(found).verdict is Verdict.FITS:
                best = [_after(each, before, gone) for each, before in zip(found, best, strict=True)]
        return best

    def capacities(self) -> list[int]:
        """What the nodes could give if they were empty."""
        nodes = (self._fleet.node(name) or self._lead for name in self.names)
        return [max(1, capacity_bytes(self._part, node, self._count)) for node in nodes]

    def _by_free_memory(self, need: Need) -> _Found:
        free = self._assess([None] * len(self.names), Fitting.load, frozenset()) or []
        return self._divided(need, list(map(_free_bytes, free)))

    def _divided(self, need: Need, weights: Sequence[int]) -> _Found:
        """The layers divided in these proportions."""
        return self._fit_all([need.part_of(sum(weights), weight) for weight in weights], Fitting.load) or []

    def _on(self, fleet: Fleet) -> _Span:
        lead = fleet.node(self._lead.name) or self._lead
        return _Span(self._spec, lead, self.names[1:], fleet, self._now, self._need, self._origin)

    def _fit_all(self, needs: Sequence[Need | None], fit: _Fit) -> _Found | None:
        found = self._assess(needs, fit, frozenset())
        # A victim that spans nodes too makes room on all of them, so that one chosen before it may be unnecessary.
        for eviction in sorted(_evictions(found or ())):
            others = _evictions(found or ()) - {eviction}
            without = self._assess(needs, fit, others)
            if without is not None and _evictions(without) <= others:
                found = without
        return found

    def _assess(self, needs: Sequence[Need | None], fit: _Fit, leaving: frozenset[ModelOnNode]) -> _Found | None:
        """All nodes; `leaving`: what is evicted anyway, to which each node adds. `None` if `fit` has none of a node."""
        found: _Found = []
        for name, need in zip(self.names, needs, strict=True):
            node = self._fleet.node(name) or self._lead
            # All nodes take equally many devices.
            limited = msgspec.structs.replace(node, max_devices_per_model=min(node.max_devices_per_model, self._count))
            fitting = Fitting(
                self._part,
                limited,
                self._fleet,
                self._now,
                need=need,
                origin=self._origin,
                spans=True,
                leaving=leaving,
            )
            each = _unfit(self._spec, name, self._fleet.node(name)) or fit(fitting)
            if each is None:
                return None
            leaving |= frozenset(each.evictions)
            found.append(each)
        return found

    def _needs_asleep(self) -> list[Need | None]:
        """What the part of each node takes when it wakes."""
        if not self.by_layers:
            return [None if self._need is None else self._need.part_of(len(self.names))] * len(self.names)
        held = self._lead.residencies.get(self._spec.id)
        sizes = {node.name: share.awake_bytes for node, share in self._fleet.parts(self._lead.name, self._spec.id)}
        sizes[self._lead.name] = 0 if held is None else held.status.measured_bytes or 0
        known = (sizes.get(name, 0) for name in self.names)
        return [Need(takes_bytes=size, least_bytes=size) if size else None for size in known]


def _joined(found: Sequence[Assessment], *, by_layers: bool) -> Assessment:
    """The assessment of the lead, with those of the other nodes."""
    own, parts, worst = found[0], tuple(found[1:]), _worst(found)
    if worst.verdict not in _FITTING:
        reason = own.reason if worst is own else f"{worst.node}: {worst.reason}"
        facts = {"verdict": worst.verdict, "reason": reason, "held_by": worst.held_by, "is_short": worst.is_short}
        return msgspec.structs.replace(own, **facts, victims=(), devices=(), parts=parts)
    reasons = "; ".join((own.reason, *(f"{each.node}: {each.reason}" for each in parts)))
    reason = f"{reasons}{_smallest_share(found, by_layers=by_layers)}"
    tokens = [each.context_tokens for each in found if each.context_tokens is not None]
    context = {"context_tokens": min(tokens, default=None), "is_short": _is_short(found)}
    return msgspec.structs.replace(own, verdict=worst.verdict, reason=reason, parts=parts, **context)


def _smallest_share(found: Sequence[Assessment], *, by_layers: bool) -> str:
    """Which node decides how much each of them takes, or how the layers are divided, if the nodes differ."""
    free = {each.node: [row.available_bytes for row in each.rows if row.chosen] for each in found}
    if any(each.need_bytes is None or not free[each.node] for each in found):
        return ""
    if by_layers:
        shares = ", ".join(f"{gib(each.need_bytes)} on {each.node}" for each in found)
        least = min(found, key=lambda each: each.need_bytes or 0)
        return f"; layers by memory: {shares}; {least.node} with {gib(sum(free[least.node]))} free has the fewest"
    tightest = {name: min(each) for name, each in free.items()}
    if len({gib(each) for each in tightest.values()}) == 1:
        return ""
    name = min(tightest, key=lambda each: tightest[each])
    return f"; {name} with {gib(tightest[name])} free decides the share of each"


def _free_bytes(found: Assessment) -> int:
    """What a load may take of the chosen devices now, within the ceiling of the node."""
    free_bytes = sum(row.available_bytes for row in found.rows if row.chosen)
    return max(1, free_bytes if found.max_bytes is None else min(free_bytes, found.max_bytes))


def _after(found: Assessment, before: Assessment, gone: frozenset[ModelOnNode]) -> Assessment:
    """`found` on a node without the models that are `gone`, which are unloaded for it. `before`: as the node is."""
    victims = tuple(each for each in before.occupants if ModelOnNode(each.lead or found.node, each.model_id) in gone)
    facts = {"victims": victims, "occupants": before.occupants, "parts": ()}
    if not victims:
        return msgspec.structs.replace(found, **facts)
    reason = f"fits after unloading {', '.join(victim.model_id for victim in victims)}"
    return msgspec.structs.replace(found, **facts, verdict=Verdict.FITS_AFTER_EVICTION, reason=reason)


def _worst(found: Sequence[Assessment]) -> Assessment:
    return max(found, key=lambda each: RANK[each.verdict])


def _badness(found: Sequence[Assessment]) -> tuple[int, int]:
    """A sort key, the best first: the worst verdict, then the evicted bytes."""
    victims = {victim.model_id: victim.whole_bytes for each in found for victim in each.victims}
    ranks = SHORT_RANK if _is_short(found) else RANK
    return ranks[_worst(found).verdict], sum(victims.values())


def _is_short(found: Sequence[Assessment]) -> bool:
    """Whether the model gets less context than it is to have, because of one of the nodes."""
    return any(each.is_short for each in found)


def _evictions(found: Sequence[Assessment]) -> frozenset[ModelOnNode]:
    return frozenset(eviction for each in found for eviction in each.evictions)


def _unfit(spec: ModelSpec, name: str, node: Node | None) -> Assessment | None:
    """Why a node cannot take a part, whatever its memory; `None` where memory decides."""
    if node is None:
        verdict, reason = Verdict.UNHEALTHY, "the fleet has no such node; add it under [[neurons]]"
    elif not node.healthy and not node.drained:
        verdict, reason = Verdict.UNHEALTHY, node.problem or "no poll has succeeded yet"
    elif node.draining:
        verdict, reason = Verdict.DRAINING, node.why_draining
    elif not node.takes_orders or node.harness_of(spec) not in node.harnesses:
        verdict, reason = Verdict.WRONG_HARNESS, "takes no parts of models"
    else:
        return None
    return Assessment(node=name, verdict=verdict, reason=reason)
