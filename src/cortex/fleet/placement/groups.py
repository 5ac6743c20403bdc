"""Whether a model fits that several nodes run together: every member fits its node, or none is placed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.memory import MemoryNeed
from cortex.fleet.topology import RESERVES, Fleet, ModelOnNode, Node
from cortex.formats.units import gib
from cortex.wire.node.protocol import ModelState

from .decision import RANK, Assessment, Origin, Verdict
from .fitting import Fitting

_FITTING = (Verdict.ASLEEP, Verdict.FITS, Verdict.FITS_SOON, Verdict.FITS_AFTER_EVICTION)

_Fit = Callable[[Fitting], Assessment | None]


def fit_group(
    spec: ModelSpec, leader: Node, fleet: Fleet, now: float, *, need: MemoryNeed | None, origin: Origin
) -> Assessment:
    """The assessment of the leader, with those of the other members; its verdict is the worst of them. `need`: of the
    whole model, of which each node takes an equal part."""
    group = _Group(spec, leader, fleet, now, None if need is None else need.part_of(spec.num_nodes), origin)
    held = leader.residencies.get(spec.id)
    if held is not None and held.status.nodes:  # asleep: it wakes where it is
        waking = group.fit(held.status.nodes[1:], Fitting.wake)
        if waking is not None and _worst(waking).verdict in _FITTING:
            return _joined(waking)
    others = spec.node_names[1:] or group.best_others()
    if len(others) + 1 < spec.num_nodes:
        verdict, reason = _lacking(spec, leader, fleet) or group.blocked()
        return Assessment(node=leader.name, verdict=verdict, reason=reason)
    return _joined(group.fit(others, Fitting.load) or ())


def unfit_to_lead(spec: ModelSpec, node: Node, fleet: Fleet) -> tuple[Verdict, str] | None:
    """Why a node cannot lead the group, regardless of memory; `None` if memory decides."""
    unfit = unfit_for_group(spec, node)
    if unfit is not None and unfit[0] is Verdict.BLOCKED:
        return _lacking(spec, node, fleet) or unfit
    return unfit


def unreachable(node: Node) -> tuple[Verdict, str] | None:
    """The verdict on a node that does not respond; `None` if it does."""
    if node.healthy or node.drained:
        return None
    verdict = Verdict.STANDBY if node.sleep in RESERVES else Verdict.UNHEALTHY
    return verdict, node.problem or "no poll has succeeded yet"


def unfit_for_group(spec: ModelSpec, node: Node | None, *, is_waking: bool = False) -> tuple[Verdict, str] | None:
    """Why a node cannot run a member, regardless of memory; `None` if memory decides. `is_waking`: it has a sleeping
    one."""
    if node is None:
        return Verdict.UNHEALTHY, "the fleet has no such node; add it under [[neurons]]"
    if (why := unreachable(node)) is not None:
        return why
    if node.draining:
        return Verdict.DRAINING, node.why_draining
    if is_waking:
        return None
    if spec.only_on and node.name not in spec.only_on:
        return Verdict.EXCLUDED, f"loaded only on {', '.join(spec.only_on)} (`only_on` in models.toml)"
    if spec.harness not in node.harnesses:
        return Verdict.WRONG_HARNESS, f"has no harness `{spec.harness}`"
    if spec.harness not in node.group_harnesses:
        reason = (
            f"cannot run `{spec.harness}` together with other nodes: set `cluster_address` in its neuron.toml, and "
            "`group` of the harness unless it is ready-made"
        )
        return Verdict.WRONG_HARNESS, reason
    if any(member.id == spec.id and member.state is not ModelState.ASLEEP for member in node.members):
        return Verdict.BLOCKED, "still has a member of its previous start, which is being ended"
    return None


def _lacking(spec: ModelSpec, leader: Node, fleet: Fleet) -> tuple[Verdict, str] | None:
    """The reason if the fleet has too few nodes for a model that names only their number."""
    unfit = [unfit_for_group(spec, node) for node in fleet.nodes if node.name != leader.name]
    have = 1 + sum(each is None or each[0] is Verdict.BLOCKED for each in unfit)
    if spec.node_names or have >= spec.num_nodes:
        return None
    reason = f"needs {spec.num_nodes} nodes that run the harness `{spec.harness}` together, and there are {have}"
    return Verdict.CANNOT_SPAN, reason


class _Group:
    """One model with a certain leader."""

    def __init__(
        self, spec: ModelSpec, leader: Node, fleet: Fleet, now: float, need: MemoryNeed | None, origin: Origin
    ) -> None:
        self._spec, self._leader, self._fleet, self._now = spec, leader, fleet, now
        self._need, self._origin = need, origin

    def best_others(self) -> tuple[str, ...]:
        """The other nodes of a model that names only their number: the best ones, then by name."""
        found = [
            assessment
            for node in self._fleet.nodes
            if node.name != self._leader.name and unfit_for_group(self._spec, node) is None
            for assessment in (self._fit_one(node.name, Fitting.load, frozenset()),)
            if assessment is not None
        ]
        best = sorted(found, key=lambda each: (each.rank, sum(it.whole_bytes for it in each.victims), each.node))
        return tuple(each.node for each in best[: self._spec.num_nodes - 1])

    def blocked(self) -> tuple[Verdict, str]:
        """What must end first on one of the other nodes, so that they suffice."""
        found = ((node.name, unfit_for_group(self._spec, node)) for node in self._fleet.nodes)
        name, reason = next((name, unfit[1]) for name, unfit in found if unfit and unfit[0] is Verdict.BLOCKED)
        return Verdict.BLOCKED, f"{name}: {reason}"

    def fit(self, others: Sequence[str], fit: _Fit) -> list[Assessment] | None:
        """The assessments of all members, the leader's first. `None` if a node has none."""
        names = (self._leader.name, *others)
        found = self._fit_all(names, fit, frozenset())
        # A victim that is a group makes room on several nodes, so an earlier victim may be unnecessary.
        for eviction in sorted(_evictions(found or ())):
            left = _evictions(found or ()) - {eviction}
            without = self._fit_all(names, fit, left)
            if without is not None and _evictions(without) <= left:
                found = without
        return found

    def _fit_all(self, names: Sequence[str], fit: _Fit, leaving: frozenset[ModelOnNode]) -> list[Assessment] | None:
        """`leaving`: models evicted anyway, to which each node adds its own."""
        found = []
        for name in names:
            each = self._fit_one(name, fit, leaving)
            if each is None:
                return None
            leaving |= frozenset(each.evictions)
            found.append(each)
        return found

    def _fit_one(self, name: str, fit: _Fit, leaving: frozenset[ModelOnNode]) -> Assessment | None:
        node = self._fleet.node(name)
        unfit = unfit_for_group(self._spec, node, is_waking=fit is Fitting.wake)
        if unfit is not None:
            return Assessment(node=name, verdict=unfit[0], reason=unfit[1])
        assert node is not None
        # All members take equally many devices.
        part = self._spec.part
        limited = msgspec.structs.replace(node, max_devices_per_model=part.tensor_parallel)
        fitting = Fitting(part, limited, self._fleet, self._now, need=self._need, origin=self._origin, leaving=leaving)
        return fit(fitting)


def _joined(found: Sequence[Assessment]) -> Assessment:
    """The assessment of the leader, with those of the other members."""
    own, parts, worst = found[0], tuple(found[1:]), _worst(found)
    if worst.verdict not in _FITTING:
        reason = own.reason if worst is own else f"{worst.node}: {worst.reason}"
        facts = {"verdict": worst.verdict, "reason": reason, "held_by": worst.held_by, "is_short": worst.is_short}
        return msgspec.structs.replace(own, **facts, victims=(), devices=(), parts=parts)
    reasons = "; ".join((own.reason, *(f"{each.node}: {each.reason}" for each in parts)))
    tokens = [each.context_tokens for each in found if each.context_tokens is not None]
    is_short = any(each.is_short for each in found)
    return msgspec.structs.replace(
        own,
        verdict=worst.verdict,
        reason=f"{reasons}{_tightest(found)}",
        parts=parts,
        context_tokens=min(tokens, default=None),
        is_short=is_short,
    )


def _tightest(found: Sequence[Assessment]) -> str:
    """The node that limits the part of each, if they differ."""
    free = {each.node: [row.available_bytes for row in each.rows if row.chosen] for each in found}
    if any(each.need_bytes is None or not free[each.node] for each in found):
        return ""
    least = {name: min(each) for name, each in free.items()}
    if len({gib(each) for each in least.values()}) == 1:
        return ""
    name = min(least, key=lambda each: least[each])
    return f"; {name} with {gib(least[name])} free decides the part of each"


def _worst(found: Sequence[Assessment]) -> Assessment:
    return max(found, key=lambda each: RANK[each.verdict])


def _evictions(found: Sequence[Assessment]) -> frozenset[ModelOnNode]:
    return frozenset(eviction for each in found for eviction in each.evictions)
