"""How memory is divided among KV groups, for models with and without windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cortex.neuron.engine.kv.page_groups import Window, window_pages
from cortex.neuron.engine.memory.plan import (
    CACHED_CONTEXTS,
    PAGE_TOKENS,
    UNLIMITED,
    ModelSizes,
    plan_memory,
    plan_with_graphs,
)
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.models.sizes import WeightStorage, kv_bytes_by_window

from ...tiny_models import tiny_sizes

GB = 10**9
LONG = 131_072
LARGE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 150_000,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": LONG,
}
WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 6,
}
ALL_WINDOWED = WINDOWED | {"layer_types": ["sliding_attention"] * 36}


def sizes_of(changes: dict[str, Any]) -> ModelSizes:
    """Without the tables of positions, of which the last test is."""
    return replace(ModelSizes.of(read_architecture(LARGE | changes), WeightStorage(2)), table_bytes=0)


@pytest.mark.parametrize("kv_gb", [2, 8, 40])
def test_windows_leave_more_memory_to_the_layers_without(kv_gb: int) -> None:
    plain, windowed = sizes_of({}), sizes_of(WINDOWED)
    have_bytes = plain.weight_bytes + kv_gb * GB
    before = plan_memory(plain, have_bytes, max_rows=64, device_kind="cuda")
    after = plan_memory(windowed, have_bytes, max_rows=64, device_kind="cuda")
    assert after.num_bytes <= have_bytes
    assert after.num_pages[None] > 2 * before.num_pages[None]
    assert after.context_tokens >= min(LONG, 2 * before.context_tokens)
    rows = (after.num_pages[1024] - 1) // window_pages(1024, PAGE_TOKENS)
    assert rows >= min(64, (before.num_pages[None] - 1) // window_pages(1024, PAGE_TOKENS) // 2)


def test_windows_of_all_rows_and_a_step_are_enough() -> None:
    plan = plan_memory(sizes_of(WINDOWED), 500 * GB, max_rows=16, device_kind="cuda")
    assert plan.num_pages[1024] == 2 * 16 * window_pages(1024, PAGE_TOKENS) + 16_384 // PAGE_TOKENS


def test_window_that_fits_does_not_limit_the_context() -> None:
    sizes = sizes_of(ALL_WINDOWED)
    page_bytes = sizes.group_bytes[1024]
    needed = window_pages(1024, PAGE_TOKENS) + 1
    plans = [
        plan_memory(sizes, sizes.weight_bytes + count * page_bytes, max_rows=4, device_kind="cuda")
        for count in (needed, needed - 1)
    ]
    assert [plan.num_pages for plan in plans] == [{1024: needed}, {1024: needed - 1}]
    assert [plan.context_tokens for plan in plans] == [LONG, (needed - 2) * PAGE_TOKENS]


def test_least_memory_gives_every_group_the_same_pages() -> None:
    sizes = sizes_of(WINDOWED)
    plan = plan_memory(sizes, sizes.weight_bytes + 9 * sizes.page_bytes, max_rows=64, device_kind="cuda")
    assert plan.fits
    assert plan.num_pages == {None: 9, 1024: 9}
    assert not plan_memory(sizes, sizes.weight_bytes + sizes.page_bytes, max_rows=64, device_kind="cuda").fits
    assert not plan_memory(sizes, sizes.weight_bytes - 1, max_rows=64, device_kind="cuda").fits


def test_group_on_a_cpu_gets_at_most_a_few_contexts() -> None:
    plan = plan_memory(sizes_of(WINDOWED | {"max_position_embeddings": 4096}), 500 * GB, max_rows=4, device_kind="cpu")
    assert plan.num_pages[None] == CACHED_CONTEXTS * 4096 // PAGE_TOKENS + 1
    assert plan.num_pages[1024] < plan.num_pages[None]


def test_ceiling_counts_windows_less_than_full_layers() -> None:
    plain, windowed = sizes_of({}).ceiling_bytes, sizes_of(WINDOWED).ceiling_bytes
    assert windowed < plain
    plan = plan_memory(sizes_of(WINDOWED), windowed, max_rows=64, device_kind="cuda")
    assert plan.context_tokens == LONG


@pytest.mark.parametrize(("stage", "absent"), [(range(5), None), (range(5, 6), 1024)])
def test_stage_without_a_group_leaves_its_size_to_the_others(stage: range, absent: Window) -> None:
    sizes = ModelSizes.of(read_architecture(LARGE | WINDOWED).staged(stage), WeightStorage(2))
    plan = plan_memory(sizes, sizes.weight_bytes + GB, max_rows=4, device_kind="cuda")
    assert list(plan.num_pages) == [None, 1024]
    assert plan.num_pages[absent] == UNLIMITED
    agreed = plan.limited(sizes, {None: 100, 1024: 50}, 4, 0)
    fixed_bytes = sizes.fixed_bytes(agreed.context_tokens)
    assert agreed.num_bytes == fixed_bytes + sizes.bytes_of({None: 100, 1024: 50}) < plan.num_bytes


def test_bytes_of_a_group_follow_the_heads_of_its_layers() -> None:
    config = tiny_sizes(num_hidden_layers=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512)
    layers = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    changes = {"use_sliding_window": True, "sliding_window": 40, "layer_types": layers}
    architecture = read_architecture({"model_type": "qwen3", **config, **changes})
    assert architecture.windows == (None, 40)
    assert kv_bytes_by_window(architecture, 2) == {None: 2 * 2 * 16 * 2, 40: 3 * 2 * 2 * 16 * 2}


def test_tables_of_positions_are_counted_for_the_context_that_fits() -> None:
    plain = sizes_of({})
    sizes = ModelSizes.of(read_architecture(LARGE), WeightStorage(2))
    assert sizes.table_bytes == sizes.context_tokens * 4 * LARGE["head_dim"]
    enough = 4 * sizes.ceiling_bytes
    pages = [plan_memory(each, enough, max_rows=4, device_kind="cuda").num_pages[None] for each in (plain, sizes)]
    assert pages[0] - pages[1] == pytest.approx(sizes.table_bytes / sizes.page_bytes, abs=1)
    have = sizes.weight_bytes + 20 * sizes.page_bytes
    plan = plan_memory(sizes, have, max_rows=4, device_kind="cuda")
    assert plan.fits
    assert plan.context_tokens == (plan.num_pages[None] - 1) * PAGE_TOKENS
    assert plan.num_bytes <= have


def test_graphs_of_prompts_get_room_only_where_the_model_fits_beside_it() -> None:
    sizes = sizes_of({})
    least_bytes = sizes.weight_bytes + 2 * sizes.page_bytes
    room_bytes = 2 * 2048 * sizes.token_room
    for spare_bytes, limit_bytes, kind, expected in (
        (room_bytes, None, "cuda", 2048),
        (room_bytes - 1, None, "cuda", 0),
        (room_bytes, least_bytes, "cuda", 2048),
        (0, None, "cpu", 2048),
    ):
        plan = plan_with_graphs(sizes, least_bytes + spare_bytes, limit_bytes, 2048, max_rows=1, device_kind=kind)
        assert plan.fits
        assert plan.graph_tokens == expected
    assert not plan_with_graphs(sizes, least_bytes - 1, None, 2048, max_rows=1, device_kind="cuda").fits


@pytest.mark.parametrize(
    ("pages", "wanted_tokens", "graph_tokens"),
    [
        (2, 0, 2048),  # nothing is wanted but graphs
        (600, 16_384, 2048),
        (500, 16_384, 0),  # with graphs it would have less than is wanted
        (400, 16_384, 0),  # it has less anyway, and with graphs a good part less again
        (3000, LONG, 2048),  # much less than is wanted, and hardly less with graphs
        (4000, 2 * LONG, 2048),
    ],
)
def test_graphs_give_way_to_the_wanted_context(pages: int, wanted_tokens: int, graph_tokens: int) -> None:
    """`pages`: those that there would be room for next to graphs, which take 100 of them."""
    sizes = replace(sizes_of({}), token_room=0)
    sizes = replace(sizes, token_room=100 * sizes.page_bytes // (2 * 2048))
    have_bytes = sizes.weight_bytes + (pages + 100) * sizes.page_bytes
    plan = plan_with_graphs(sizes, have_bytes, None, 2048, max_rows=1, device_kind="cuda", wanted_tokens=wanted_tokens)
    assert plan.graph_tokens == graph_tokens
    assert plan.num_pages[None] == pages + (0 if graph_tokens else 100)
