"""What contexts take, between the sizes that a node reports, and which of them are tried."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.wire.node.contexts import ContextSize, ContextSizes, tolerated, tried, wanted

MIB = 1 << 20


def sizes_of(*points: tuple[int, int], full: int | None = None) -> ContextSizes:
    sizes = tuple(ContextSize(tokens=tokens, num_bytes=num_bytes) for tokens, num_bytes in points)
    full = full or points[-1][0]
    return ContextSizes(
        limit_tokens=full,
        full_tokens=full,
        wanted_tokens=wanted(full, None),
        empty_tokens=full,
        full_bytes=4 * points[-1][1],
        sizes=sizes,
    )


SIZES = sizes_of((256, 100 * MIB), (32_768, 612 * MIB), (131_072, 2148 * MIB))


@pytest.mark.parametrize(
    ("tokens", "megabytes"), [(1, 100), (256, 100), (32_768, 612), (131_072, 2148), (81_920, 1380), (229_376, 3684)]
)
def test_bytes_grow_evenly_between_sizes_and_beyond_them(tokens: int, megabytes: int) -> None:
    assert SIZES.bytes_for(tokens) == megabytes * MIB


@pytest.mark.parametrize(
    ("megabytes", "tokens"), [(99, 0), (100, 256), (612, 32_768), (1380, 81_920), (2148, 131_072), (9000, 131_072)]
)
def test_context_is_what_fits_and_no_more_than_the_full_one(megabytes: int, tokens: int) -> None:
    assert SIZES.tokens_in(megabytes * MIB) == tokens


@given(
    st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(0, 1 << 40)), min_size=1, max_size=4),
    st.integers(1, 1 << 20),
)
def test_context_fits_in_the_bytes_that_it_needs(steps: list[tuple[int, int]], tokens: int) -> None:
    points, at_tokens, at_bytes = [], 0, 0
    for more_tokens, more_bytes in steps:
        at_tokens, at_bytes = at_tokens + more_tokens, at_bytes + more_bytes
        points.append((at_tokens, at_bytes))
    sizes = sizes_of(*points)
    assert sizes.tokens_in(sizes.bytes_for(tokens)) >= min(tokens, sizes.full_tokens)


def test_model_without_a_cache_has_its_full_context_in_its_least_memory() -> None:
    only = sizes_of((256, 100), (8192, 100))
    assert (only.tokens_in(100), only.tokens_in(99), only.bytes_for(8192)) == (8192, 0, 100)
    assert sizes_of((8192, 100)).tokens_in(100) == 8192


def test_named_context_is_wanted_whole_and_has_a_smaller_footprint() -> None:
    named = SIZES.named(8192)
    assert (named.full_tokens, named.wanted_tokens) == (8192, 8192)
    assert named.full_bytes == 100 * MIB + (4 * 2148 - 100) * MIB // 16
    assert named.bytes_for(8192) == SIZES.bytes_for(8192)
    assert SIZES.named(200_000) == SIZES.named(131_072), "the model has no more"
    assert named.is_short(8191)
    assert not named.is_short(8192)
    assert SIZES.is_short(32_767)
    assert not SIZES.is_short(32_768)


def test_context_is_no_longer_than_on_empty_devices() -> None:
    limited = msgspec.structs.replace(SIZES, empty_tokens=20_000)
    assert limited.tokens_in(9000 * MIB) == 20_000
    assert limited.named(8192).tokens_in(9000 * MIB) == 8192
    assert limited.named(65_536).tokens_in(9000 * MIB) == 20_000
    assert SIZES.named(65_536).tokens_in(9000 * MIB) == 65_536


def test_parts_have_the_same_contexts_in_fewer_bytes() -> None:
    part = SIZES.part_of(4)
    assert part.tokens_in(153 * MIB) == 32_768
    assert part.full_bytes == 2148 * MIB


@pytest.mark.parametrize(
    ("full", "least", "expected"),
    [
        (131_072, 32_768, [131_072, 65_536, 32_768, 16_384, 8192, 4096, 2048, 1024]),
        (40_960, 32_768, [40_960, 32_768, 16_384, 8192, 4096, 2048, 1024]),
        (8192, 8192, [8192, 4096, 2048, 1024]),
        (512, 512, [512]),
        (100, 100, [100]),
    ],
)
def test_halves_of_a_context_are_tried_and_the_wanted_one_is_among_them(
    full: int, least: int, expected: list[int]
) -> None:
    assert list(tried(full, least)) == expected


def test_wanted_context_is_the_named_one_or_what_agents_need() -> None:
    assert wanted(131_072, None) == 32_768
    assert wanted(8192, None) == 8192
    assert wanted(131_072, 100_000) == 100_000
    assert wanted(8192, 100_000) == 8192


def test_slightly_less_than_decided_is_tolerated() -> None:
    assert (tolerated(32_768), tolerated(8), tolerated(0)) == (30_720, 8, 1)
