"""Whether a model fits on the devices of a node: now, after eviction, later, or never."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec

from cortex.fleet.catalogue import MEBIBYTE, ModelSpec
from cortex.fleet.memory import DeviceLedger, MemoryNeed, host_left_bytes, ledger
from cortex.fleet.topology import Fleet, ModelOnNode, Node, Residency
from cortex.formats.units import gib
from cortex.wire.node.contexts import AGENT_TOKENS, tolerated
from cortex.wire.node.device_choice import MOST_LAYERS, UNPLACED, Division, choose_devices
from cortex.wire.node.host_splits import HostSplit, HostSplits, speed_in_words
from cortex.wire.node.protocol import ModelState, ModelStatus
from cortex.wire.words import plural

from .allocations import Allocation, allocations, explained, free_devices, harm
from .decision import Assessment, DeviceRow, Origin, Verdict
from .eviction import Occupant, Protection
from .occupants import occupants_of, rivals

_STARTS = (Verdict.FITS, Verdict.FITS_SOON, Verdict.FITS_AFTER_EVICTION)


class _Finding(msgspec.Struct, frozen=True):
    """What `_find_allocation` found."""

    verdict: Verdict
    reason: str
    allocation: Allocation = Allocation(())
    held_by: frozenset[Protection] = frozenset()


class Fitting:
    """`spec` on the devices of `node`, by their memory."""

    def __init__(
        self,
        spec: ModelSpec,
        node: Node,
        fleet: Fleet,
        now: float,
        *,
        need: MemoryNeed | None,
        origin: Origin,
        leaving: frozenset[ModelOnNode] = frozenset(),
    ) -> None:
        """`need`: `None` if its size is unknown. `leaving`: the models evicted for it on other nodes."""
        held = node.residencies.get(spec.id)
        count = max(spec.tensor_parallel, spec.pipeline_parallel)
        self._stage_layers: tuple[int, ...] = ()
        if held is not None:
            count, self._stage_layers = max(count, held.status.num_devices), held.status.stage_layers
        is_staged = held is not None and held.status.parallel == "pipeline"  # even where its layers do not fit
        self._by_layers = spec.pipeline_parallel > 1 or bool(self._stage_layers) or is_staged
        self._num_layers = sum(self._stage_layers) or MOST_LAYERS
        if count > spec.tensor_parallel:
            spec = msgspec.structs.replace(spec, tensor_parallel=count, pipeline_parallel=1)
        self._spec, self._node, self._fleet, self._need = spec, node, fleet, need
        self._held = held
        self._devices = ledger(node, newcomer=spec.id)
        self._occupants = occupants_of(spec, node, self._devices, fleet, now, origin, leaving)
        self._rivals = rivals(spec, self._occupants, fleet)
        self._eligible = _eligible(spec, self._devices, held)

    def wake(self) -> Assessment | None:
        """Wake a sleeping model on its devices, at its previous size; `None` if they have no room, or if it is not
        asleep."""
        asleep = [member for member in self._node.members if member.state is ModelState.ASLEEP]
        homes = [member.devices for member in asleep if member.id == self._spec.id]
        if self._held is not None and self._held.state is ModelState.ASLEEP:
            homes.append(self._held.status.devices)
        if not homes:
            return None
        home = [device for device in self._eligible if device.index in homes[0]] or self._eligible
        need, status = self._need, None if self._held is None else self._held.status
        sizes = (None,) if need is None else (need.takes_bytes, *need.tried_bytes)
        if status is not None and status.host_splits is not None and status.measured_bytes is not None:
            sizes = (status.measured_bytes,)  # a part of its weights may have stayed in host memory
        for size in sizes:
            waking = self._assess(home, size, asleep=True)
            if waking.verdict in (Verdict.ASLEEP, Verdict.FITS_SOON, Verdict.FITS_AFTER_EVICTION):
                return waking
        return None

    def load(self) -> Assessment:
        """Load on any devices; with part of the weights in host memory if the model would otherwise not fit or get less
        than the wanted context."""
        found = self._load_whole()
        if self._need is None or self._need.splits is None or self._node.host is None:
            return found
        if found.verdict is Verdict.BLOCKED and not found.is_short:
            return found
        if found.verdict in _STARTS and not found.is_short:
            return found
        split = self._load_split(self._need)
        if split is not None and split.rank < found.rank:
            return split
        left_bytes = host_left_bytes(self._node)
        reason = found.reason
        if found.verdict is Verdict.TOO_SMALL:
            reason += f"; {self._why_not_divided(self._need.least_bytes, self._need.splits)}"
        return msgspec.structs.replace(found, reason=reason, host_left_bytes=left_bytes)

    def _why_not_divided(self, least_bytes: int, splits: HostSplits) -> str:
        """Why it does not fit on the empty node with part of its weights in host memory either."""
        widest = self._together([device.capacity_bytes for device in self._eligible])
        split = splits.saving(max(1, least_bytes - widest))
        if split is None:
            most, share = splits.splits[-1], least_bytes - splits.most_saved_bytes
            needed = gib(share) if self._by_layers else f"{gib(-(-share // self._spec.tensor_parallel))} per device"
            host = f"{gib(most.host_bytes)} in host memory, the most that its layers and its `host_weights` allow"
            return f"with {host}, it needs {needed}"
        limit_mb = self._spec.host_weights
        if isinstance(limit_mb, int) and split.host_bytes > limit_mb * MEBIBYTE:
            have = f"its entry allows {gib(limit_mb * MEBIBYTE)} (`host_weights`)"
        else:
            most_bytes = host_left_bytes(self._node) + sum(occupant.host_bytes for occupant in self._occupants)
            have = f"models may take {gib(most_bytes)} of it"
        return f"divided, it needs {gib(split.host_bytes)} of host memory, and {have}"

    def _load_split(self, need: MemoryNeed) -> Assessment | None:
        """Load with part of the weights in host memory: first with as many on emptied devices as possible, next in free
        memory, then with as few as possible. `None` if that does not fit either."""
        assert need.splits is not None
        best: Assessment | None = None
        for size in dict.fromkeys((need.wanted_bytes, need.least_bytes)):
            least_share = max(1, size - need.splits.most_saved_bytes)
            widest = self._together([device.capacity_bytes for device in self._eligible])
            freest = self._together([device.available_bytes for device in self._eligible])
            for share in dict.fromkeys((widest, freest, least_share)):
                if not least_share <= share < size or (split := need.splits.saving(size - share)) is None:
                    continue
                if isinstance(limit_mb := self._spec.host_weights, int) and split.host_bytes > limit_mb * MEBIBYTE:
                    continue
                found = self._assess(self._eligible, share, split=split)
                if found.verdict in _STARTS:
                    return found
                best = found if best is None or found.rank < best.rank else best
        return best

    def _together(self, sizes: list[int]) -> int:
        """The bytes that the largest devices can hold of it: unequal parts by layers, else equal ones."""
        most = sorted(sizes, reverse=True)[: self._spec.tensor_parallel]
        if len(most) < self._spec.tensor_parallel:
            return 0
        return sum(most) if self._by_layers else len(most) * most[-1]

    def _load_whole(self) -> Assessment:
        """Load on its devices alone. A model is placed where its full footprint is free. Otherwise other models are
        evicted, or waited for if busy, to make room for the wanted context. It gets less only if that does not help."""
        need = self._need
        if need is None:
            return self._assess(self._eligible, None)
        whole = self._assess(self._eligible, need.whole_bytes)
        if whole.verdict is Verdict.FITS or need.least_bytes == need.whole_bytes:
            return whole
        wanted = whole
        for size in need.tried_bytes:
            found = whole if size == need.whole_bytes else self._assess(self._eligible, size)
            if size >= need.wanted_bytes:
                wanted = found
            helps_waiting = found.verdict is Verdict.BLOCKED or found.waits_for_foreground
            if found.verdict in _STARTS or (helps_waiting and size <= need.wanted_bytes):
                break
        if found.verdict in _STARTS and found.is_short and found is not wanted and need.contexts is not None:
            tokens = f"{need.contexts.wanted_tokens:,}"
            reason = f"{found.reason}; a context of {tokens} tokens is not possible: {wanted.reason}"
            return msgspec.structs.replace(found, reason=reason)
        return found

    def _assess(
        self,
        candidates: Sequence[DeviceLedger],
        size: int | None,
        *,
        asleep: bool = False,
        split: HostSplit | None = None,
    ) -> Assessment:
        """`size`: bytes on its devices. `split`: bytes in host memory, in addition."""
        spec, node, need = self._spec, self._node, self._need
        by_layers, num_layers = self._by_layers, self._num_layers
        limit = node.max_devices_per_model
        count = _device_count(spec, candidates, size, limit=limit, by_layers=by_layers, num_layers=num_layers)
        division = None if size is None else Division(size, count or spec.tensor_parallel, by_layers, num_layers)
        found = _find_allocation(
            spec,
            node,
            candidates,
            self._occupants,
            self._rivals,
            self._fleet,
            self._stage_layers,
            count=count,
            division=division,
            by_layers=by_layers,
            split=split,
        )
        verdict, reason, allocation = found.verdict, found.reason, found.allocation
        is_measured = split is not None and need is not None and need.splits is not None and need.splits.is_measured
        if split is not None and verdict in _STARTS:
            speed = speed_in_words(split.tokens_per_s, is_measured=is_measured)
            reason += f"; {gib(split.host_bytes)} of its weights in host memory, {speed}"
        if verdict is Verdict.TOO_SMALL and self._held is not None:
            reason += _smaller_form(self._held.status, candidates) + _last_resort(spec, self._held.status)
        if asleep and verdict is Verdict.FITS:
            verdict, reason = Verdict.ASLEEP, f"asleep on this node; {reason}"
        takes_bytes = None if need is None or size is None else _taken(need.takes_bytes, size, allocation)
        context = _context(spec, need, size, allocation, 0 if split is None else split.saved_bytes)
        if asleep and self._held is not None:  # it wakes with the context that it had
            context = _Context(self._held.status.context_tokens, context.full_tokens)
        return Assessment(
            node=node.name,
            verdict=verdict,
            reason=reason,
            pinned=node.name in spec.pinned_on,
            asleep=asleep,
            need_bytes=size,
            takes_bytes=takes_bytes,
            max_bytes=allocation.max_bytes,
            is_cut=need is not None and takes_bytes is not None and takes_bytes < need.takes_bytes,
            context_tokens=context.tokens if allocation.devices else None,
            full_context_tokens=context.full_tokens,
            min_context_tokens=context.least_tokens,
            is_short=context.is_short,
            devices=tuple(sorted(device.index for device in allocation.devices)),
            victims=allocation.victims,
            rows=_rows(self._devices, division, allocation),
            held_by=found.held_by,
            ceiling_bytes=node.ceiling_bytes,
            occupants=self._occupants,
            split=split,
            is_split_measured=is_measured,
            host_left_bytes=None if split is None else host_left_bytes(node),
        )


def capacity_bytes(spec: ModelSpec, node: Node, count: int) -> int:
    """Bytes that a load could take of the largest `count` empty devices."""
    devices = _eligible(spec, ledger(node), node.residencies.get(spec.id))
    largest = sorted((device.capacity_bytes for device in devices), reverse=True)[:count]
    return sum(largest) if node.ceiling_bytes is None else min(sum(largest), node.ceiling_bytes)


def need_and_have(node: Node, need: MemoryNeed | None, count: int) -> tuple[DeviceRow, ...]:
    """The device rows for a model over `count` devices whose verdict does not depend on memory."""
    return _rows(ledger(node), None if need is None else Division(need.takes_bytes, count), Allocation(()))


def _taken(wanted_bytes: int, sure_bytes: int, allocation: Allocation) -> int:
    """Bytes that a load will take of `allocation`: `wanted_bytes`, or those usable once the victims are unloaded."""
    return min(wanted_bytes, max(sure_bytes, _usable_bytes(allocation)))


def _usable_bytes(allocation: Allocation) -> int:
    """Bytes that a load can take of `allocation`. With equal shares, the device with the least room decides."""
    usable_bytes = list(map(allocation.usable_bytes, allocation.devices))
    allocation_bytes = sum(usable_bytes) if allocation.by_layers else len(usable_bytes) * min(usable_bytes, default=0)
    return allocation_bytes if allocation.max_bytes is None else min(allocation_bytes, allocation.max_bytes)


class _Context(NamedTuple):
    """The context that a load gets."""

    tokens: int | None = None
    full_tokens: int | None = None
    least_tokens: int = 1
    is_short: bool = False


def _context(
    spec: ModelSpec, need: MemoryNeed | None, size: int | None, allocation: Allocation, saved_bytes: int = 0
) -> _Context:
    """The context of a load into `allocation`, which has at least `size`. `saved_bytes`: bytes in host memory
    instead."""
    if need is None or size is None or need.contexts is None:
        is_short = (
            need is not None and size is not None and need.is_short(saved_bytes + max(size, _usable_bytes(allocation)))
        )
        # The node decides what is unknown here. An operator who gave the size has decided it.
        is_decided = is_short or spec.vram_bytes is not None
        return _Context(
            least_tokens=1 if is_decided else tolerated(spec.context_tokens or AGENT_TOKENS), is_short=is_short
        )
    allocation_bytes = size if saved_bytes else max(size, _usable_bytes(allocation))  # more room is for weights
    tokens, full_tokens = need.contexts.tokens_in(saved_bytes + allocation_bytes), need.contexts.full_tokens
    is_short = need.contexts.is_short(tokens)
    return _Context(tokens, full_tokens, 1 if is_short else tolerated(need.contexts.wanted_tokens), is_short)


def _find_allocation(
    spec: ModelSpec,
    node: Node,
    eligible: Sequence[DeviceLedger],
    occupants: tuple[Occupant, ...],
    rivals: Mapping[str, str],
    fleet: Fleet,
    stage_layers: tuple[int, ...],
    *,
    count: int | None,
    division: Division | None,
    by_layers: bool,
    split: HostSplit | None = None,
    host_freed_bytes: int = 0,
) -> _Finding:
    """`host_freed_bytes`: host memory freed by models that leave in any case."""
    host_missing_bytes = 0 if split is None else split.host_bytes - host_left_bytes(node) - host_freed_bytes
    limit = node.max_devices_per_model
    if spec.tensor_parallel > limit:
        by = "pipeline_parallel" if by_layers else "tensor_parallel"
        reason = f"cannot span {spec.tensor_parallel} devices ({by}), at most {limit} per model"
        return _Finding(Verdict.CANNOT_SPAN, reason)
    if len(eligible) < spec.tensor_parallel:
        return _Finding(Verdict.TOO_FEW_DEVICES, _too_few(spec, node, len(eligible)))
    if count is None:
        return _Finding(Verdict.TOO_SMALL, _too_small(node, eligible, division))
    excluded = tuple(occupant for occupant in occupants if occupant.model_id in rivals)
    if any(occupant.protection is not None for occupant in excluded):
        return _excluded(excluded, rivals)
    if division is None:
        have = {device.index: device.available_bytes for device in eligible}
        chosen = choose_devices(Division(0, count), have, UNPLACED)
        emptiest = tuple(device for device in eligible if device.index in chosen)
        changing = [each for each in occupants if each.protection is Protection.CHANGING]
        if changing and not all(device.available_bytes for device in emptiest):
            return _Finding(Verdict.BLOCKED, _waits_for(changing, occupants))
        return _with_rivals(
            _Finding(
                Verdict.FITS,
                "size unknown until its first load; the node checks it then",
                Allocation(emptiest, by_layers=by_layers),
            ),
            *(excluded, rivals, eligible),
        )
    if excluded:
        emptied = [_without(excluded, device) for device in eligible]
        others = tuple(occupant for occupant in occupants if occupant not in excluded)
        found = _find_allocation(
            *(spec, node, emptied, others, {}, fleet, stage_layers),
            count=count,
            division=division,
            by_layers=by_layers,
            split=split,
            host_freed_bytes=sum(each.host_bytes for each in excluded),
        )
        return _with_rivals(found, excluded, rivals, eligible)
    if host_missing_bytes <= 0 and (devices := free_devices(eligible, division, fleet.placement)):
        size = gib(division.num_bytes) if by_layers else f"{gib(division.share)} per device"
        reason = f"needs {size}, which is free{explained(division, devices, stage_layers)}"
        return _Finding(Verdict.FITS, reason, Allocation(devices, by_layers=by_layers))

    sets = [
        devices
        for devices in combinations(eligible, count)
        if division.fits([device.capacity_bytes for device in devices])
    ]

    def cheapest(candidates: Sequence[Occupant], have: Callable[[DeviceLedger], int]) -> Allocation | None:
        found = allocations(sets, candidates, fleet, division, have, host_missing_bytes)
        return min(found, key=harm, default=None)

    if any(occupant.is_unloading for occupant in occupants) and (
        allocation := cheapest([_while_others_stay(each) for each in occupants], lambda device: device.balance_bytes)
    ):
        names = ", ".join(victim.model_id for victim in allocation.victims)
        return _Finding(Verdict.FITS_SOON, f"fits once {names} is gone, which is being unloaded", allocation)
    if allocation := cheapest(occupants, lambda device: device.balance_bytes):
        names = ", ".join(victim.model_id for victim in allocation.victims)
        return _Finding(Verdict.FITS_AFTER_EVICTION, f"fits after unloading {names}", allocation)
    later = [_after_waiting(occupant) for occupant in occupants]
    if allocation := cheapest(later, lambda device: device.balance_bytes):
        return _Finding(Verdict.BLOCKED, _waits_for(allocation.victims, occupants))
    if allocation := cheapest(later, lambda device: device.balance_bytes + device.foreign_bytes):
        foreign = sum(device.foreign_bytes for device in allocation.devices)
        return _Finding(Verdict.CROWDED, f"other programs use {gib(foreign)} of its memory")
    gone = [msgspec.structs.replace(occupant, protection=None) for occupant in occupants]
    allocation = cheapest(gone, lambda device: device.balance_bytes + device.foreign_bytes)
    if allocation is None and host_missing_bytes > 0:
        return _Finding(Verdict.TOO_SMALL, f"{gib(host_missing_bytes)} more host memory is needed for its weights")
    if allocation is None:
        return _Finding(Verdict.CROWDED, "the device reports less free memory than its models and other programs leave")
    in_the_way = {victim.model_id for victim in allocation.victims}
    kept = [each for each in later if each.protection is not None and each.model_id in in_the_way]
    reasons = "; ".join(f"{occupant.model_id}: {occupant.reason}" for occupant in kept)
    return _Finding(
        Verdict.HELD,
        f"only models that cannot be evicted could make room ({reasons})",
        held_by=frozenset(occupant.protection for occupant in kept if occupant.protection is not None),
    )


def _without(excluded: Sequence[Occupant], device: DeviceLedger) -> DeviceLedger:
    """The device once these have left."""
    names = {occupant.model_id for occupant in excluded}
    left_bytes = device.node_left_bytes
    return msgspec.structs.replace(
        device,
        free_bytes=min(device.total_bytes, device.free_bytes + sum(each.frees(device.index) for each in excluded)),
        holdings=tuple(holding for holding in device.holdings if holding.model_id not in names),
        node_left_bytes=None if left_bytes is None else left_bytes + sum(each.num_bytes for each in excluded),
    )


def _with_rivals(
    found: _Finding, excluded: tuple[Occupant, ...], rivals: Mapping[str, str], devices: Sequence[DeviceLedger]
) -> _Finding:
    """The result once these have left, which they must."""
    if not excluded or found.verdict not in (Verdict.FITS, Verdict.FITS_SOON, Verdict.FITS_AFTER_EVICTION):
        return found
    victims = (*excluded, *found.allocation.victims)
    by_index = {device.index: device for device in devices}
    taken = tuple(by_index[device.index] for device in found.allocation.devices)
    is_soon = all(victim.is_unloading for victim in victims)
    reasons = ", ".join(f"{each.model_id}, {rivals[each.model_id]}" for each in excluded)
    return _Finding(
        Verdict.FITS_SOON if is_soon else Verdict.FITS_AFTER_EVICTION,
        f"cannot be loaded together with {reasons}; {found.reason}",
        Allocation(taken, victims, found.allocation.by_layers),
    )


def _excluded(excluded: Sequence[Occupant], rivals: Mapping[str, str]) -> _Finding:
    """Models that exclude this one and cannot leave now."""
    kept = [each for each in excluded if each.protection is not None]
    lasting = [each for each in kept if each.protection is not None and not each.protection.is_temporary]
    reasons = "; ".join(f"{each.model_id} ({rivals[each.model_id]}): {each.reason}" for each in lasting or kept)
    if not lasting:
        return _Finding(Verdict.BLOCKED, f"waits for {reasons}")
    return _Finding(
        Verdict.HELD,
        f"cannot be loaded together with {reasons}",
        held_by=frozenset(each.protection for each in lasting if each.protection is not None),
    )


def eligible_devices(devices: Sequence[DeviceLedger]) -> list[DeviceLedger]:
    """The devices to consider; a host with GPUs does not run models on its CPU."""
    return [device for device in devices if device.kind != "cpu"] or [*devices]


def _eligible(spec: ModelSpec, devices: Sequence[DeviceLedger], held: Residency | None) -> list[DeviceLedger]:
    smallest = spec.min_device_vram_mb * MEBIBYTE
    allowed = () if held is None else held.status.allowed_devices
    return [
        device
        for device in eligible_devices(devices)
        if device.total_bytes >= smallest and (not allowed or device.index in allowed)
    ]


def _device_count(
    spec: ModelSpec, eligible: Sequence[DeviceLedger], size: int | None, *, limit: int, by_layers: bool, num_layers: int
) -> int | None:
    """The number of devices: `tensor_parallel`, doubled until the model could fit, up to `limit`, the node's maximum
    per model. By layers: exactly `tensor_parallel`."""
    count = spec.tensor_parallel
    ceiling = eligible[0].node_ceiling_bytes if eligible else None
    if size is not None and ceiling is not None and size > ceiling:
        return None
    capacities = [device.capacity_bytes for device in eligible]
    while count <= min(limit, len(eligible)):
        if size is None:
            return count
        if Division(size, count, by_layers, num_layers).fits(capacities):
            return count
        if by_layers:
            return None
        count *= 2
    return None


def _while_others_stay(occupant: Occupant) -> Occupant:
    """The occupant, protected unless it is being unloaded."""
    return occupant if occupant.is_unloading else msgspec.structs.replace(occupant, protection=Protection.CHANGING)


def _after_waiting(occupant: Occupant) -> Occupant:
    """The occupant without a protection that ends by itself."""
    if occupant.protection is not None and occupant.protection.is_temporary:
        return msgspec.structs.replace(occupant, protection=None)
    return occupant


def _waits_for(victims: Sequence[Occupant], occupants: Sequence[Occupant]) -> str:
    reasons = {occupant.model_id: occupant.reason for occupant in occupants}
    waited_for = [victim.model_id for victim in victims if reasons[victim.model_id]]
    return "; ".join(f"waits for {model_id}: {reasons[model_id]}" for model_id in waited_for)


def _too_few(spec: ModelSpec, node: Node, count: int) -> str:
    if node.problem:
        return node.problem
    size = f" of at least {gib(spec.min_device_vram_mb * MEBIBYTE)}" if spec.min_device_vram_mb else ""
    held = node.residencies.get(spec.id)
    allowed = "" if held is None else ", ".join(map(str, held.status.allowed_devices))
    entry = f" among {allowed} (`devices` of its entry in neuron.toml)" if allowed else ""
    return f"needs {plural(spec.tensor_parallel, 'device')}{size}{entry}, has {count}"


def _too_small(node: Node, eligible: Sequence[DeviceLedger], division: Division | None) -> str:
    """Why even the empty devices have no room: a ceiling, or their size."""
    count, share = (1, 0) if division is None else (division.num_devices, division.share)
    ceiling = node.ceiling_bytes
    if division is not None and division.by_layers and (ceiling is None or division.num_bytes <= ceiling):
        largest = sorted((device.capacity_bytes for device in eligible), reverse=True)[:count]
        return f"needs {gib(division.num_bytes)} on {plural(count, 'device')}, which have {gib(sum(largest))} together"
    if ceiling is not None and count * share > ceiling:
        return f"needs {gib(count * share)}, and models may take {gib(ceiling)} of the node (`memory_mb`)"
    widest = max(eligible, key=lambda device: device.capacity_bytes)
    reason = f"needs {gib(share)} per device, the largest has {gib(widest.capacity_bytes)}"
    if any(device.usable_bytes(device.total_bytes) >= share for device in eligible):
        reason = f"needs {gib(share)} per device, and models may take {gib(widest.capacity_bytes)} of one (`memory_mb`)"
    if node.max_devices_per_model == 1 and len(eligible) > 1:
        reason += "; the node runs a model on one device"
    return reason


def _last_resort(spec: ModelSpec, status: ModelStatus) -> str:
    """Weights of a dense model that could be in host memory if its entry allowed that."""
    splits = status.host_splits
    if splits is None or not splits.is_last_resort or spec.host_weights is not None:
        return ""
    most = splits.splits[-1]
    speed = speed_in_words(most.tokens_per_s, is_measured=splits.is_measured)
    return f'; with `host_weights = "auto"` up to {gib(most.host_bytes)} of it may be in host memory, {speed}'


def _smaller_form(status: ModelStatus, devices: Sequence[DeviceLedger]) -> str:
    """The most bits with which dense weights would fit, if they do not as they are."""
    widest_bytes = max((device.capacity_bytes for device in devices), default=0)
    for size in sorted(status.quantised, key=lambda each: -each.least_bytes):
        share_bytes = -(-size.least_bytes // status.num_devices)
        if share_bytes <= widest_bytes:
            return f'; with `quant = "{size.quant}"` in models.toml it needs {gib(share_bytes)}'
    return ""


def _rows(devices: Sequence[DeviceLedger], division: Division | None, allocation: Allocation) -> tuple[DeviceRow, ...]:
    chosen = frozenset(device.index for device in allocation.devices)
    shares: dict[int, int] = {}
    if division is not None:
        shares = dict.fromkeys((device.index for device in devices), division.share)
        shares |= division.shares({device.index: allocation.usable_bytes(device) for device in allocation.devices})
    return tuple(
        DeviceRow(
            index=device.index,
            kind=device.kind,
            name=device.name,
            total_bytes=device.total_bytes,
            foreign_bytes=device.foreign_bytes,
            kept_free_bytes=max(0, device.balance_bytes) - device.usable_bytes(device.balance_bytes),
            ceiling_bytes=device.ceiling_bytes,
            available_bytes=device.available_bytes,
            need_bytes=shares.get(device.index),
            chosen=device.index in chosen,
        )
        for device in devices
    )
