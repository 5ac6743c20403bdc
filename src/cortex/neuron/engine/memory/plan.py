"""Divides memory among a model's weights, states and pages, for the engine's plan and the node's forecast.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cortex.neuron.engine.kv.page_groups import Window, window_pages
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.sizes import (
    WeightStorage,
    kv_bytes_by_window,
    position_bytes,
    state_bytes,
    token_room,
    tower_room,
    weight_bytes,
)
from cortex.neuron.models.towers.config import WHOLE_PICTURE_TOKENS

PAGE_TOKENS = 32
CACHED_CONTEXTS = 4
"""A model gets pages for this many full contexts by default; the rest of the device stays free for other models."""
MIN_PAGES = 2
"""One page that holds tokens, and the one that padding rows write to."""
STEP_TOKENS = {"cuda": 16_384, "cpu": 512}
"""Most tokens of a step, unless a load says otherwise."""
WINDOWS_PER_ROW = 2
"""Window pages suffice for the window of each row and of one more sequence with a cached prefix."""
STATE_SHARE = 4
"""A quarter of the memory left by the weights goes to states, the rest to pages."""
UNLIMITED = 1 << 31
"""The number of pages and checkpoints if they take no memory, as on a stage whose layers keep none."""
MAX_CHECKPOINTS = {"cuda": 1024, "cpu": 32}
_COUNT_BYTES = 4
GRAPH_TOKENS, SMALL_GRAPH_TOKENS = 2048, 512
_LARGE_CARD_BYTES = 36 << 30
_HARDLY = 16
"""A context that is already too short gives up at most a sixteenth to graphs."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model's parts on one kind of device."""

    weight_bytes: int
    """Includes the working memory of a vision tower."""
    group_bytes: Mapping[Window, int]
    """One page over the layers of each KV group. The first group has the widest window, or none."""
    slot_bytes: int
    """One recurrent state over all layers; 0 for a model that has none."""
    vocab: int
    """0 for a model that generates no tokens."""
    context_tokens: int
    """The requested maximum sequence length, at most the model's own limit."""
    table_bytes: int = 0
    """Tables with a row for each position of the context."""
    token_room: int = 0
    """The working memory of a layer, per token."""
    whole_tokens: int = 0
    """Positions that one step must be able to compute together: those of a picture, where they see each other."""

    @classmethod
    def of(cls, architecture: Architecture, storage: WeightStorage, context_tokens: int | None = None) -> ModelSizes:
        config = architecture.config
        context_tokens = min(context_tokens or config.context_tokens, config.context_tokens)
        if architecture.pooling is not None:  # texts are computed in one pass: nothing is kept of them
            token_bytes: dict[Window, int] = {None: 0}
        else:
            token_bytes = kv_bytes_by_window(architecture, storage.kv_item_bytes or storage.item_bytes)
        return cls(
            weight_bytes=weight_bytes(architecture, storage) + tower_room(architecture, storage),
            group_bytes={window: PAGE_TOKENS * num_bytes for window, num_bytes in token_bytes.items()},
            slot_bytes=state_bytes(architecture, storage.item_bytes),
            vocab=config.vocab if architecture.pooling is None else 0,
            context_tokens=context_tokens,
            table_bytes=position_bytes(architecture, context_tokens),
            token_room=token_room(architecture, storage) if architecture.pooling is None else 0,
            whole_tokens=WHOLE_PICTURE_TOKENS if architecture.pictures.is_whole else 0,
        )

    def with_draft(self, draft: ModelSizes) -> ModelSizes:
        """Together with a draft model, whose layers have pages under the ids of the first group."""
        first, *others = self.group_bytes
        pages = {first: self.group_bytes[first] + draft.page_bytes, **{each: self.group_bytes[each] for each in others}}
        return replace(
            self,
            weight_bytes=self.weight_bytes + draft.weight_bytes,
            group_bytes=pages,
            table_bytes=self.table_bytes + draft.table_bytes,
        )

    def fixed_bytes(self, num_tokens: int) -> int:
        """Weights, and tables for sequences of `num_tokens`."""
        return self.weight_bytes + self.tables_of(num_tokens)

    def tables_of(self, num_tokens: int) -> int:
        return -(-self.table_bytes * num_tokens // max(1, self.context_tokens))

    @property
    def page_bytes(self) -> int:
        """One page over all layers."""
        return sum(self.group_bytes.values())

    @property
    def num_context_pages(self) -> int:
        return -(-self.context_tokens // PAGE_TOKENS)

    @property
    def ceiling_bytes(self) -> int:
        """The model's ceiling on a GPU that other models may share: its weights and a few full contexts.

        Windows take at most as much as the layers without."""
        first, *others = (CACHED_CONTEXTS * self.num_context_pages * page for page in self.group_bytes.values())
        return (
            int(self.weight_bytes * 1.02)
            + self.table_bytes
            + first
            + (min(first, sum(others)) if first else sum(others))
        )

    def bytes_of(self, num_pages: Mapping[Window, int]) -> int:
        """The size of this many pages of each group."""
        return sum(count * self.group_bytes[window] for window, count in num_pages.items())

    def divide_pages(self, room_bytes: int, rows: int, device_kind: str) -> dict[Window, int]:
        """How many pages each KV group gets.

        A group with a window needs pages for the windows of all rows and for a step's tokens, but never more than the
        first group has. It gets them from half of the memory: many short sequences need them, and few long ones need
        the pages of the first group, which gets the rest. On a CPU, which shares its memory with everything else, a
        group gets no more than a few full contexts.
        """
        most = CACHED_CONTEXTS * self.num_context_pages + 1 if device_kind == "cpu" else UNLIMITED
        if room_bytes < 0:
            return dict.fromkeys(self.group_bytes, 0)
        equal = min(most, room_bytes // self.page_bytes) if self.page_bytes else most
        first, *windows = self.group_bytes
        each = {
            window: min(window_pages((window or 0) + self.whole_tokens, PAGE_TOKENS), self.num_context_pages)
            for window in windows
        }
        wanted = {
            window: WINDOWS_PER_ROW * rows * count + STEP_TOKENS[device_kind] // PAGE_TOKENS
            for window, count in each.items()
        }
        share_bytes = min(room_bytes // 2, self.bytes_of(wanted))
        num_pages = {first: equal}
        for window, count in wanted.items():
            if not self.group_bytes[window]:
                num_pages[window] = UNLIMITED  # another stage has these layers
                continue
            shared = count * share_bytes // max(1, self.bytes_of(wanted))
            num_pages[window] = min(equal, max(shared, each[window] + MIN_PAGES))
        if windows:
            left_bytes = room_bytes - self.bytes_of({window: num_pages[window] for window in windows})
            first_bytes = self.group_bytes[first]
            num_pages[first] = min(most, left_bytes // first_bytes) if first_bytes else most
        return num_pages

    def held_tokens(self, num_pages: Mapping[Window, int]) -> int:
        """The longest sequence that fits; a window with all its pages fits any length."""
        return min(
            UNLIMITED if window is not None and count > window_pages(window, PAGE_TOKENS) else (count - 1) * PAGE_TOKENS
            for window, count in num_pages.items()
        )


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
    """How much each part gets."""

    context_tokens: int
    num_pages: Mapping[Window, int]
    """For each KV group."""
    slots: StateSlots
    num_bytes: int
    """All parts together."""
    notes: tuple[str, ...] = ()
    graph_tokens: int = 0
    """Steps of prompts up to this many tokens are captured as graphs, with room in addition to all parts."""

    @property
    def fits(self) -> bool:
        return min(self.num_pages.values()) >= MIN_PAGES

    def limited(self, sizes: ModelSizes, num_pages: Mapping[Window, int], rows: int, checkpoints: int) -> MemoryPlan:
        """The plan with fewer pages and states, where another rank of the model has less memory."""
        slots = replace(
            self.slots, rows=rows, checkpoints=checkpoints, num_bytes=(rows + 1 + checkpoints) * sizes.slot_bytes
        )
        if (slots.rows, slots.checkpoints, num_pages) == (self.slots.rows, self.slots.checkpoints, self.num_pages):
            return self
        notes = self.notes
        if sizes.bytes_of(num_pages) < sizes.bytes_of(self.num_pages):
            pages = ", ".join(f"{count} of {self.num_pages[window]}" for window, count in num_pages.items())
            notes = (*notes, f"{pages} pages of KV cache: another device of the model has less memory")
        context_tokens = min(self.context_tokens, sizes.held_tokens(num_pages))
        return MemoryPlan(
            context_tokens=context_tokens,
            num_pages=num_pages,
            slots=slots,
            num_bytes=sizes.fixed_bytes(context_tokens) + slots.num_bytes + sizes.bytes_of(num_pages),
            notes=notes,
            graph_tokens=self.graph_tokens,
        )


def penalty_bytes(max_rows: int, vocab: int, context_tokens: int) -> int:
    """The memory for penalties of `max_rows` rows, once a request uses them; a load reserves it."""
    return max_rows * (vocab + context_tokens) * _COUNT_BYTES if vocab else 0


def max_graph_tokens(total_bytes: int) -> int:
    """The most tokens of a captured prompt step on a GPU with this much memory. Smaller cards are slower too, so that
    computing exceeds launch time at fewer tokens."""
    return GRAPH_TOKENS if total_bytes >= _LARGE_CARD_BYTES else SMALL_GRAPH_TOKENS


def plan_with_graphs(
    sizes: ModelSizes,
    have_bytes: int,
    limit_bytes: int | None,
    graph_tokens: int,
    *,
    max_rows: int,
    device_kind: str,
    wanted_tokens: int = 0,
) -> MemoryPlan:
    """The plan of a model that captures steps of prompts up to `graph_tokens`, or none where they take too much of its
    context: graphs make it faster, and it needs none. `limit_bytes`: the most that its parts may take, without the
    graphs. `wanted_tokens`: graphs make the context no shorter than this and, if it is shorter anyway, hardly so."""
    # All compute in the memory of the largest one, and about half of it is in use at once.
    graph_bytes = 2 * graph_tokens * sizes.token_room if device_kind == "cuda" else 0
    plain, captured = (
        plan_memory(
            sizes,
            left_bytes if limit_bytes is None else min(left_bytes, limit_bytes),
            max_rows=max_rows,
            device_kind=device_kind,
        )
        for left_bytes in (have_bytes, have_bytes - graph_bytes)
    )
    least_tokens = wanted_tokens
    if plain.context_tokens < wanted_tokens:
        least_tokens = plain.context_tokens - plain.context_tokens // _HARDLY
    if captured.fits and captured.context_tokens >= least_tokens:
        return replace(captured, graph_tokens=graph_tokens)
    return plain


def plan_memory(sizes: ModelSizes, have_bytes: int, *, max_rows: int, device_kind: str) -> MemoryPlan:
    """Weights and tables come first, then states, and pages take the rest."""
    plan = _plan(sizes, have_bytes - sizes.table_bytes, max_rows, device_kind)
    if plan.fits and plan.context_tokens == sizes.context_tokens:
        return plan
    # The context is shorter than requested, and so are its tables: no longer than without any.
    most_tokens = max(0, _plan(sizes, have_bytes, max_rows, device_kind).context_tokens)
    return _plan(sizes, have_bytes - sizes.tables_of(most_tokens), max_rows, device_kind)


def _plan(sizes: ModelSizes, have_bytes: int, max_rows: int, device_kind: str) -> MemoryPlan:
    """`have_bytes`: without those of the tables."""
    spare_bytes = have_bytes - sizes.weight_bytes
    slots = StateSlots.plan(sizes.slot_bytes, max_rows, spare_bytes, device_kind)
    num_pages = sizes.divide_pages(spare_bytes - slots.num_bytes, slots.rows, device_kind)
    held_tokens = sizes.held_tokens(num_pages)
    notes: tuple[str, ...] = ()
    if held_tokens < sizes.context_tokens:
        notes = (f"context limited to {held_tokens} of {sizes.context_tokens} tokens by memory",)
    context_tokens = min(held_tokens, sizes.context_tokens)
    return MemoryPlan(
        context_tokens=context_tokens,
        num_pages=num_pages,
        slots=slots,
        num_bytes=sizes.fixed_bytes(max(0, context_tokens)) + slots.num_bytes + sizes.bytes_of(num_pages),
        notes=(*slots.notes, *notes),
    )
