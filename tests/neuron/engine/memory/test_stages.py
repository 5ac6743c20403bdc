"""The division of layers by memory: examples with known numbers, and properties against all divisions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from cortex.neuron.engine.memory.plan import ModelSizes, penalty_bytes
from cortex.neuron.engine.memory.stages import (
    CacheSize,
    LayerSizes,
    StagePlan,
    divide_layers,
    divide_model,
    layer_sizes,
)
from cortex.neuron.kernels.quantised import layout as layouts
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.models.sizes import WeightStorage

from ...tiny_models import tiny_delta, tiny_sizes

GB = 10**9
LAYER = LayerSizes(weight_bytes=400_000_000, page_bytes=100_000)
NOTHING = CacheSize({None: 0})


@pytest.mark.parametrize(
    ("num_layers", "first_bytes", "capacities", "expected"),
    [
        (60, 0, (24 * GB, 24 * GB), (30, 30)),
        (60, 0, (24 * GB, 12 * GB), (40, 20)),
        (60, 0, (12 * GB, 24 * GB), (20, 40)),
        (60, 3 * GB, (24 * GB, 24 * GB), (26, 34)),  # embedding and head take the place of layers
        (60, 0, (12 * GB, 24 * GB, 12 * GB), (15, 30, 15)),
        (3, 0, (24 * GB, 24 * GB, 24 * GB), (1, 1, 1)),
        (2, 0, (24 * GB, 24 * GB, 24 * GB), None),  # fewer layers than devices
        (60, 0, (12 * GB, 11 * GB), None),
        (60, 13 * GB, (12 * GB, 24 * GB), None),  # the first device has no room for embedding and head
    ],
)
def test_layers_are_divided_in_proportion_to_memory(
    num_layers: int, first_bytes: int, capacities: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    plans = divide_layers([LAYER] * num_layers, first_bytes, capacities, NOTHING, NOTHING)
    assert (None if plans is None else tuple(len(plan.layers) for plan in plans)) == expected


def test_cache_is_as_large_as_the_tightest_stage_allows() -> None:
    """Two layers of 10 bytes and 1 byte a page on devices of 20 and 50 bytes."""
    layer = LayerSizes(10, page_bytes=1)
    plans = divide_layers([layer, layer], 0, (20, 50), CacheSize({None: 2}), CacheSize({None: 1026}))
    assert plans is not None
    assert [plan.num_bytes for plan in plans] == [20, 20]


def test_recurrent_layers_count_with_their_states() -> None:
    recurrent, attention = LayerSizes(10, slot_bytes=10), LayerSizes(10, page_bytes=1)
    cache = CacheSize({None: 10}, 4)
    plans = divide_layers([recurrent, recurrent, attention, attention], 0, (60, 90), cache, cache)
    assert plans is not None
    assert [(plan.layers, plan.num_bytes) for plan in plans] == [(range(1), 50), (range(1, 4), 90)]


def all_divisions(num_layers: int, num_stages: int) -> Iterator[list[range]]:
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *cuts, num_layers)
        yield [range(*pair) for pair in pairwise(bounds)]


@pytest.mark.parametrize("seed", range(80))
def test_no_other_division_has_a_larger_cache_or_a_less_full_device(seed: int) -> None:
    pick = random.Random(seed)
    layers = [
        LayerSizes(pick.randint(10, 100), pick.choice((0, 1, 3)), pick.choice((0, 5)))
        for _ in range(pick.randint(2, 8))
    ]
    if seed % 2:  # the last layers read the pages of one before them
        source = pick.randrange(len(layers) - 1)
        layers[source + 1 :] = [replace(layer, page_bytes=0, source=source) for layer in layers[source + 1 :]]
    num_stages = pick.randint(1, min(4, len(layers)))
    first_bytes = pick.choice((0, 50, 150))
    capacities = [pick.randint(50, 900) for _ in range(num_stages)]
    least, most = CacheSize({None: 2}, 2), CacheSize({None: pick.randint(2, 100)}, pick.randint(2, 20))

    def used(division: list[range], cache: CacheSize) -> list[int]:
        return [
            sum(cache.bytes_of(layers[index]) for index in stage) + (0 if stage.start else first_bytes)
            for stage in division
        ]

    def fits(cache: CacheSize) -> list[list[range]]:
        return [
            division
            for division in all_divisions(len(layers), num_stages)
            if all(layers[index].source in (None, *stage) for stage in division for index in stage)
            and all(a <= b for a, b in zip(used(division, cache), capacities, strict=True))
        ]

    plans = divide_layers(layers, first_bytes, capacities, least, most)
    assert (plans is None) == (not fits(least))
    if plans is None:
        return
    chosen = [plan.layers for plan in plans]
    assert [index for stage in chosen for index in stage] == list(range(len(layers)))
    assert all(plan.num_bytes <= capacity for plan, capacity in zip(plans, capacities, strict=True))
    largest = next(step for step in range(1024, -1, -1) if fits(least.towards(most, step)))
    cache = least.towards(most, largest)
    assert [plan.num_bytes for plan in plans] == used(chosen, cache)

    def fullest(division: list[range]) -> float:
        return max(a / b for a, b in zip(used(division, cache), capacities, strict=True))

    assert fullest(chosen) <= min(map(fullest, fits(cache))) + 1 / 50  # shares are tried in steps, in whole bytes


CONFIG = {
    "model_type": "qwen3_next",
    **tiny_sizes(vocab_size=1000, intermediate_size=128, num_hidden_layers=8, max_position_embeddings=512, head_dim=32),
    **tiny_delta(),
}


def divided(
    capacities: tuple[int, ...], storage: WeightStorage | None = None, **changes: Any
) -> tuple[StagePlan, ...] | None:
    architecture = read_architecture(CONFIG | changes)
    storage = storage or WeightStorage(2)
    return divide_model(
        architecture,
        storage,
        capacities,
        context_tokens=None,
        limit_bytes=None,
        max_rows=4,
        device_kind="cuda",
    )


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"model_type": "qwen3"}])
def test_sizes_of_layers_and_ends_are_those_of_the_model(changes: dict[str, Any]) -> None:
    architecture, storage = read_architecture(CONFIG | changes), WeightStorage(2)
    whole = ModelSizes.of(architecture, storage)
    layers = layer_sizes(architecture, storage)
    first, rest = (ModelSizes.of(architecture.staged(stage), storage) for stage in (range(3), range(3, 8)))
    assert first.weight_bytes + rest.weight_bytes == whole.weight_bytes
    assert rest.weight_bytes == sum(layer.weight_bytes for layer in layers[3:])
    assert whole.page_bytes == sum(layer.page_bytes for layer in layers) == first.page_bytes + rest.page_bytes
    assert whole.slot_bytes == sum(layer.slot_bytes for layer in layers)


def test_stages_of_a_model_fit_with_penalties_on_the_first() -> None:
    capacities = (2_000_000, 1_200_000)
    plans = divided(capacities)
    assert plans is not None
    assert plans[0].num_bytes > penalty_bytes(5, 1000, 512)
    assert all(plan.num_bytes <= capacity for plan, capacity in zip(plans, capacities, strict=True))
    assert divided((700_000, 1_200_000)) is not None
    assert divided((200_000, 1_200_000)) is None  # no room for embedding, head and a layer


def test_layers_that_read_the_pages_of_others_are_in_their_stage() -> None:
    """The last 4 of 8 layers read the pages of the third and the fourth."""
    types = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full") * 2]
    own: dict[str, Any] = {"layer_types": types, "sliding_window": 64, "num_kv_shared_layers": 4, "global_head_dim": 32}
    capacities = (10_000_000, 2_000_000)
    for changes, expected in ((own, 2), (own | {"num_kv_shared_layers": 0}, 7)):
        plans = divided(capacities, model_type="gemma4_unified_text", tie_word_embeddings=True, **changes)
        assert plans is not None
        assert len(plans[0].layers) == expected


def test_tied_embedding_and_quantised_weights_leave_more_layers_to_the_first_stage() -> None:
    capacities = (2_500_000, 2_500_000)
    dense: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 4000, "num_hidden_layers": 24}
    packing = {"model.embed_tokens.weight": layouts.Q4, "lm_head.weight": layouts.Q4}

    def first(plans: tuple[StagePlan, ...] | None) -> int:
        assert plans is not None
        return len(plans[0].layers)

    plain = first(divided(capacities, **dense))
    assert first(divided(capacities, **dense, tie_word_embeddings=True)) > plain
    assert first(divided(capacities, WeightStorage(2, packing=packing), **dense)) > plain
