"""How memory is divided among a model's weights, states and pages: the engine's plan, and the node's forecast of it.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.sizes import WeightStorage, kv_bytes_per_token, state_bytes, weight_bytes

PAGE_TOKENS = 32
CACHED_CONTEXTS = 4
"""A model gets pages for this many full contexts by default; the rest of the device stays free for other models."""
MIN_PAGES = 2
"""One page that holds tokens, and the one that padding rows write to."""
STATE_SHARE = 4
"""One part in 4 of the memory beside the weights goes to states, the rest to pages."""
UNLIMITED = 1 << 31
"""Of pages and checkpoints where they take no memory: on a stage whose layers keep none."""
MAX_CHECKPOINTS = {"cuda": 1024, "cpu": 32}
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
    """The longest sequence that is asked for, at most the model's own limit."""

    @classmethod
    def of(cls, architecture: Architecture, storage: WeightStorage, context_tokens: int | None = None) -> ModelSizes:
        config = architecture.config
        return cls(
            weight_bytes=weight_bytes(architecture, storage),
            page_bytes=PAGE_TOKENS * kv_bytes_per_token(architecture, storage.kv_item_bytes or storage.item_bytes),
            slot_bytes=state_bytes(architecture, storage.item_bytes),
            vocab=config.vocab,
            context_tokens=min(context_tokens or config.context_tokens, config.context_tokens),
        )

    @property
    def num_context_pages(self) -> int:
        return -(-self.context_tokens // PAGE_TOKENS)

    @property
    def ceiling_bytes(self) -> int:
        """What the model should take of a GPU that other models may share: its weights and a few full contexts."""
        return int(self.weight_bytes * 1.02) + CACHED_CONTEXTS * self.num_context_pages * self.page_bytes


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Slots of recurrent state: one for each running row, one for padding rows, and the checkpoints."""

    rows: int
    checkpoints: int = 0
    num_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_slots(self) -> int:
        return self.rows + 1 + self.checkpoints

    @classmethod
    def plan(cls, slot_bytes: int, max_rows: int, spare_bytes: int, device_kind: str) -> StateSlots:
        """Half of the states' share of `spare_bytes` goes to rows, up to `max_rows`, the rest to checkpoints.

        A model without recurrent layers has slots of 0 bytes.
        """
        if not slot_bytes:
            return cls(max_rows)
        affordable = max(0, spare_bytes) // STATE_SHARE // slot_bytes
        rows = max(1, min(max_rows, affordable // 2))
        checkpoints = max(0, min(MAX_CHECKPOINTS[device_kind], affordable - rows - 1))
        notes = (f"{rows} of {max_rows} sequences at once: memory for recurrent states",) if rows < max_rows else ()
        return cls(rows, checkpoints, (rows + 1 + checkpoints) * slot_bytes, notes)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How much each part gets. With fewer than `MIN_PAGES` pages the model does not fit."""

    context_tokens: int
    num_pages: int
    slots: StateSlots
    num_bytes: int
    """All parts together."""
    notes: tuple[str, ...] = ()

    def limited(self, sizes: ModelSizes, num_pages: int, rows: int, checkpoints: int) -> MemoryPlan:
        """The plan with fewer pages and states, where another rank of the model has less memory."""
        slots = replace(
            self.slots, rows=rows, checkpoints=checkpoints, num_bytes=(rows + 1 + checkpoints) * sizes.slot_bytes
        )
        if (slots.rows, slots.checkpoints, num_pages) == (self.slots.rows, self.slots.checkpoints, self.num_pages):
            return self
        notes = self.notes
        if sizes.page_bytes and num_pages < self.num_pages:
            note = f"{num_pages} of {self.num_pages} pages of KV cache: another device of the model has less memory"
            notes = (*notes, note)
        return MemoryPlan(
            context_tokens=min(self.context_tokens, (num_pages - 1) * PAGE_TOKENS),
            num_pages=num_pages,
            slots=slots,
            num_bytes=sizes.weight_bytes + slots.num_bytes + num_pages * sizes.page_bytes,
            notes=notes,
        )


def penalty_bytes(max_rows: int, vocab: int, context_tokens: int) -> int:
    """What the penalties of `max_rows` rows take once a request uses them; a load leaves room for them."""
    return max_rows * (vocab + context_tokens) * _COUNT_BYTES


def plan_memory(sizes: ModelSizes, have_bytes: int, *, max_rows: int, device_kind: str) -> MemoryPlan:
    """Weights come first, then states, and pages take the rest. On a CPU, which shares its memory with everything else,
    pages take no more than a few full contexts."""
    spare_bytes = have_bytes - sizes.weight_bytes
    slots = StateSlots.plan(sizes.slot_bytes, max_rows, spare_bytes, device_kind)
    page_room_bytes = max(0, spare_bytes - slots.num_bytes)
    num_pages = page_room_bytes // sizes.page_bytes if sizes.page_bytes else UNLIMITED if spare_bytes >= 0 else 0
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
