"""Predicts the memory that a model will need and take on this node's devices before a load. Pure.

It runs the engine's own memory plan (`engine/memory/plan.py`) with the sizes from the model's files.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec

from cortex.neuron.engine.memory.dtypes import dtype_name, likely_multiplies_codes
from cortex.neuron.engine.memory.plan import (
    MIN_PAGES,
    PAGE_TOKENS,
    MemoryPlan,
    ModelSizes,
    max_graph_tokens,
    penalty_bytes,
    plan_memory,
    plan_with_graphs,
)
from cortex.neuron.engine.memory.stages import MIN_SLOTS, divide_model
from cortex.neuron.engine.request import StageSpec
from cortex.neuron.kernels.peer_buffer import buffer_bytes as peer_buffer_bytes
from cortex.neuron.kernels.quantised.recipes import RECIPES, Recipe
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.host_division import (
    NO_EXPERTS,
    NOTHING_MOVABLE,
    LayerWeights,
    Rates,
    buffer_bytes,
    divide,
    most_saved_bytes,
)
from cortex.neuron.models.packing import MatrixDevice
from cortex.neuron.models.sizes import WeightStorage
from cortex.neuron.models.towers.config import PASS_PATCHES
from cortex.neuron.node.harness.estimates import FileMetadata, Footprint, NodeLimits
from cortex.neuron.node.inspection_process.preflight import ModelMetadata
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.memory.ceilings import smallest
from cortex.wire.node.contexts import ContextSize, ContextSizes, wanted
from cortex.wire.node.device_choice import UNPLACED, Division, choose_devices
from cortex.wire.node.host_splits import HostSplit, HostSplits
from cortex.wire.node.protocol import Device

_MIN_KV_TOKENS = 256
"""The minimum KV cache of a load."""
_UNLIMITED_BYTES = 1 << 62
_SPLIT_PARTS = (0, 1, 2, 4, 8, 12, 16)
"""The reported divisions, in sixteenths of what can be moved."""
_REPORTED_TOKENS = 4096
"""The size of this context is computed too, because up to about there sliding windows grow with the context."""


@dataclass(frozen=True, slots=True)
class Forecast(NodeLimits):
    """The engine's `Estimates` for the models and devices of a node, under its limits. Given the metadata of one rank
    of a divided model, the results are for one of its devices."""

    loads_in_worker: ClassVar[bool] = True
    rates: Callable[[], Rates | None] = field(default=lambda: None, compare=False)
    """Measured memory rates of this node; None if not measured."""

    def least_bytes(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> int:
        """The least memory with which the model can respond; a device with less rejects it.

        It is never more than the engine needs, so that a model that fits is not rejected.
        """
        sizes = self._sizes(model, metadata, device)
        kv_tokens = min(_MIN_KV_TOKENS, sizes.context_tokens)
        num_pages = max(MIN_PAGES, -(-kv_tokens // PAGE_TOKENS) + 1)
        kept_bytes = self._penalty_bytes(sizes) + _peer_bytes(model, device)
        return sizes.weight_bytes + 2 * sizes.slot_bytes + num_pages * sizes.page_bytes + kept_bytes

    def smallest_bytes(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> int:
        """Weights and the smallest cache: a lower limit (`memory_mb`) can never be met."""
        sizes = self._sizes(model, metadata, device)
        return sizes.weight_bytes + MIN_SLOTS * sizes.slot_bytes + MIN_PAGES * sizes.page_bytes

    def _limit_bytes(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> int | None:
        """The most that it should take of all devices."""
        if model.memory_bytes is not None or device.kind == "cpu":
            return model.memory_bytes
        return self._sizes(model, metadata, device).ceiling_bytes

    def ceiling_bytes(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> int | None:
        """The most it may take of the device: the operator's limits, on a GPU its weights and a few full contexts."""
        allowed = self.share_bytes(model, device)
        if model.memory_bytes is not None:
            return smallest(allowed, model.memory_bytes // metadata.num_ranks)
        if device.kind == "cpu":
            return allowed
        return smallest(allowed, self._sizes(model, metadata, device).ceiling_bytes)

    def expected_bytes(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> int:
        """What it will take of the otherwise empty device; `least_bytes` if it does not fit at all."""
        usable_bytes = self.reserve(device).usable_bytes(device.total_bytes)
        ceiling_bytes = self.ceiling_bytes(model, metadata, device)
        return self._expected_bytes(model, metadata, device, usable_bytes, ceiling_bytes)

    def _expected_bytes(
        self, model: KnownModel, metadata: ModelMetadata, device: Device, usable_bytes: int, ceiling_bytes: int | None
    ) -> int:
        plan = self._plan(model, metadata, device, usable_bytes, ceiling_bytes)
        return plan.num_bytes + _peer_bytes(model, device) if plan.fits else self.least_bytes(model, metadata, device)

    def _plan(
        self, model: KnownModel, metadata: ModelMetadata, device: Device, usable_bytes: int, ceiling_bytes: int | None
    ) -> MemoryPlan:
        sizes = self._sizes(model, metadata, device)
        peer_bytes = _peer_bytes(model, device)
        return plan_with_graphs(
            sizes,
            usable_bytes - self._penalty_bytes(sizes) - peer_bytes,
            None if ceiling_bytes is None else ceiling_bytes - peer_bytes,
            _graph_tokens(model, device),
            max_rows=self.config.limits.max_num_seqs,
            device_kind=device.kind,
            wanted_tokens=wanted_tokens(model, metadata),
        )

    def empty_context(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> int:
        """The context that it gets on the otherwise empty device; 0 if it does not fit."""
        usable_bytes = self.reserve(device).usable_bytes(device.total_bytes)
        plan = self._plan(model, metadata, device, usable_bytes, self.ceiling_bytes(model, metadata, device))
        return max(0, plan.context_tokens) if plan.fits else 0

    def context_bytes(self, model: KnownModel, metadata: ModelMetadata, device: Device, tokens: int) -> int:
        """Bytes that a load must be able to take of the device for a context of `tokens`; monotonic in `tokens`."""
        sizes = self._sizes(model, metadata, device)
        tokens = min(tokens, sizes.context_tokens)
        kept_bytes = self._penalty_bytes(sizes) + _peer_bytes(model, device)
        if tokens > wanted_tokens(model, metadata) and device.kind == "cuda":  # graphs leave room only up to that
            kept_bytes += 2 * _graph_tokens(model, device) * sizes.token_room
        least_bytes = sizes.weight_bytes + MIN_SLOTS * sizes.slot_bytes
        # Windows take up to half of the memory of pages, and states a quarter of all.
        most_bytes = least_bytes + sizes.table_bytes + MIN_SLOTS * sizes.slot_bytes
        most_bytes += 3 * (-(-tokens // PAGE_TOKENS) + MIN_PAGES) * max(1, sizes.page_bytes)
        steps = range(least_bytes, most_bytes, max(1, sizes.page_bytes))
        num_seqs, kind = self.config.limits.max_num_seqs, device.kind

        def holds(have_bytes: int) -> bool:
            plan = plan_memory(sizes, have_bytes, max_rows=num_seqs, device_kind=kind)
            return plan.fits and plan.context_tokens >= tokens

        found = bisect_left(steps, True, key=holds)
        # With a little more memory there is a state more, or a page of a window, which leaves less for other pages.
        have_bytes = (steps[found] if found < len(steps) else most_bytes) + sizes.slot_bytes + sizes.page_bytes
        return max(have_bytes + kept_bytes, self.least_bytes(model, metadata, device))

    def contexts(self, model: KnownModel, metadata: ModelMetadata, device: Device, empty_tokens: int) -> ContextSizes:
        """The sizes of contexts on one device. `empty_tokens`: the context on empty devices."""
        sizes, wanted_context = self._sizes(model, metadata, device), wanted_tokens(model, metadata)
        full, least_bytes = sizes.context_tokens, self.least_bytes(model, metadata, device)
        points = [ContextSize(tokens=min(_MIN_KV_TOKENS, full), num_bytes=least_bytes)]
        for tokens in sorted({min(_REPORTED_TOKENS, full), wanted_context, full}):
            if tokens > points[-1].tokens:
                num_bytes = self.context_bytes(model, metadata, device, tokens)
                points.append(ContextSize(tokens=tokens, num_bytes=max(points[-1].num_bytes, num_bytes)))
        return ContextSizes(
            limit_tokens=metadata.context_tokens,
            full_tokens=full,
            wanted_tokens=wanted_context,
            empty_tokens=empty_tokens,
            full_bytes=sizes.ceiling_bytes,
            sizes=tuple(points),
        )

    def footprint(self, model: KnownModel, metadata: ModelMetadata, devices: Sequence[Device]) -> Footprint:
        """The footprint on those of `devices` that the model may use, all ranks and replicas together. All are of one
        kind."""
        allowed = [device for device in devices if not model.devices or device.index in model.devices] or devices
        if model.pipeline_parallel > 1:
            usable = sorted((self._usable_when_empty(model, device) for device in allowed), reverse=True)
            usable_bytes = sum(usable[: model.pipeline_parallel])
            limit_bytes = self._limit_bytes(model, metadata, allowed[0])
            plan = self._plan(model, metadata, allowed[0], usable_bytes, limit_bytes)
            expected_bytes = self._expected_bytes(model, metadata, allowed[0], usable_bytes, limit_bytes)
            splits = self.splits(model, metadata, allowed[0])
            empty_tokens = max(0, plan.context_tokens) if plan.fits else 0
            divided_tokens = self._divided_context(model, metadata, allowed[0], usable_bytes, splits)
            empty_tokens = max(empty_tokens, divided_tokens)
            contexts = self.contexts(model, metadata, allowed[0], empty_tokens)
            return Footprint(
                model.replicas * self.least_bytes(model, metadata, allowed[0]),
                model.replicas * expected_bytes,
                contexts.part_of(1, model.replicas),
                splits,
                None if splits is not None else self._last_resort(model, metadata, allowed[0]),
            )
        splits = self.splits(model, metadata, allowed[0])
        empty_tokens = max(self.empty_context(model, metadata, device) for device in allowed)
        usable_bytes = max(self._usable_when_empty(model, device) for device in allowed)
        divided_tokens = self._divided_context(model, metadata, allowed[0], usable_bytes, splits)
        empty_tokens = max(empty_tokens, divided_tokens)
        return Footprint(
            model.num_devices * min(self.least_bytes(model, metadata, device) for device in allowed),
            model.num_devices * max(self.expected_bytes(model, metadata, device) for device in allowed),
            self.contexts(model, metadata, allowed[0], empty_tokens).part_of(1, model.num_devices),
            splits,
            None if splits is not None else self._last_resort(model, metadata, allowed[0]),
        )

    def _divided_context(
        self, model: KnownModel, metadata: ModelMetadata, device: Device, usable_bytes: int, splits: HostSplits | None
    ) -> int:
        """The wanted context if it gets that on empty devices with weights in host memory, else 0."""
        if splits is None:
            return 0
        least_bytes = self.context_bytes(model, metadata, device, wanted_tokens(model, metadata))
        limit_bytes = None if model.memory_bytes is None else model.memory_bytes // metadata.num_ranks
        lacking_bytes = least_bytes - (smallest(usable_bytes, limit_bytes) or 0)
        split = splits.saving(max(1, lacking_bytes * model.tensor_parallel))
        host_mb = self.config.limits.host_mb
        fits = split is not None and (host_mb is None or split.host_bytes <= host_mb << 20)
        return wanted_tokens(model, metadata) if fits else 0

    def split(self, model: KnownModel, metadata: ModelMetadata, device: Device, lacking_bytes: int) -> HostSplit | str:
        if (why := self._unsplittable(model, metadata, device)) is not None:
            return why
        layers, other_bytes = metadata.movable(self.matrix_device(device))
        limit_bytes = model.host_weights << 20 if isinstance(model.host_weights, int) else _UNLIMITED_BYTES
        ranks, whole_bytes = model.tensor_parallel, _whole_bytes(layers, other_bytes)
        rates = self.rates() or Rates()
        extra_bytes = _stage_bytes(model, layers)
        found = divide(
            layers,
            other_bytes,
            whole_bytes - lacking_bytes - extra_bytes,
            limit_bytes // ranks,
            replace(rates, host=rates.host / ranks),  # all ranks of this host compute at the same time
            moves_blocks=_moves_blocks(model),
        )
        if isinstance(found, str):
            return found
        return HostSplit(
            saved_bytes=ranks * (whole_bytes - extra_bytes - found.device_bytes),
            host_bytes=ranks * found.host_bytes,
            tokens_per_s=round(found.decode_tokens_s, 2),
        )

    def splits(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> HostSplits | None:
        """How the weights can be divided between device and host; None if impossible or not permitted."""
        if self._unsplittable(model, metadata, device) is not None:
            return None
        layers, _ = metadata.movable(self.matrix_device(device))
        movable_bytes = most_saved_bytes(layers, moves_blocks=_moves_blocks(model)) - _stage_bytes(model, layers)
        parts = (self.split(model, metadata, device, max(1, movable_bytes * part // 16)) for part in _SPLIT_PARTS)
        found = tuple(split for split in parts if isinstance(split, HostSplit))
        return HostSplits(splits=found, is_measured=self.rates() is not None) if found else None

    def _last_resort(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> HostSplits | None:
        """How they could be divided if the entry permitted it."""
        if model.host_weights is not None:
            return None
        splits = self.splits(msgspec.structs.replace(model, host_weights="auto"), metadata, device)
        return None if splits is None else msgspec.structs.replace(splits, is_last_resort=True)

    def _unsplittable(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> str | None:
        """Why all weights must be on the device; None if they need not be."""
        if model.host_weights == "off":
            return 'none of its weights may be in host memory (host_weights = "off")'
        if model.replicas > 1 or model.may_grow or model.deterministic or metadata.backend != "native":
            return "only native models with one replica, not deterministic, can have weights in host memory"
        if device.kind == "cpu" and self.share_bytes(model, device) is None and model.memory_bytes is None:
            return "the memory of a CPU is the host's"
        layers, _ = metadata.movable(self.matrix_device(device))
        if any(layer.experts for layer in layers if layer.num_movable):
            return None
        if not any(layer.num_movable for layer in layers):
            return NOTHING_MOVABLE
        return None if _moves_blocks(model) else NO_EXPERTS

    def stages(
        self,
        model: KnownModel,
        metadata: ModelMetadata,
        device: Device,
        capacities: Sequence[int],
        ceilings: Sequence[int | None],
    ) -> tuple[StageSpec, ...] | None:
        """The layers for each of several devices like `device`, one for each of `capacities`; None if they cannot hold
        the model. `ceilings`: the operator's, for each of them."""
        storage, draft = self._storage(model, metadata, device), self._draft_sizes(model, metadata, device)
        architecture, buffers = self._divided(model, metadata, device)
        plans = divide_model(
            architecture,
            storage,
            [capacity - buffers for capacity in capacities],
            context_tokens=model.context_tokens,
            limit_bytes=self._limit_bytes(model, metadata, device),
            max_rows=self.config.limits.max_num_seqs,
            device_kind=device.kind,
            draft=draft,
        )
        if plans is None:
            return None
        total_bytes = sum(plan.num_bytes for plan in plans)
        stages = []
        for plan, ceiling_bytes in zip(plans, ceilings, strict=True):
            limit_bytes: int | None = None
            if model.memory_bytes is not None:
                limit_bytes = model.memory_bytes * plan.num_bytes // total_bytes
            elif device.kind != "cpu":
                sizes = ModelSizes.of(architecture.staged(plan.layers), storage, model.context_tokens)
                sizes = replace(sizes, weight_bytes=sizes.weight_bytes + buffers)
                if draft is not None and not plan.layers.start:
                    sizes = sizes.with_draft(draft)
                limit_bytes = sizes.ceiling_bytes
            stages.append(StageSpec(plan.layers.start, len(plan.layers), smallest(limit_bytes, ceiling_bytes)))
        return tuple(stages)

    def _divided(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> tuple[Architecture, int]:
        """The loaded part of the model without the weights in host memory, and the buffers that each stage needs for
        those."""
        architecture = _architecture(model, metadata)
        if model.host_split is None:
            return architecture, 0
        layers, other_bytes = metadata.movable(self.matrix_device(device))
        left_bytes = _whole_bytes(layers, other_bytes) - model.host_split.saved_bytes - _stage_bytes(model, layers)
        found = divide(layers, other_bytes, left_bytes, _UNLIMITED_BYTES)
        return (
            (architecture, 0) if isinstance(found, str) else (architecture.hosting(found.moved), buffer_bytes(layers))
        )

    def empty_stages(
        self, model: KnownModel, metadata: ModelMetadata, devices: Sequence[Device]
    ) -> tuple[StageSpec, ...] | None:
        """The layers of each device while all of them are empty; None if they cannot hold the model."""
        allowed = [device for device in devices if not model.devices or device.index in model.devices]
        usable = {device.index: self._usable_when_empty(model, device) for device in allowed}
        chosen = choose_devices(Division(0, model.pipeline_parallel, by_layers=True), usable, UNPLACED)
        if not chosen:
            return None
        capacities = [usable[index] for index in chosen]
        return self.stages(model, metadata, devices[0], capacities, [None] * len(capacities))

    def _usable_when_empty(self, model: KnownModel, device: Device) -> int:
        usable_bytes = self.reserve(device).usable_bytes(device.total_bytes)
        ceiling_bytes = self.share_bytes(model, device)
        return usable_bytes if ceiling_bytes is None else min(usable_bytes, ceiling_bytes)

    def _sizes(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> ModelSizes:
        own = self._storage_of(model, device)
        sizes = metadata.sizes(*own, model.context_tokens, has_tower=model.vision != "off")
        if model.host_split is not None:
            sizes = replace(
                sizes, weight_bytes=sizes.weight_bytes - model.host_split.saved_bytes // model.tensor_parallel
            )
        draft = self._draft_sizes(model, metadata, device)
        return sizes if draft is None else sizes.with_draft(draft)

    def _draft_sizes(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> ModelSizes | None:
        """The sizes of its draft model; None without one."""
        if metadata.draft is None:
            return None
        return metadata.draft.sizes(*self._storage_of(model, device), None, has_tower=False)

    def _storage(self, model: KnownModel, metadata: ModelMetadata, device: Device) -> WeightStorage:
        return metadata.storage(*self._storage_of(model, device))

    def _storage_of(self, model: KnownModel, device: Device) -> tuple[MatrixDevice, int | None, int]:
        pass_patches = PASS_PATCHES[device.kind] if model.vision == "device" else 0
        return self.matrix_device(device), 1 if model.kv_dtype == "fp8" else None, pass_patches

    def quantised(self, model: KnownModel, metadata: ModelMetadata, devices: Sequence[Device]) -> dict[str, Footprint]:
        """The memory of a model with dense weights if they were quantised at load, by recipe."""
        if metadata.quant is not None:
            return {}
        return {
            name: self.footprint(model, replace(metadata, recipe=recipe), devices)
            for name, recipe in RECIPES.items()
            if all(self.quantises(device, recipe) for device in devices)
        }

    def basis(self, device: Device) -> object:
        return self.matrix_device(device), self.rates()

    def quantises(self, device: Device, recipe: Recipe) -> bool:
        """Whether dense matrices can be quantised as they are loaded on this device."""
        return self.matrix_device(device).quantises(recipe)

    def matrix_device(self, device: Device) -> MatrixDevice:
        """The properties that decide the layout of matrices on the device. They change if the C kernels fail to
        compile."""
        wanted = self.config.harness.torch.dtype
        is_coded = device.kind == "cpu" and wanted == "auto" and likely_multiplies_codes()
        return MatrixDevice(device.kind, dtype_name(wanted, device.kind), is_coded)

    def _penalty_bytes(self, sizes: ModelSizes) -> int:
        return penalty_bytes(self.config.limits.max_num_seqs + 1, sizes.vocab, sizes.context_tokens)


def _moves_blocks(model: KnownModel) -> bool:
    """Whether weights that every token reads may be in host memory too, which the entry must permit."""
    return model.host_weights is not None


def _whole_bytes(layers: Sequence[LayerWeights], other_bytes: int) -> int:
    return other_bytes + sum(layer.num_bytes for layer in layers)


def _stage_bytes(model: KnownModel, layers: Sequence[LayerWeights]) -> int:
    """The overhead of stages over one device: each has its own buffers and holds whole layers only."""
    largest = max((layer.dense_bytes + layer.unit_bytes for layer in layers), default=0)
    return (model.pipeline_parallel - 1) * (buffer_bytes(layers) + largest)


def _architecture(model: KnownModel, metadata: ModelMetadata) -> Architecture:
    """What is loaded of the model."""
    return metadata.architecture.without_tower() if model.vision == "off" else metadata.architecture


def wanted_tokens(model: KnownModel, metadata: FileMetadata) -> int:
    """The wanted context of the model."""
    return wanted(metadata.context_tokens, model.context_tokens)


def _graph_tokens(model: KnownModel, device: Device) -> int:
    return 0 if model.pipeline_parallel > 1 or model.deterministic else max_graph_tokens(device.total_bytes)


def _peer_bytes(model: KnownModel, device: Device) -> int:
    """The buffer for messages between the ranks, assuming that the devices can access each other's memory."""
    return peer_buffer_bytes(model.tensor_parallel, device.kind)
