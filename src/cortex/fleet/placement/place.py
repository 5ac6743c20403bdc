"""Where a model runs: one verdict per node, and the best of them. Of a model that several nodes run together, every
member fits its node, or none is placed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import nlargest
from typing import NamedTuple

import msgspec

from cortex.fleet.catalogue import MEBIBYTE, ModelSpec
from cortex.fleet.devices import bytes_held
from cortex.fleet.index import remembered
from cortex.fleet.memory import MemoryNeed, available_bytes, contexts_of, need_of
from cortex.fleet.rules import PlacementRules
from cortex.fleet.topology import RESERVES, STARTING, Fleet, ModelOnNode, Node, Residency
from cortex.formats.units import gib
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.contexts import tolerated
from cortex.wire.node.protocol import HostKV, ModelState
from cortex.wire.words import duration, replicas_in_words

from .decision import RANK, Action, Assessment, Decision, Origin, Verdict
from .fitting import Fitting, need_and_have

ACTIONS: dict[Verdict, Action] = {
    Verdict.RESIDENT: "route",
    Verdict.STARTING: "join",
    Verdict.ASLEEP: "wake",
    Verdict.FITS: "load",
    Verdict.FITS_SOON: "load",
    Verdict.FITS_AFTER_EVICTION: "load",
    Verdict.BLOCKED: "wait",
    Verdict.CROWDED: "wait",
}

_LASTING = frozenset(Verdict) - {*ACTIONS, Verdict.DRAINING, Verdict.STANDBY, Verdict.UNHEALTHY, Verdict.HELD}
"""Verdicts that do not depend on other models or the operator."""

KEPT_KV_WORTH = 0.25
"""How much slower a node may be and still be preferred because it keeps the model's conversations."""
MIN_KEPT_TOKENS = 1024
"""Fewer tokens are no reason to prefer a node: they are quickly recomputed."""
_MOST_ELSEWHERE = 8
"""The number of nodes considered for a model that needs a longer context than where it is."""
_FITTING = (Verdict.ASLEEP, Verdict.FITS, Verdict.FITS_SOON, Verdict.FITS_AFTER_EVICTION)

_Fit = Callable[[Fitting], Assessment | None]


def place(
    model_id: str,
    fleet: Fleet,
    now: float,
    *,
    origin: Origin = "request",
    only_on: str | None = None,
) -> Decision:
    """Decide where `model_id` runs.

    Order: resident and least loaded; starting; asleep; fits in free memory; fits once an unload in progress has ended;
    fits after evicting (fewest bytes, least recently used, lowest priority). Within each, nodes where the model is
    pinned come first, then those where it is asleep; of equal ones, those that give it more context, those where it was
    not measured to be slower, and those that keep its KV cache in host memory. `only_on` restricts the decision to one
    node.
    """
    spec = fleet.catalogue.spec(model_id)
    nodes = fleet.nodes if only_on is None else filter(None, [fleet.node(only_on)])
    return decided(spec, fleet, now, origin, [assess(spec, node, fleet, now, origin=origin) for node in nodes])


def decided(
    spec: ModelSpec, fleet: Fleet, now: float, origin: Origin, assessments: Sequence[Assessment], num_omitted: int = 0
) -> Decision:
    """The decision from `assessments`, the best of which decides."""
    found = tuple(sorted(assessments, key=partial(preference, rules=fleet.placement)))
    action = _action(found[0]) if found else "reject"
    return Decision(model_id=spec.id, at=now, origin=origin, action=action, assessments=found, num_omitted=num_omitted)


def place_new(model_id: str, num_bytes: int, fleet: Fleet, now: float) -> Decision:
    """Where the operator could load a model that no node has yet, of which only the size is known."""
    spec = ModelSpec(id=model_id, vram_mb=max(1, -(-num_bytes // MEBIBYTE)))
    others = tuple(known for known in fleet.catalogue.models if known.id != model_id)
    # An alias of the same name gives way, as it does in the load.
    catalogue = msgspec.structs.replace(fleet.catalogue, models=(*others, spec), aliases={})
    return place(model_id, msgspec.structs.replace(fleet, catalogue=catalogue), now, origin="operator")


def assess(spec: ModelSpec, node: Node, fleet: Fleet, now: float, *, origin: Origin) -> Assessment:
    """Assess `spec` on `node`. A lasting obstacle takes precedence over the fact that the node drains."""
    held = node.residencies.get(spec.id)
    found = _assess(spec, node, held, fleet, now, origin)
    if node.draining and (node.devices or node.residencies):  # it has reported what it is
        undrained = _assess(spec, msgspec.structs.replace(node, draining=False), held, fleet, now, origin)
        found = undrained if undrained.verdict in _LASTING else found
    if most_bytes := _most_kept_bytes(spec.id, fleet):
        kept = None if held is None else held.status.kv_host
        found = msgspec.structs.replace(found, kv_host=kept, kv_elsewhere=1.0 - _worth_bytes(kept) / most_bytes)
    if held is None or held.status.bench is None:
        return found
    bench = held.status.bench
    return msgspec.structs.replace(found, bench=bench, slower_by=_slower_by(spec.id, bench, fleet))


def _most_kept_bytes(model_id: str, fleet: Fleet) -> int:
    """The most KV cache of the model that any healthy node keeps in host memory."""
    known = _found_most_kept(fleet)
    if model_id not in known:
        up = (node.residencies[model_id] for node in fleet.listing(model_id) if node.healthy)
        known[model_id] = max((_worth_bytes(held.status.kv_host) for held in up), default=0)
    return known[model_id]


def _worth_bytes(kept: HostKV | None) -> int:
    return 0 if kept is None or 0 < kept.num_tokens < MIN_KEPT_TOKENS else kept.num_bytes


@remembered
def _found_most_kept(_fleet: Fleet) -> dict[str, int]:
    """By model, filled on demand."""
    return {}


def _slower_by(model_id: str, bench: BenchResult, fleet: Fleet) -> float:
    """How much slower this node is than the fastest measured one, 0 to 1."""
    listing = (fleet.nodes[position].residencies[model_id] for position in fleet.index.listing.get(model_id, ()))
    fastest = max((held.status.bench.stream_rate for held in listing if held.status.bench is not None), default=0.0)
    return 1.0 - bench.stream_rate / fastest if fastest and bench.stream_rate else 0.0


def _assess(
    spec: ModelSpec, node: Node, held: Residency | None, fleet: Fleet, now: float, origin: Origin
) -> Assessment:
    need = raised_need(spec, node, need_of(spec, node, fleet))
    found = without_memory(spec, node, held, fleet, now, origin)
    if found is None and spec.num_nodes > 1:
        return fit_group(spec, node, fleet, now, need=need, origin=origin)
    if need is not None:
        need = need.part_of(node.num_nodes_of(spec))
    if found is None:
        fitting = Fitting(spec, node, fleet, now, need=need, origin=origin)
        return fitting.wake() or fitting.load()
    verdict, reason = found
    return Assessment(
        node=node.name,
        verdict=verdict,
        reason=reason,
        pinned=node.name in spec.pinned_on,
        need_bytes=None if need is None else need.takes_bytes,
        takes_bytes=None if need is None else need.takes_bytes,
        context_tokens=None if held is None or verdict is not Verdict.RESIDENT else held.status.context_tokens,
        devices=() if held is None else held.status.devices,
        rows=need_and_have(node, need, _num_devices(spec, node)),
        ceiling_bytes=node.ceiling_bytes,
        load=0.0 if held is None else _load(held),
    )


def raised_need(spec: ModelSpec, node: Node, need: MemoryNeed | None) -> MemoryNeed | None:
    """The model's need on `node`, raised if a load there ran out of memory."""
    if (raised := node.raised_needs.get(spec.id)) is None:
        return need
    return MemoryNeed(takes_bytes=raised, least_bytes=raised) if need is None else need.at_least(raised)


def _layers(held: Residency) -> str:
    """The layers on each device, for a model that is divided by layers."""
    layers = zip(held.status.stage_layers, held.status.devices, strict=False)
    parts = [f"{count} on device {device}" for count, device in layers]
    return f"; layers: {', '.join(parts)}" if parts else ""


def _num_devices(spec: ModelSpec, node: Node) -> int:
    held = node.residencies.get(spec.id)
    reported = 0 if held is None else len(held.status.devices)
    return reported or spec.part.tensor_parallel


class UnmetPin(NamedTuple):
    """A pinned model that is not loaded where it should be."""

    node: str | None
    """`None` for any node."""
    model: str


def unmet_pins(fleet: Fleet) -> tuple[UnmetPin, ...]:
    """The pinned models that should be loaded and are not."""
    found = []
    for spec in fleet.catalogue.pinned:
        if spec.pinned_on:
            named = (fleet.node(name) for name in spec.pinned_on)
            found += [
                UnmetPin(node.name, spec.id)
                for node in named
                if node is not None and node.healthy and not _is_loaded_or_starting(spec, node)
            ]
        elif not any(_is_loaded_or_starting(spec, node) for node in fleet.nodes if node.healthy):
            found.append(UnmetPin(None, spec.id))
    return tuple(found)


def _is_loaded_or_starting(spec: ModelSpec, node: Node) -> bool:
    held = node.residencies.get(spec.id)
    is_reserved = any(reservation.model_id == spec.id for reservation in node.reservations)
    return is_reserved or (held is not None and (held.state is ModelState.READY or held.state in STARTING))


def without_memory(
    spec: ModelSpec, node: Node, held: Residency | None, fleet: Fleet, now: float, origin: Origin
) -> tuple[Verdict, str] | None:
    """The verdict if it does not depend on memory, else `None`."""
    if (why := unreachable(node)) is not None:
        return why
    if node.draining:
        return Verdict.DRAINING, node.why_draining
    if held is not None and (part := fleet.draining_member(held)) is not None:
        return Verdict.DRAINING, f"{part.name} runs a part of it, and is {part.why_draining}"
    if held is not None and held.state is ModelState.READY:
        replicas = replicas_in_words(held.status.replica_devices)
        parts = f"parts on {', '.join(held.status.nodes[1:])}" if held.status.nodes else ""
        others = filter(None, (_waiting(held), parts, replicas, _cut_context(held)))
        facts = [f"ready, requests in progress: {int(_load(held))}", *others]
        return Verdict.RESIDENT, ", ".join(facts) + _layers(held)
    if held is not None and held.state in STARTING:
        return Verdict.STARTING, f"{held.state} for {duration(now - held.state_since)}"
    if any(reservation.model_id == spec.id for reservation in node.reservations):
        return Verdict.STARTING, "load ordered"
    if held is not None and held.state is ModelState.UNLOADING:
        return Verdict.BLOCKED, f"unloading for {duration(now - held.state_since)}"
    if not node.takes_orders:
        return Verdict.NOT_LISTED, "does not serve this model, and does not load models on request"
    if held is None and not fleet.catalogue.has(spec.id):
        return Verdict.NOT_LISTED, "does not list this model, and neither does the catalogue"
    if spec.policy == "manual" and origin not in ("operator", "pin"):
        return Verdict.MANUAL, "loaded only by the operator: run `cortex load`"
    if spec.only_on and node.name not in spec.only_on:
        return Verdict.EXCLUDED, f"loaded only on {', '.join(spec.only_on)} (`only_on` in models.toml)"
    if spec.node_names and node.name in spec.node_names[1:]:
        return Verdict.EXCLUDED, f"takes a part of it; {spec.node_names[0]} serves it (`nodes` in models.toml)"
    if spec.node_names and node.name != spec.node_names[0]:
        return Verdict.EXCLUDED, f"loaded only on {', '.join(spec.node_names)} (`nodes` in models.toml)"
    leading = next((member.nodes[0] for member in node.members if member.id == spec.id), None)
    if leading is not None and (leader := fleet.node(leading)) is not None and _leads(spec, leader):
        return Verdict.EXCLUDED, f"runs a part of it, which {leading} serves"
    if (harness := node.harness_of(spec)) not in node.harnesses:
        have = f"only {', '.join(node.harnesses)}" if node.harnesses else "and no other"
        return Verdict.WRONG_HARNESS, f"has no harness `{harness}`, {have}"
    if spec.num_nodes > 1 and (unfit := unfit_to_lead(spec, node, fleet)) is not None:
        return unfit
    failed = Verdict.UNSUPPORTED if held is not None and held.is_unsupported else Verdict.FAILED
    if held is not None and held.is_absent and (origin != "operator" or held.is_unusable) and not _is_other(spec, held):
        return failed, held.status.reason or "its files are missing"
    if held is not None and held.state is ModelState.FAILED and origin != "operator":
        age_s = now - held.state_since
        if age_s < fleet.rules.retry_failed_after_s:
            return failed, held.status.reason or f"failed to load {duration(age_s)} ago"
    return None


def _is_other(spec: ModelSpec, held: Residency) -> bool:
    """Whether the entry names other files, or another server, than the node has read."""
    status = held.status
    if spec.harness not in (None, status.harness):
        return True
    is_other_source = spec.source is not None and status.source is not None and spec.source != status.source
    return is_other_source or (spec.quant is not None and spec.quant != status.requested_quant)


def _leads(spec: ModelSpec, node: Node) -> bool:
    held = node.residencies.get(spec.id)
    return node.healthy and held is not None and bool(held.status.nodes)


def _cut_context(held: Residency) -> str:
    """The context of a loaded model, if memory limits it."""
    tokens, full_tokens = held.status.context_tokens, held.status.full_context_tokens
    is_cut = tokens is not None and full_tokens is not None and tokens < full_tokens
    return f"context {tokens:,} of {full_tokens:,} tokens" if is_cut else ""


def _load(held: Residency) -> float:
    """The number of requests, with KV cache use as the tie-break."""
    reported = held.status.load
    return max(held.in_flight, reported.running + reported.waiting) + min(reported.kv_used_fraction, 0.99)


def _waiting(held: Residency) -> str:
    load = held.status.load
    classes = ", ".join(f"{number} {name}" for name, number in load.waiting_by_class.items())
    return f"waiting: {load.waiting}" + f" ({classes} for a slot)" * bool(classes) if load.waiting else ""


def _action(assessment: Assessment) -> Action:
    action = ACTIONS.get(assessment.verdict, "reject")
    return "wake" if action == "load" and assessment.asleep else action


def preference(assessment: Assessment, rules: PlacementRules) -> tuple[float | str, ...]:
    """A sort key, the best assessment first."""
    chosen = [row for row in assessment.rows if row.chosen]
    left_over = sum(row.available_bytes - (row.need_bytes or 0) for row in chosen)
    size_known = assessment.need_bytes is not None
    return (
        assessment.rank,
        not assessment.pinned,
        not assessment.asleep,
        assessment.load,
        sum(victim.whole_bytes for victim in assessment.victims),
        max((victim.last_used for victim in assessment.victims), default=0.0),
        max((victim.priority for victim in assessment.victims), default=0),
        not size_known,
        assessment.missing_context,
        assessment.is_cut,
        assessment.slower_by + KEPT_KV_WORTH * assessment.kv_elsewhere,
        # A model of unknown size goes to the device with the most free memory.
        left_over if size_known and rules.strategy == "pack" else -left_over,
        assessment.node,
    )


def to_load_again(
    model_id: str,
    tokens: int,
    fleet: Fleet,
    now: float,
    *,
    prompt_tokens: int = 0,
    origin: Origin = "request",
    is_operator: bool = False,
) -> Decision | None:
    """The reload that gives an idle replica a context of `tokens` and evicts only idle models. None if requests would
    be lost, or memory is lacking. Models of several nodes are not reloaded, and pinned ones only for operators or up to
    the context of their entry. `prompt_tokens`: only where the operator allows such a prompt."""
    spec = fleet.catalogue.spec(model_id)
    moves_pinned = is_operator or tokens <= (spec.context_tokens or 0)
    for node in fleet.listing(model_id):
        held = node.residencies[model_id]
        is_movable = held.state is ModelState.READY and not (held.is_busy or held.closed)
        if not (is_movable and node.healthy and node.takes_orders and not node.draining) or held.status.nodes:
            continue
        if held.status.forbids_prompt(prompt_tokens):
            continue
        if not moves_pinned and (held.pinned or spec.is_pinned_on(node.name)):
            continue
        emptied = _without(node, held)
        need = need_of(spec, emptied, fleet)
        if need is None or need.contexts is None or need.contexts.full_tokens <= (held.status.context_tokens or 0):
            continue
        found = assess(spec, emptied, fleet.with_node(emptied), now, origin=origin)
        goal = min(tokens, need.contexts.full_tokens)
        least = goal if (held.status.context_tokens or 0) >= tolerated(goal) else tolerated(goal)
        is_start = found.verdict in (Verdict.FITS, Verdict.FITS_AFTER_EVICTION)
        if is_start and (found.context_tokens or 0) >= least:
            return decided(spec, fleet, now, origin, [found])
    return None


def to_load_elsewhere(
    model_id: str, tokens: int, fleet: Fleet, now: float, *, prompt_tokens: int = 0, origin: Origin = "request"
) -> Decision | None:
    """The load that gives the model a context of `tokens` on a node that lists it and does not have it ready, and
    evicts only idle models. None if it is starting somewhere, or if no such node has the memory. `prompt_tokens`: as
    for `to_load_again`."""
    spec = fleet.catalogue.spec(model_id)
    reserved = (reservation.model_id for node in fleet.nodes for reservation in node.reservations)
    listing = fleet.listing(model_id)
    if model_id in reserved or any(node.residencies[model_id].state in STARTING for node in listing):
        return None

    def may_have(node: Node) -> bool:
        held = node.residencies[model_id]
        if held.status.forbids_prompt(prompt_tokens):
            return False
        contexts = contexts_of(spec, held.status)
        most_tokens = 0 if contexts is None else min(contexts.full_tokens, contexts.empty_tokens)
        return held.state is not ModelState.READY and most_tokens >= tokens

    candidates = nlargest(_MOST_ELSEWHERE, filter(may_have, listing), key=available_bytes)
    found = [assess(spec, node, fleet, now, origin=origin) for node in candidates]
    fitting = [each for each in found if each.verdict in _FITTING and (each.context_tokens or 0) >= tokens]
    return decided(spec, fleet, now, origin, fitting) if fitting else None


def _without(node: Node, held: Residency) -> Node:
    """The node once the model is unloaded."""
    devices = [
        msgspec.structs.replace(
            device, free_bytes=device.free_bytes + bytes_held(device.index, device.kind, held.status)
        )
        for device in node.devices
    ]
    cold = msgspec.structs.replace(
        held, status=msgspec.structs.replace(held.status, state=ModelState.COLD, measured_bytes=None)
    )
    return msgspec.structs.replace(node, devices=tuple(devices), residencies={**node.residencies, held.model_id: cold})


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
