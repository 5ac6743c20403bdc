"""The memory that a model will need and take on this node's devices, before anything is loaded. Pure.

It runs the engine's own memory plan (`engine/memory/plan.py`) with the sizes from the model's files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cortex.neuron.config import NeuronConfig
from cortex.neuron.engine.memory.dtypes import ITEM_BYTES, dtype_name, has_four_bit_products
from cortex.neuron.engine.memory.plan import MIN_PAGES, PAGE_TOKENS, ModelSizes, penalty_bytes, plan_memory
from cortex.neuron.engine.memory.reserve import MemoryReserve
from cortex.neuron.node.loading.library import KnownModel
from cortex.neuron.node.loading.preflight import ModelFacts
from cortex.neuron.node.memory_ceilings import Ceilings, smallest
from cortex.wire.node import Device

_MIN_KV_TOKENS = 256
"""A model is not loaded with less cache than this."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a model on a node, before it is loaded."""

    least_bytes: int
    """The least memory with which some device accepts it."""
    expected_bytes: int
    """What it takes of the largest device, if that is otherwise empty."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecasts for the models and devices of a node, under its limits. With the facts of one rank of a divided model,
    they are those of one of its devices."""

    config: NeuronConfig

    def reserve(self, device: Device) -> MemoryReserve:
        """The memory of the device that a load leaves free."""
        return MemoryReserve.on(device.kind, device.total_bytes, self.config.limits.min_free_vram_mb << 20)

    def least_bytes(self, model: KnownModel, facts: ModelFacts, device: Device) -> int:
        """The least memory with which the model can respond; a device with less rejects it.

        It is never more than the engine needs, so that a model that fits is not rejected.
        """
        sizes = facts.sizes(
            self._item_bytes(device),
            model.context_tokens,
            is_packed=self.keeps_quantised(device),
            kv_item_bytes=_kv_item_bytes(model),
        )
        kv_tokens = min(_MIN_KV_TOKENS, sizes.context_tokens)
        num_pages = max(MIN_PAGES, -(-kv_tokens // PAGE_TOKENS) + 1)
        return sizes.weight_bytes + 2 * sizes.slot_bytes + num_pages * sizes.page_bytes + self._penalty_bytes(sizes)

    def ceiling_bytes(self, model: KnownModel, facts: ModelFacts, device: Device) -> int | None:
        """The most it may take of the device: the operator's limits, on a GPU its weights and a few full contexts."""
        allowed = Ceilings.of(self.config).share_bytes(device.index, model.num_devices)
        if model.memory_bytes is not None:
            return smallest(allowed, model.memory_bytes // facts.num_ranks)
        if device.kind == "cpu":
            return allowed
        return smallest(allowed, self._sizes(model, facts, device).ceiling_bytes)

    def expected_bytes(self, model: KnownModel, facts: ModelFacts, device: Device) -> int:
        """What it will take of the otherwise empty device; `least_bytes` if it does not fit at all."""
        sizes = self._sizes(model, facts, device)
        have_bytes = self.reserve(device).usable_bytes(device.total_bytes) - self._penalty_bytes(sizes)
        ceiling_bytes = self.ceiling_bytes(model, facts, device)
        if ceiling_bytes is not None:
            have_bytes = min(have_bytes, ceiling_bytes)
        plan = plan_memory(sizes, have_bytes, max_rows=self.config.limits.max_num_seqs, device_kind=device.kind)
        if plan.num_pages < MIN_PAGES:
            return self.least_bytes(model, facts, device)
        return plan.num_bytes

    def footprint(self, model: KnownModel, facts: ModelFacts, devices: Sequence[Device]) -> Footprint:
        """The footprint on those of `devices` that the model may use, all ranks and replicas together. All are of one
        kind."""
        allowed = [device for device in devices if not model.devices or device.index in model.devices] or devices
        return Footprint(
            model.num_devices * min(self.least_bytes(model, facts, device) for device in allowed),
            model.num_devices * max(self.expected_bytes(model, facts, device) for device in allowed),
        )

    def _sizes(self, model: KnownModel, facts: ModelFacts, device: Device) -> ModelSizes:
        is_auto = self.config.harness.torch.dtype == "auto"
        has_four_bits = device.kind == "cpu" and is_auto and has_four_bit_products()
        return facts.sizes(
            self._item_bytes(device),
            model.context_tokens,
            has_four_bits=has_four_bits,
            is_packed=self.keeps_quantised(device),
            kv_item_bytes=_kv_item_bytes(model),
        )

    def keeps_quantised(self, device: Device) -> bool:
        """Whether matrices stay quantised in this device's memory."""
        return device.kind == "cuda" and self.config.harness.torch.dtype in ("auto", "bfloat16")

    def _item_bytes(self, device: Device) -> int:
        return ITEM_BYTES[dtype_name(self.config.harness.torch.dtype, device.kind)]

    def _penalty_bytes(self, sizes: ModelSizes) -> int:
        return penalty_bytes(self.config.limits.max_num_seqs + 1, sizes.vocab, sizes.context_tokens)


def _kv_item_bytes(model: KnownModel) -> int | None:
    return 1 if model.kv_dtype == "fp8" else None
