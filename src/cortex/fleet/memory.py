"""The byte ledger: the memory that each model holds on each device of a node, and what a new load may take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from cortex.formats.quant_names import at_load, is_same_quant
from cortex.wire.node.contexts import ContextSizes, missing_sixteenths, tried
from cortex.wire.node.device_choice import UNPLACED, Division, choose_devices
from cortex.wire.node.host_splits import HostSplits
from cortex.wire.node.load_options import ENGINE
from cortex.wire.node.protocol import ModelState, ModelStatus

from .catalogue import ModelSpec
from .devices import ON_DEVICE, DeviceState, bytes_held
from .index import remembered
from .topology import Fleet, Measured, Node

Basis = Literal["measured", "estimated", "reserved"]


class Holding(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The bytes that one model holds, or has reserved, on one device."""

    model_id: str
    num_bytes: int
    basis: Basis


class DeviceLedger(DeviceState, frozen=True, kw_only=True, gc=False):
    """A device and the holdings of its models."""

    holdings: tuple[Holding, ...]
    node_ceiling_bytes: int | None = None
    node_left_bytes: int | None = None
    """The rest of the ceiling; negative while models hold more."""

    @property
    def committed_bytes(self) -> int:
        """Held by our models or reserved for them."""
        return sum(holding.num_bytes for holding in self.holdings)

    @property
    def balance_bytes(self) -> int:
        """The smaller of the device's reported free memory and this ledger's, because running loads and unloads have
        not taken or freed all of theirs yet. Negative while more is reserved than was freed."""
        return min(self.free_bytes, self.total_bytes - self.foreign_bytes - self.committed_bytes)

    @property
    def available_bytes(self) -> int:
        """Bytes that a load may take now."""
        return max(0, min(self.usable_bytes(self.balance_bytes), self.left_bytes))

    @property
    def capacity_bytes(self) -> int:
        """Bytes that a load could take of the empty device."""
        return min(self.usable_bytes(self.total_bytes), *self.ceilings_bytes)

    @property
    def ceilings_bytes(self) -> tuple[int, ...]:
        """The ceilings for one model: of the device and of the node. Without a ceiling, the device's size."""
        ceilings = (self.ceiling_bytes, self.node_ceiling_bytes)
        return tuple(self.total_bytes if ceiling is None else ceiling for ceiling in ceilings)

    @property
    def left_bytes(self) -> int:
        """Bytes that the ceilings permit a load now."""
        own = self.total_bytes if self.ceiling_bytes is None else self.ceiling_bytes - self.committed_bytes
        return own if self.node_left_bytes is None else min(own, self.node_left_bytes)

    def usable_bytes(self, free_bytes: int) -> int:
        """Bytes of `free_bytes` that the node permits a load."""
        return max(0, free_bytes - int(free_bytes * self.kept_free_share) - self.kept_free_bytes)

    def free_bytes_for(self, num_bytes: int) -> int:
        """How much must be free for a load to take `num_bytes`."""
        wanted = num_bytes + self.kept_free_bytes
        return wanted if not self.kept_free_share else math.ceil(wanted / (1 - self.kept_free_share))

    def held_by(self, model_id: str) -> int:
        return sum(holding.num_bytes for holding in self.holdings if holding.model_id == model_id)


def ledger(node: Node, *, newcomer: str | None = None) -> tuple[DeviceLedger, ...]:
    """The ledger of every device of `node`. Memory of the sleeping `newcomer` counts as free, because it is part of its
    need."""
    held = None if newcomer is None else node.residencies.get(newcomer)
    may_sleep = (held is not None and held.state is ModelState.ASLEEP) or bool(node.members)
    return _ledger(node, newcomer) if may_sleep else whole_ledger(node)


def available_bytes(node: Node) -> int:
    """Bytes that loads may take on all devices of `node` now."""
    return sum(device.available_bytes for device in whole_ledger(node))


@remembered
def whole_ledger(node: Node) -> tuple[DeviceLedger, ...]:
    """The ledger of every device of `node`, with all holdings."""
    return _ledger(node, None)


def _ledger(node: Node, newcomer: str | None) -> tuple[DeviceLedger, ...]:
    holdings: dict[int, list[Holding]] = {device.index: [] for device in node.devices}
    reserved = {reservation.model_id for reservation in node.reservations}
    for reservation in node.reservations:
        shares = reservation.device_bytes
        _enter(holdings, node, reservation.model_id, reservation.devices, reservation.num_bytes, "reserved", shares)
    for held in node.active:
        if held.model_id not in reserved and held.state in ON_DEVICE and held.num_bytes:
            basis: Basis = "estimated" if held.status.measured_bytes is None else "measured"
            shares = held.status.device_bytes
            _enter(holdings, node, held.model_id, held.status.devices, held.num_bytes, basis, shares)
    for member in node.members:
        if member.id not in reserved and member.state is not ModelState.ASLEEP:
            num_bytes = member.measured_bytes or 0
            _enter(holdings, node, member.id, member.devices, num_bytes, "measured", member.device_bytes)
    returned = dict.fromkeys(holdings, 0)
    asleep = [held.status for held in node.active if held.state is ModelState.ASLEEP]
    for status in (*asleep, *node.members):
        if status.state is ModelState.ASLEEP and status.id not in reserved:
            for device in node.devices:
                kept_bytes = bytes_held(device.index, device.kind, status)
                if status.id == newcomer:
                    returned[device.index] += kept_bytes
                elif kept_bytes:
                    kept = Holding(model_id=status.id, num_bytes=kept_bytes, basis="measured")
                    holdings[device.index].append(kept)
    ceiling = node.ceiling_bytes
    held_bytes = sum(holding.num_bytes for entries in holdings.values() for holding in entries)
    return tuple(
        DeviceLedger(
            **msgspec.structs.asdict(device) | {"free_bytes": device.free_bytes + returned[device.index]},
            holdings=tuple(holdings[device.index]),
            node_ceiling_bytes=ceiling,
            node_left_bytes=None if ceiling is None else ceiling - held_bytes,
        )
        for device in node.devices
    )


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a model needs on a node, over all its devices."""

    takes_bytes: int
    """Its full footprint, taken if there is room."""
    least_bytes: int
    """Its minimum footprint; with less the node rejects the load. In between, its KV cache is smaller."""
    contexts: ContextSizes | None = None
    """The sizes of its contexts; `None` if unknown."""
    splits: HostSplits | None = None
    """How part of its weights can be in host memory; `None` if that is impossible or not permitted."""

    @property
    def whole_bytes(self) -> int:
        """Bytes that must be free for its full footprint, including memory that the load leaves for later growth of its
        context."""
        if self.contexts is None:
            return self.takes_bytes
        lengths = tried(self.contexts.full_tokens, self.contexts.wanted_tokens)
        longest = next((tokens for tokens in lengths if tokens <= self.contexts.empty_tokens), 0)
        return max(self.takes_bytes, self.contexts.bytes_for(longest))

    @property
    def wanted_bytes(self) -> int:
        """The size for which other models are evicted: the wanted context, at most what an empty device holds. If
        contexts are unknown, its minimum footprint plus a quarter of its KV cache."""
        if self.contexts is None:
            return self.least_bytes + (self.takes_bytes - self.least_bytes) // 4
        return self._between(self.contexts.bytes_for(self.contexts.wanted_tokens))

    @property
    def tried_bytes(self) -> tuple[int, ...]:
        """The sizes to try after the full footprint, from the longest context to the minimum. Sizes below
        `wanted_bytes` are tried if evictions cannot free that much."""
        if self.contexts is None:
            return self.wanted_bytes, self.least_bytes
        contexts = tried(self.contexts.full_tokens, self.contexts.wanted_tokens)
        sizes = [(tokens, self.contexts.bytes_for(tokens)) for tokens in contexts]
        held = [size for tokens, size in sizes if tokens <= self.contexts.wanted_tokens or size <= self.whole_bytes]
        return tuple(dict.fromkeys((*map(self._between, held), self.least_bytes)))

    def _between(self, num_bytes: int) -> int:
        return max(self.least_bytes, min(num_bytes, self.whole_bytes))

    def tokens_in(self, num_bytes: int) -> int | None:
        """The context of a load that can take `num_bytes`; `None` if unknown."""
        return None if self.contexts is None else self.contexts.tokens_in(num_bytes)

    def is_short(self, num_bytes: int) -> bool:
        """Whether a load that can take `num_bytes` gets less than the wanted context."""
        if self.contexts is None:
            return num_bytes < self.wanted_bytes
        return self.contexts.is_short(self.contexts.tokens_in(num_bytes))

    def missing_context(self, num_bytes: int) -> int:
        """The sixteenths of the full context that a load lacks which can take `num_bytes`; 0 if unknown."""
        if self.contexts is None:
            return 0
        return missing_sixteenths(self.contexts.tokens_in(num_bytes), self.contexts.full_tokens)

    def at_least(self, num_bytes: int) -> MemoryNeed:
        """This need, raised to at least `num_bytes`."""
        raised = {"takes_bytes": max(self.takes_bytes, num_bytes), "least_bytes": max(self.least_bytes, num_bytes)}
        return msgspec.structs.replace(self, **raised)

    def part_of(self, whole: int, part: int = 1) -> MemoryNeed:
        """`part` of `whole` equal parts."""
        return MemoryNeed(
            takes_bytes=-(-self.takes_bytes * part // whole),
            least_bytes=-(-self.least_bytes * part // whole),
            contexts=None if self.contexts is None else self.contexts.part_of(whole, part),
            splits=self.splits if whole == part else None,
        )


def need_of(spec: ModelSpec, node: Node, fleet: Fleet) -> MemoryNeed | None:
    """The memory that `spec` needs if `node` serves it, over all nodes that share it. A measured size takes precedence
    over estimates, and the operator's estimate over the node's. If the context depends on the available memory, a
    measured size counts only if it exceeds the node's estimate, because that load may have had less memory.

    A node that has read the model's files also reports a minimum and the sizes of contexts; the operator's estimate has
    none.
    """
    held = node.residencies.get(spec.id)
    status = None if held is None else sized_for(spec, held.status)
    contexts = None if status is None else contexts_of(spec, status)
    if contexts is not None and fleet.demand is not None and (tokens := fleet.demand.wanted_context(spec.id)):
        contexts = contexts.wanting(tokens)
    takes_bytes = None if status is None else whole_measured_bytes(status)
    if takes_bytes is None and status is not None and status.harness != ENGINE and status.estimate_bytes:
        takes_bytes = spec.vram_bytes or _whole(status, status.estimate_bytes)  # its node knows its latest runs
    if takes_bytes is None:
        takes_bytes = fleet.measured.get((spec.id, spec.quant, spec.context_tokens), spec.vram_bytes)
        if status is not None and spec.vram_bytes is None and (takes_bytes is None or contexts is not None):
            takes_bytes = max(takes_bytes or 0, estimated_bytes(spec, status) or 0) or None
    if takes_bytes is None:
        takes_bytes = _estimate_elsewhere(spec, fleet)
    if takes_bytes is None:
        return None
    least_bytes = None if status is None or spec.vram_bytes is not None else _whole(status, status.least_bytes)
    splits = _splits(spec, status, fleet)
    if least_bytes is None:
        return MemoryNeed(takes_bytes=takes_bytes, least_bytes=takes_bytes, splits=splits)
    # The minimum includes memory that is not taken at load, so it can exceed the measured size.
    return MemoryNeed(
        takes_bytes=max(takes_bytes, least_bytes), least_bytes=least_bytes, contexts=contexts, splits=splits
    )


def _splits(spec: ModelSpec, status: ModelStatus | None, fleet: Fleet) -> HostSplits | None:
    """How its weights can be divided between device and host, as reported by the node or by another that has its
    files."""
    if spec.host_weights == "off" or spec.num_nodes > 1:
        return None
    splits = _splits_elsewhere(spec.id, fleet) if status is None else status.host_splits
    return None if splits is not None and splits.is_last_resort and spec.host_weights is None else splits


def _splits_elsewhere(model_id: str, fleet: Fleet) -> HostSplits | None:
    """As the first of the nodes reports them, by name: nodes with other devices divide a model in other steps."""
    known = _found_splits(fleet)
    if model_id not in known:
        nodes = sorted(fleet.listing(model_id), key=lambda node: node.name)
        reported = (node.residencies[model_id].status.host_splits for node in nodes)
        known[model_id] = next((splits for splits in reported if splits is not None), None)
    return known[model_id]


@remembered
def _found_splits(_fleet: Fleet) -> dict[str, HostSplits | None]:
    """By model, filled on demand."""
    return {}


def host_left_bytes(node: Node) -> int:
    """Host memory available to a load. Sleeping models and KV pages give way to it; reservations of other loads do
    not."""
    if node.host is None:
        return 0
    limits = [node.host.budget_bytes]
    if any(device.kind != "cpu" for device in node.devices):  # it copies from page-locked memory
        limits.append(node.host.locked_limit_bytes)
    reserved = sum(reservation.host_bytes for reservation in node.reservations)
    return max(0, min(limits) - node.host.weight_bytes - reserved)


def may_divide(node: Node, num_bytes: int) -> bool:
    """Whether weights of this size would fit on the empty node with the most of them in host memory, if the model can
    be divided. The memory of a CPU is the host's, unless a ceiling makes a difference."""
    devices = [each for each in whole_ledger(node) if each.kind != "cpu" or each.ceiling_bytes is not None]
    if node.host is None or not devices:
        return False
    host_bytes = host_left_bytes(node) + node.host.weight_bytes
    return num_bytes <= max(each.capacity_bytes for each in devices) + host_bytes


def contexts_of(spec: ModelSpec, status: ModelStatus) -> ContextSizes | None:
    """The sizes of the whole model's contexts, with the one that the catalogue names."""
    if status.contexts is None:
        return None
    contexts = status.contexts.part_of(1, max(1, len(status.nodes)))
    return contexts if spec.context_tokens in (None, contexts.full_tokens) else contexts.named(spec.context_tokens)


def estimated_bytes(spec: ModelSpec, status: ModelStatus) -> int | None:
    """The node's estimate of the whole model, with the catalogue's context, which may differ from that of the node's
    own entry."""
    estimate_bytes, contexts = _whole(status, status.estimate_bytes), contexts_of(spec, status)
    if estimate_bytes is None or contexts is None or status.contexts is None or spec.context_tokens is None:
        return estimate_bytes
    is_longer = contexts.full_tokens > status.contexts.full_tokens
    return contexts.full_bytes if is_longer else min(estimate_bytes, contexts.full_bytes)


def _whole(status: ModelStatus, num_bytes: int | None) -> int | None:
    """The size of the whole model, given the equal part that a node reports."""
    return None if num_bytes is None else num_bytes * max(1, len(status.nodes))


def whole_measured_bytes(status: ModelStatus) -> int | None:
    """The measured size of the whole model, given the equal part on one node of its group."""
    return _whole(status, status.measured_bytes)


def measurements(fleet: Fleet, models: Iterable[str] | None = None) -> Measured:
    """The fleet's measured sizes, updated with nodes' reports of `models`, or of all. A model may still be loaded in
    another quantisation than the catalogue wants now."""
    found: Measured = {}
    for model_id in fleet.live_models() if models is None else models:
        spec = fleet.catalogue.spec(model_id)
        key = (spec.id, spec.quant, spec.context_tokens)
        for node in fleet.listing(model_id):
            status = node.residencies[model_id].status
            whole_bytes = whole_measured_bytes(status)
            if whole_bytes is not None and status.harness != ENGINE:
                whole_bytes = _whole(status, status.estimate_bytes)  # its current usage may be unusual
            is_wanted = spec.quant is None or _is_as_wanted(spec.quant, status)
            if whole_bytes is not None and is_wanted and not _is_cut(status):
                found[key] = whole_bytes
    is_news = any(fleet.measured.get(key) != num_bytes for key, num_bytes in found.items())
    return fleet.measured | found if is_news else fleet.measured


def _is_cut(status: ModelStatus) -> bool:
    """Whether a loaded model had less memory than on an empty device, so that it would take more next time."""
    measured_bytes, estimate_bytes = status.measured_bytes or 0, status.estimate_bytes or 0
    return status.contexts is not None and measured_bytes < estimate_bytes - estimate_bytes // 10


def remeasured(before: Node, after: Node) -> Iterator[str]:
    """The models whose measured size may have changed since the report `before`."""
    for model_id, held in after.residencies.items():
        old, status = before.residencies.get(model_id), held.status
        if old is None:
            yield model_id
        elif status.measured_bytes is None and old.status.measured_bytes is None:
            continue  # it measures nothing, as before
        elif old.status is not status and _measured(old.status) != _measured(status):
            yield model_id
    yield from before.residencies.keys() - after.residencies.keys()


def _measured(status: ModelStatus) -> tuple[object, ...]:
    return status.measured_bytes, status.requested_quant, status.quant, status.nodes


def sized_for(spec: ModelSpec, status: ModelStatus) -> ModelStatus | None:
    """A node's report with the sizes of the quantisation that the catalogue wants; None if the node has none.

    Before its first load there, a node knows a model as its files are: dense weights are smaller once quantised.
    """
    if spec.quant is None or status.measured_bytes is not None or _is_as_wanted(spec.quant, status):
        return status
    name = at_load(spec.quant)
    size = next((each for each in status.quantised if each.quant == name), None)
    if size is None:
        return None
    sizes = {"estimate_bytes": size.estimate_bytes, "least_bytes": size.least_bytes, "contexts": size.contexts}
    return msgspec.structs.replace(status, quant=size.quant, quantised=(), **sizes)


def _is_as_wanted(quant: str, status: ModelStatus) -> bool:
    return is_same_quant(quant, status.requested_quant, status.quant)


def _estimate_elsewhere(spec: ModelSpec, fleet: Fleet) -> int | None:
    """The largest size that any node reports for the model, else for another model with the same source, because nodes
    know the files in their folders before a load names them."""
    known = fleet.estimates
    if spec.id not in known:
        known[spec.id] = _largest_estimate(spec, fleet)
    return known[spec.id]


def _largest_estimate(spec: ModelSpec, fleet: Fleet) -> int | None:
    held = [node.residencies[spec.id] for node in fleet.listing(spec.id)]
    if not any(each.num_bytes for each in held) and spec.source is not None:
        every = (each for node in fleet.nodes for each in node.residencies.values())
        held = [each for each in every if each.status.source == spec.source]
    known = [status for each in held if (status := sized_for(spec, each.status)) is not None]
    sizes = [
        estimated_bytes(spec, status) if measured_bytes is None or _is_cut(status) else measured_bytes
        for status in known
        for measured_bytes in (whole_measured_bytes(status),)
    ]
    return max((size for size in sizes if size is not None), default=None)


def _enter(
    holdings: dict[int, list[Holding]],
    node: Node,
    model_id: str,
    devices: tuple[int, ...],
    num_bytes: int,
    basis: Basis,
    shares: tuple[int, ...] = (),
) -> None:
    """`shares`: the model's bytes on each of `devices`; empty for equal shares of `num_bytes`."""
    places = [index for index in devices if index in holdings] or _likely_place(node)
    known = dict(zip(devices, shares, strict=False))
    for index in places:
        share = known.get(index, -(-num_bytes // len(places)))
        holdings[index].append(Holding(model_id=model_id, num_bytes=share, basis=basis))


def _likely_place(node: Node) -> list[int]:
    """The device of a load that names none, which its node chooses."""
    return [*choose_devices(Division(0, 1), {each.index: each.free_bytes for each in node.devices}, UNPLACED)]
