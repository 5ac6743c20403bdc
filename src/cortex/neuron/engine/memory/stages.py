"""Divides the layers of a model among devices with different amounts of memory (pipeline parallelism).

Stages are contiguous. All of them have the same number of KV pages and state slots, because the leader plans one step
for all: the division is the one with the most pages in the tightest stage. Pure; imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from cortex.neuron.engine.kv.page_groups import Window
from cortex.neuron.engine.memory.plan import MIN_PAGES, PAGE_TOKENS, ModelSizes, penalty_bytes, plan_memory
from cortex.neuron.layers.configs import AttentionConfig
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.sizes import (
    WeightStorage,
    end_bytes,
    kv_bytes_per_token,
    layer_bytes,
    state_bytes,
    tower_bytes,
)

_STEPS = 1 << 10
"""Steps in which cache sizes, and shares of the devices, are tried."""
MIN_SLOTS = 2
"""Recurrent states of one row, and of the padding row."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of one layer."""

    weight_bytes: int
    page_bytes: int = 0
    """The size of one KV page."""
    slot_bytes: int = 0
    """The size of one recurrent state."""
    window: Window = None
    """Which KV group its pages belong to."""
    source: int | None = None
    """The earlier layer, in the same stage, whose pages it reads; None if it reads its own."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The memory of sequences, in pages of each KV group and in slots, which every stage has."""

    num_pages: Mapping[Window, int]
    num_slots: int = 0

    def bytes_of(self, layer: LayerSizes) -> int:
        """The layer's bytes with a cache of this size."""
        page_bytes = self.num_pages[layer.window] * layer.page_bytes if layer.page_bytes else 0
        return layer.weight_bytes + page_bytes + self.num_slots * layer.slot_bytes

    def towards(self, other: CacheSize, step: int) -> CacheSize:
        """Interpolates between this size (step 0) and `other` (the last step)."""
        return CacheSize(
            {
                window: count + (other.num_pages[window] - count) * step // _STEPS
                for window, count in self.num_pages.items()
            },
            self.num_slots + (other.num_slots - self.num_slots) * step // _STEPS,
        )


@dataclass(frozen=True, slots=True)
class StagePlan:
    layers: range
    num_bytes: int
    """Weights and cache."""


def divide_layers(
    layers: Sequence[LayerSizes],
    first_bytes: int,
    capacities: Sequence[int],
    least: CacheSize,
    most: CacheSize,
) -> tuple[StagePlan, ...] | None:
    """The layers of each device, in the order of `capacities`, which are the bytes that each can give.

    `first_bytes`: bytes of the first stage in addition to its layers. The cache is as large as the tightest stage
    allows, from `least` to `most`. Among the divisions with that cache, the one is chosen whose fullest device is least
    full. None if even `least` does not fit, or if there are fewer layers than devices, counting layers that read each
    other's pages as one.
    """
    inner = _inner([layer.source for layer in layers])

    def filled(cache: CacheSize, share: int) -> tuple[range, ...] | None:
        costs = [cache.bytes_of(layer) for layer in layers]
        return _fill(costs, first_bytes, [capacity * share // _STEPS for capacity in capacities], inner)

    if filled(least, _STEPS) is None:
        return None
    too_large = bisect_left(
        range(1, _STEPS + 1), True, key=lambda step: filled(least.towards(most, step), _STEPS) is None
    )
    cache = least.towards(most, too_large)
    share = bisect_left(range(_STEPS), True, key=lambda share: filled(cache, share) is not None)
    stages = filled(cache, share) or ()
    return tuple(
        StagePlan(stage, sum(cache.bytes_of(layers[index]) for index in stage) + (0 if stage.start else first_bytes))
        for stage in stages
    )


def divide_model(
    architecture: Architecture,
    storage: WeightStorage,
    capacities: Sequence[int],
    *,
    context_tokens: int | None,
    limit_bytes: int | None,
    max_rows: int,
    device_kind: str,
    draft: ModelSizes | None = None,
) -> tuple[StagePlan, ...] | None:
    """`divide_layers` for a model. `limit_bytes`: the most that all stages together should take. `draft`: of its draft
    model, which the first stage has.

    Memory for penalties is counted on the first stage, which draws the tokens. None also if it has no stages.
    """
    if not architecture.has_stages:
        return None
    sizes, layers = ModelSizes.of(architecture, storage, context_tokens), layer_sizes(architecture, storage)
    # Every stage has the tables of its own layers: at most those of the model.
    capacities = [capacity - sizes.table_bytes for capacity in capacities]
    sizes = replace(sizes, table_bytes=0)
    if draft is not None:
        sizes = sizes.with_draft(draft)
        layers[0] = replace(layers[0], page_bytes=layers[0].page_bytes + draft.page_bytes)
    penalties = penalty_bytes(max_rows + 1, sizes.vocab, sizes.context_tokens)
    have_bytes = sum(capacities) - penalties
    if limit_bytes is not None:
        have_bytes = min(have_bytes, limit_bytes)
    whole = plan_memory(sizes, have_bytes, max_rows=max_rows, device_kind=device_kind)
    least = CacheSize(dict.fromkeys(whole.num_pages, MIN_PAGES), MIN_SLOTS)
    most = CacheSize(
        {window: max(MIN_PAGES, count) for window, count in whole.num_pages.items()},
        max(MIN_SLOTS, whole.slots.num_slots),
    )
    first_bytes = end_bytes(architecture, storage) + tower_bytes(architecture, storage) + penalties
    first_bytes += 0 if draft is None else draft.weight_bytes + draft.table_bytes
    return divide_layers(layers, first_bytes, capacities, least, most)


def most_stages(architecture: Architecture) -> int:
    """The maximum number of stages of a model, regardless of memory."""
    sources = _sources(architecture)
    return len(sources) - len(_inner(sources)) if architecture.has_stages else 1


def layer_sizes(architecture: Architecture, storage: WeightStorage) -> list[LayerSizes]:
    kv_item_bytes = storage.kv_item_bytes or storage.item_bytes
    sources = _sources(architecture)
    found = []
    for index, weight_bytes in enumerate(layer_bytes(architecture, storage)):
        layer = architecture.staged(range(index, index + 1))
        page_bytes = PAGE_TOKENS * kv_bytes_per_token(layer, kv_item_bytes)
        mixer = architecture.layers[index].mixer
        window = mixer.window if isinstance(mixer, AttentionConfig) else None
        slot_bytes = state_bytes(layer, storage.item_bytes)
        found.append(LayerSizes(weight_bytes, page_bytes, slot_bytes, window, sources[index]))
    return found


def _sources(architecture: Architecture) -> list[int | None]:
    """For each layer, the earlier one that must be in the same stage; None: there is none."""
    num_deep = 0 if architecture.tower is None else len(architecture.tower.deep_layers)
    mixers = [layer.mixer for layer in architecture.layers]
    sources = [mixer.source if isinstance(mixer, AttentionConfig) else None for mixer in mixers]
    # The first stage has the vectors of pictures that are added to the first layers.
    return [0 if 0 < index < num_deep else source for index, source in enumerate(sources)]


def _inner(sources: Sequence[int | None]) -> frozenset[int]:
    """The layers with which no stage may begin."""
    return frozenset(
        stop for index, source in enumerate(sources) if source is not None for stop in range(source + 1, index + 1)
    )


def _fill(
    costs: Sequence[int], first_bytes: int, capacities: Sequence[int], inner: Collection[int] = ()
) -> tuple[range, ...] | None:
    """Any division in which every device has room for its layers, at least one; None if none exists. No stage begins
    with one of the layers `inner`."""
    totals = [0, *accumulate(costs)]
    starts: list[int] = [0]
    """Where the next stage can begin, in order."""
    begins: list[dict[int, int]] = []
    """For each stage: where it can end → where it begins then."""
    for number, capacity in enumerate(capacities):
        free_bytes = capacity if number else capacity - first_bytes
        ends: dict[int, int] = {}
        latest = 0
        for start in starts:
            farthest = bisect_right(totals, totals[start] + free_bytes) - 1
            ends |= {stop: start for stop in range(max(start, latest) + 1, farthest + 1) if stop not in inner}
            latest = max(latest, farthest)
        begins.append(ends)
        starts = list(ends)
    stages: list[range] = []
    stop = len(costs)
    for ends in reversed(begins):
        if stop not in ends:
            return None
        stages.append(range(ends[stop], stop))
        stop = ends[stop]
    return tuple(reversed(stages))
