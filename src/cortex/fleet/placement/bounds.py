"""Optimistic bounds on how good a node can be for a model, without assessing it.

Assessing a node takes a hundred times as long. A bound is a sort key that is never greater than the preference of the
node's assessment, so that nodes whose bound is worse than the best assessment need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.index import remembered
from cortex.fleet.memory import DeviceLedger, MemoryNeed, whole_ledger
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.wire.node.protocol import ModelState

from .decision import RANK, SHORT_RANK, SPLIT_RANK, Origin, Verdict
from .eviction import protected
from .fitting import eligible_devices

Bound = tuple[Any, ...]
"""A prefix of a preference, which begins with numbers and ends with a name. A prefix sorts before every
continuation."""

_ASLEEP, _FITS, _EVICTION = RANK[Verdict.ASLEEP], RANK[Verdict.FITS], RANK[Verdict.FITS_AFTER_EVICTION]
_FITS_SHORT, _EVICTION_SHORT = SHORT_RANK[Verdict.FITS], SHORT_RANK[Verdict.FITS_AFTER_EVICTION]
_SOON_OF = {ranks[Verdict.FITS_AFTER_EVICTION]: ranks[Verdict.FITS_SOON] for ranks in (RANK, SHORT_RANK)}
_SHORT_OF = {RANK[verdict]: SHORT_RANK[verdict] for verdict in Verdict}
_BLOCKED = RANK[Verdict.BLOCKED]
_SPLIT: Bound = (SPLIT_RANK[Verdict.FITS],)
_TOO_SMALL: Bound = (RANK[Verdict.TOO_SMALL],)


class _Resident(NamedTuple):
    model_id: str
    num_bytes: int
    """On this device."""
    is_part: bool
    """A part of a model that another node serves."""
    is_reserved: bool


class _DeviceMemory(NamedTuple):
    device: DeviceLedger
    available_bytes: int
    capacity_bytes: int
    balance_bytes: int
    residents: tuple[_Resident, ...]


class _NodeMemory(NamedTuple):
    devices: tuple[_DeviceMemory, ...]
    available_bytes: tuple[int, ...]
    """Bytes that a load could take of each device now, ascending."""
    max_capacity_bytes: int
    total_bytes: int
    """Bytes that a load could take of all devices if they were empty."""
    has_ceilings: bool
    may_divide: bool
    """Whether a model may take several devices there."""
    is_plain: bool
    """Whether memory alone decides if a model fits there."""
    may_be_leaving: bool
    """Whether a model, or a part of one, may be unloading there."""


@remembered
def node_memory(node: Node) -> _NodeMemory:
    """The memory of `node`, prepared for bounds."""
    devices = eligible_devices(whole_ledger(node))
    reserved = {reservation.model_id for reservation in node.reservations}
    shared = {member.id for member in node.members}
    may_be_leaving = bool(shared) or any(held.state is ModelState.UNLOADING for held in node.active)
    parts = tuple(
        _DeviceMemory(
            device,
            device.available_bytes,
            device.capacity_bytes,
            device.balance_bytes,
            tuple(
                _Resident(
                    each.model_id,
                    each.num_bytes,
                    each.model_id in shared,
                    each.model_id in reserved,
                )
                for each in device.holdings
            ),
        )
        for device in devices
    )
    return _NodeMemory(
        parts,
        tuple(sorted(each.available_bytes for each in parts)),
        max((each.capacity_bytes for each in parts), default=0),
        sum(each.capacity_bytes for each in parts),
        any(each.ceiling_bytes is not None or each.node_left_bytes is not None for each in devices),
        node.max_devices_per_model > 1 and len(parts) > 1,
        bool(parts)
        and node.healthy
        and not node.draining
        and node.takes_orders
        and "torch" in node.harnesses
        and not (node.reservations or may_be_leaving or node.raised_needs),
        may_be_leaving,
    )


def is_plain(spec: ModelSpec, fleet: Fleet, origin: Origin) -> bool:
    """Whether the catalogue permits every node to load the model."""
    is_held_back = spec.policy == "manual" and origin not in ("operator", "pin")
    is_free = not (spec.only_on or spec.nodes or spec.pinned_on or is_held_back or _is_divided(spec, None))
    return is_free and spec.harness in (None, "torch") and fleet.catalogue.has(spec.id)


def by_free_memory(spec: ModelSpec, node: Node, need: MemoryNeed | None, *, packs: bool) -> Bound:
    """The bound of a node where memory decides, from its free memory. `packs`: the fullest device is preferred."""
    held = node.residencies.get(spec.id)
    if _may_wake(spec, node, held) or node.num_nodes_of(spec) > 1:
        return (_ASLEEP,)
    is_elsewhere, memory = node.name not in spec.pinned_on, node_memory(node)
    bound = of_load(memory, need, packs=packs, is_elsewhere=is_elsewhere, is_divided=_is_divided(spec, held))
    return (_SOON_OF[bound[0]], is_elsewhere) if bound[0] in _SOON_OF and memory.may_be_leaving else bound


def of_load(
    memory: _NodeMemory, need: MemoryNeed | None, *, packs: bool, is_elsewhere: bool = True, is_divided: bool = False
) -> Bound:
    """The same for a model that is not asleep there. `is_elsewhere`: the catalogue does not pin it on the node."""
    return _or_split(_of_whole_load(memory, need, packs=packs, is_elsewhere=is_elsewhere, is_divided=is_divided), need)


def _or_split(bound: Bound, need: MemoryNeed | None) -> Bound:
    """`bound`, improved if part of the model's weights may be in host memory."""
    return _SPLIT if need is not None and need.splits is not None and bound > _SPLIT else bound


def _of_whole_load(
    memory: _NodeMemory, need: MemoryNeed | None, *, packs: bool, is_elsewhere: bool, is_divided: bool
) -> Bound:
    available = memory.available_bytes
    if not available:
        return _TOO_SMALL
    most_bytes = available[-1]
    if need is None:
        return (_FITS, is_elsewhere, True, 0.0, 0, 0.0, 0, True, 0, False, 0.0, -sum(available))
    whole_bytes, missing = need.whole_bytes, need.missing_context(most_bytes)
    if whole_bytes <= most_bytes and not is_divided:
        left_over = _left_over(available, (whole_bytes,), packs=packs)
        fits = _FITS_SHORT if need.is_short(most_bytes) else _FITS
        return (fits, is_elsewhere, True, 0.0, 0, 0.0, 0, False, missing, False, 0.0, left_over)
    if is_divided or (memory.may_divide and whole_bytes > memory.max_capacity_bytes):
        if need.least_bytes > memory.total_bytes:
            return _TOO_SMALL
        if need.least_bytes > sum(available):
            free_bytes = sum(max(0, each.balance_bytes) for each in memory.devices)
            return (_EVICTION, is_elsewhere, True, 0.0, max(0, need.least_bytes - free_bytes))
        return (_FITS, is_elsewhere)
    wanted_bytes, least_bytes = need.wanted_bytes, need.least_bytes
    if wanted_bytes > most_bytes and (wide := _wide(memory, wanted_bytes)):
        return (_EVICTION, is_elsewhere, True, 0.0, min(_missing(each, wanted_bytes) for each in wide))
    if least_bytes <= most_bytes:
        left_over = _left_over(available, need.tried_bytes, packs=packs)
        fits = _FITS if wanted_bytes <= most_bytes else _FITS_SHORT
        is_cut = need.takes_bytes > most_bytes
        return (fits, is_elsewhere, True, 0.0, 0, 0.0, 0, False, missing, is_cut, 0.0, left_over)
    if wide := _wide(memory, least_bytes):
        return (_EVICTION_SHORT, is_elsewhere, True, 0.0, min(_missing(each, least_bytes) for each in wide))
    return _TOO_SMALL


def has_free(memory: _NodeMemory, need: MemoryNeed) -> bool:
    """Whether a device has enough free memory for `need`, or several may have it together."""
    return memory.may_divide or need.least_bytes <= memory.available_bytes[-1]


def by_residents(
    spec: ModelSpec, node: Node, need: MemoryNeed | None, fleet: Fleet, now: float, origin: Origin, bound: Bound
) -> Bound:
    """`bound` of `by_free_memory`, raised by what the models that hold memory there allow."""
    memory = node_memory(node)
    held = node.residencies.get(spec.id)
    if bound[0] != _EVICTION or need is None or memory.has_ceilings or _is_divided(spec, held):
        return bound
    if memory.may_divide and need.whole_bytes > memory.max_capacity_bytes:
        return bound

    def at_best(size: int) -> Bound:
        wide = _wide(memory, size)
        return min(_by_residents(each, spec, node, size, fleet, now, origin, bound) for each in wide)

    best = at_best(need.wanted_bytes)
    if best[0] <= _BLOCKED or need.wanted_bytes == need.least_bytes:
        return _or_split(best, need)
    if need.least_bytes <= memory.available_bytes[-1]:
        return _or_split((_FITS_SHORT,), need)
    best = at_best(need.least_bytes)
    return _or_split((_SHORT_OF[best[0]], *best[1:]), need)


def _by_residents(
    memory: _DeviceMemory,
    spec: ModelSpec,
    node: Node,
    size: int,
    fleet: Fleet,
    now: float,
    origin: Origin,
    bound: Bound,
) -> Bound:
    """The bound for a load that takes `size` of the device."""
    missing = _missing(memory, size)
    evictable: list[tuple[int, float]] = []
    later_bytes = kept_bytes = 0
    for resident in memory.residents:
        kept = None
        if not resident.is_reserved:
            held = None if resident.is_part else node.residencies.get(resident.model_id)
            if held is not None:
                kept = protected(held, node, spec, fleet, now, background=origin == "background")
            if kept is None:
                evictable.append((resident.num_bytes, float("-inf") if held is None else held.last_used))
                continue
        if kept is None or kept.is_temporary:
            later_bytes += resident.num_bytes
        else:
            kept_bytes += resident.num_bytes
    now_bytes = sum(num_bytes for num_bytes, _ in evictable)
    if now_bytes >= missing:
        return (*bound[:4], *_least_harm(evictable, missing))
    if now_bytes + later_bytes >= missing:
        return (RANK[Verdict.BLOCKED],)
    with_foreign = now_bytes + later_bytes + memory.device.foreign_bytes
    is_held = with_foreign < missing <= with_foreign + kept_bytes
    return (RANK[Verdict.HELD if is_held else Verdict.CROWDED],)


def _least_harm(evictable: Sequence[tuple[int, float]], missing: int) -> Bound:
    """The fewest bytes that must be evicted, and how recently the victim was used at the earliest."""
    sufficient = [num_bytes for num_bytes, _ in evictable if num_bytes >= missing]
    smallest = min(sufficient, default=0)
    several_bytes = sum(num_bytes for num_bytes, _ in evictable if num_bytes < missing)
    if not sufficient or several_bytes >= missing:
        return (max(0, missing), min((last_used for _, last_used in evictable), default=0.0))
    return (smallest, min(last_used for num_bytes, last_used in evictable if num_bytes == smallest))


def _left_over(available: Sequence[int], sizes: Sequence[int], *, packs: bool) -> int:
    if not packs:
        return sizes[-1] - available[-1]
    if len(available) == 1:
        return min(available[0] - size for size in sizes if available[0] >= size)
    return min(each - size for size in sizes for each in available if each >= size)


def _wide(memory: _NodeMemory, size: int) -> list[_DeviceMemory]:
    return [each for each in memory.devices if each.capacity_bytes >= size]


def _missing(memory: _DeviceMemory, size: int) -> int:
    return max(0, memory.device.free_bytes_for(size) - memory.balance_bytes)


def _may_wake(spec: ModelSpec, node: Node, held: Residency | None) -> bool:
    is_asleep = held is not None and held.state is ModelState.ASLEEP
    return is_asleep or any(member.id == spec.id for member in node.members)


def _is_divided(spec: ModelSpec, held: Residency | None) -> bool:
    """Whether it takes several devices on any node."""
    is_divided = held is not None and (held.status.num_devices > 1 or bool(held.status.stage_layers))
    return is_divided or spec.tensor_parallel > 1 or spec.pipeline_parallel > 1
