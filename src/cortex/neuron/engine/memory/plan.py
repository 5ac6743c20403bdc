"""How memory is divided among a model's weights, states and pages: the engine's plan, and the node's forecast of it.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from cortex.neuron.engine.memory.state_slots import StateSlots
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.sizes import WeightStorage, kv_bytes_per_token, state_bytes, weight_bytes

PAGE_TOKENS = 32
CACHED_CONTEXTS = 4
"""Full contexts for which a model gets pages unless it is told otherwise; the rest stays for others."""
MIN_PAGES = 2
"""One that holds tokens, and the one that padding rows write to."""
_COUNT_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the parts of a model take on one kind of device."""

    weight_bytes: int
    page_bytes: int
    """One page over all layers."""
    slot_bytes: int
    """One recurrent state over all layers; 0 for a model that has none."""
    vocab: int
    context_tokens: int
    """The longest sequence that is asked for, at most what the model was made for."""

    @classmethod
    def of(cls, architecture: Architecture, storage: WeightStorage, context_tokens: int | None = None) -> ModelSizes:
        config = architecture.config
        return cls(
            weight_bytes=weight_bytes(architecture, storage),
            page_bytes=PAGE_TOKENS * kv_bytes_per_token(architecture, storage.item_bytes),
            slot_bytes=state_bytes(architecture, storage.item_bytes),
            vocab=config.vocab,
            context_tokens=min(context_tokens or config.context_tokens, config.context_tokens),
        )

    @property
    def num_context_pages(self) -> int:
        return -(-self.context_tokens // PAGE_TOKENS)

    @property
    def ceiling_bytes(self) -> int:
        """What the model should take of a GPU that it may share: its weights and a few full contexts."""
        return int(self.weight_bytes * 1.02) + CACHED_CONTEXTS * self.num_context_pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who gets what. With fewer than `MIN_PAGES` pages the model does not fit."""

    context_tokens: int
    num_pages: int
    slots: StateSlots
    num_bytes: int
    """Of all parts together."""
    notes: tuple[str, ...] = ()


def penalty_bytes(max_rows: int, vocab: int, context_tokens: int) -> int:
    """What the penalties of so many rows take once they are asked for; room is left for them."""
    return max_rows * (vocab + context_tokens) * _COUNT_BYTES


def plan_memory(sizes: ModelSizes, have_bytes: int, *, max_rows: int, device_kind: str) -> MemoryPlan:
    """Weights come first, then states, and pages take the rest; on a CPU, whose memory is shared with everything else,
    as much of it as a few full contexts want."""
    spare_bytes = have_bytes - sizes.weight_bytes
    slots = StateSlots.plan(sizes.slot_bytes, max_rows, spare_bytes, device_kind)
    num_pages = max(0, (spare_bytes - slots.num_bytes) // sizes.page_bytes)
    if device_kind == "cpu":
        num_pages = min(num_pages, CACHED_CONTEXTS * sizes.num_context_pages + 1)
    held_tokens = (num_pages - 1) * PAGE_TOKENS
    notes: tuple[str, ...] = ()
    if held_tokens < sizes.context_tokens:
        notes = (f"context limited to {held_tokens} of {sizes.context_tokens} tokens by memory",)
    return MemoryPlan(
        context_tokens=min(held_tokens, sizes.context_tokens),
        num_pages=num_pages,
        slots=slots,
        num_bytes=sizes.weight_bytes + slots.num_bytes + num_pages * sizes.page_bytes,
        notes=(*slots.notes, *notes),
    )
