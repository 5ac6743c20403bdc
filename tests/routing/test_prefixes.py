from __future__ import annotations

from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.routing.prefixes import BYTES_PER_TOKEN, EDGES, MAX_PREFIX_BYTES, CachedPrefix, PrefixRecord, leading_blocks

LONG = bytes(range(256)) * 400


def test_blocks_of_a_longer_prompt_begin_with_those_of_the_shorter() -> None:
    assert leading_blocks(b"short") == ()
    shorter, longer = leading_blocks(LONG[:50_000]), leading_blocks(LONG)
    assert 0 < len(shorter) < len(longer)
    assert longer[: len(shorter)] == shorter


def test_difference_at_the_start_changes_every_block() -> None:
    assert not set(leading_blocks(LONG)) & set(leading_blocks(b"!" + LONG[1:]))


def test_megabytes_take_a_few_hundred_blocks() -> None:
    assert len(leading_blocks(b"x" * (MAX_PREFIX_BYTES + 9))) == len(EDGES) - 1 < 500


@given(st.integers(1024, 300_000))
def test_prefix_is_known_to_a_few_per_cent(num_bytes: int) -> None:
    prompt = (LONG * 3)[:num_bytes]
    prefixes = PrefixRecord()
    prefixes.record(leading_blocks(prompt), "a")
    known = prefixes.cached(leading_blocks(prompt + b"more"), "a").device_tokens * BYTES_PER_TOKEN
    assert num_bytes - max(256, 0.02 * num_bytes) - BYTES_PER_TOKEN <= known <= num_bytes


@pytest.mark.parametrize("shared", [8_000, 60_000, 250_000])
def test_tells_conversations_behind_one_long_system_prompt_apart(shared: int) -> None:
    system = (LONG * 3)[:shared]
    first, second = system + b"a" * 8_000, system + b"b" * 8_000
    prefixes = PrefixRecord()
    prefixes.record(leading_blocks(first), "a")
    prefixes.record(leading_blocks(second), "b")
    blocks = leading_blocks(first + b"the next turn")
    assert sum(prefixes.cached(blocks, "a")) - sum(prefixes.cached(blocks, "b")) > 500


def test_record_is_bounded_for_each_place_and_keeps_recent_prefixes_from_their_start() -> None:
    prefixes = PrefixRecord(max_blocks_per_place=25)
    prompts = [leading_blocks(bytes([number]) * 2560) for number in range(50)]
    for blocks in prompts:
        prefixes.record(blocks, "a")
    prefixes.record(prompts[0], "b")
    assert len(prefixes) == 25 + 10
    cached = [prefixes.cached(blocks, "a").device_tokens for blocks in prompts]
    assert cached[-3:] == [5 * 256 // BYTES_PER_TOKEN, 640, 640]
    assert not any(cached[:-3])


def test_forgets_one_place_only() -> None:
    prefixes = PrefixRecord()
    blocks = leading_blocks(LONG)
    prefixes.record(blocks, "a")
    prefixes.record(blocks, "b")
    prefixes.forget("a")
    assert prefixes.cached(blocks, "a") == CachedPrefix()
    assert prefixes.cached(blocks, "b").device_tokens > 0


TOKENS = 5000
"""A prompt of about 20,000 bytes has these."""


def recorded(*prompts: bytes) -> PrefixRecord:
    prefixes = PrefixRecord()
    for prompt in prompts:
        prefixes.record(leading_blocks(prompt), "a")
    return prefixes


def in_thousands(prefixes: PrefixRecord, prompt: bytes) -> tuple[int, int]:
    cached = prefixes.cached(leading_blocks(prompt), "a")
    return round(cached.device_tokens / 1000), round(cached.host_tokens / 1000)


OLD, NEW = b"old " * TOKENS, b"new " * TOKENS


@pytest.mark.parametrize(
    ("device_tokens", "host_tokens", "old", "new"),
    [
        pytest.param(None, None, (5, 0), (5, 0), id="nothing is known"),
        pytest.param(20_000, 0, (5, 0), (5, 0), id="all are on the device"),
        pytest.param(5_000, 20_000, (0, 5), (5, 0), id="the older one has left the device for the host"),
        pytest.param(5_000, None, (0, 5), (5, 0), id="how much the host holds is not known"),
        pytest.param(5_000, 0, (0, 0), (5, 0), id="the older one is gone"),
        pytest.param(5_000, 2_000, (0, 2), (5, 0), id="the end of the older one is gone"),
        pytest.param(0, 20_000, (0, 5), (0, 5), id="both have left"),
        pytest.param(0, 5_000, (0, 0), (0, 5), id="both have left, and the host holds the newer one"),
        pytest.param(0, 0, (0, 0), (0, 0), id="both are gone"),
        pytest.param(7_000, 20_000, (2, 3), (5, 0), id="the end of the older one is in host memory"),
    ],
)
def test_most_recent_prefixes_are_on_the_device_and_earlier_ones_in_host_memory(
    device_tokens: int | None, host_tokens: int | None, old: tuple[int, int], new: tuple[int, int]
) -> None:
    prefixes = recorded(OLD, NEW)
    prefixes.limit("a", device_tokens, host_tokens)
    assert (in_thousands(prefixes, OLD), in_thousands(prefixes, NEW)) == (old, new)
    assert ("a" in prefixes) == (old != (0, 0) or new != (0, 0))


def test_prefix_that_is_used_again_is_on_the_device_again() -> None:
    prefixes = recorded(OLD)
    prefixes.moved_to_host("a")
    prefixes.moved_to_host("unknown")
    assert in_thousands(prefixes, OLD) == (0, 5)
    half = leading_blocks(OLD)[: len(leading_blocks(OLD)) // 2]
    prefixes.record(half, "a")
    device, host = prefixes.cached(leading_blocks(OLD), "a")
    assert device == EDGES[len(half)] // BYTES_PER_TOKEN
    assert device + host == pytest.approx(TOKENS, rel=0.05)
    prefixes.limit("a", None, 0)
    assert prefixes.cached(leading_blocks(OLD), "a") == (device, 0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("record"), st.integers(0, 3), st.integers(1, 12)),
            st.tuples(st.just("limit"), st.integers(0, 4000), st.integers(0, 4000)),
            st.tuples(st.just("move"), st.just(0), st.just(0)),
        ),
        max_size=25,
    )
)
def test_no_more_is_cached_than_a_place_reports_to_hold(events: list[tuple[str, int, int]]) -> None:
    prompts = [leading_blocks(bytes([number]) * 4096) for number in range(4)]
    prefixes = PrefixRecord(max_blocks_per_place=30)
    for kind, one, other in events:
        if kind == "record":
            prefixes.record(prompts[one][:other], "a")
            assert prefixes.cached(prompts[one][:other], "a") == (
                EDGES[len(prompts[one][:other])] // BYTES_PER_TOKEN,
                0,
            )
        elif kind == "move":
            prefixes.moved_to_host("a")
            assert not any(prefixes.cached(prompt, "a").device_tokens for prompt in prompts)
        else:
            prefixes.limit("a", one, other)
            found = [prefixes.cached(prompt, "a") for prompt in prompts]
            assert sum(each.device_tokens for each in found) <= one
            assert sum(each.host_tokens for each in found) <= other
        assert len(prefixes) <= 30


PROMPTS = [leading_blocks(bytes([0] * shared + [number] * 2560)) for number in range(3) for shared in (0, 1024, 2048)]
used = st.tuples(st.sampled_from(PROMPTS), st.integers(1, 16)).map(lambda each: each[0][: each[1]])
limits = st.tuples(st.just("limit"), st.integers(0, 3000), st.integers(0, 3000))


def counted(prefixes: PrefixRecord, prompt: tuple[int, ...]) -> tuple[int, int]:
    """What `cached` finds, by a look at every block."""
    seen = prefixes._places["a"]  # noqa: SLF001 - compared with what it has
    known = list(takewhile(lambda block: block in seen.device or block in seen.host, prompt))
    host_bytes = sum(EDGES[number + 1] - EDGES[number] for number, block in enumerate(known) if block in seen.host)
    return (EDGES[len(known)] - host_bytes) // BYTES_PER_TOKEN, host_bytes // BYTES_PER_TOKEN


@given(st.lists(st.one_of(used, st.just(None), limits), max_size=12))
def test_bisection_finds_what_a_look_at_every_block_would(events: list[Any]) -> None:
    """None: the model left the device."""
    prefixes = PrefixRecord(max_blocks_per_place=20)
    for event in events:
        match event:
            case None:
                prefixes.moved_to_host("a")
            case ("limit", device_tokens, host_tokens):
                prefixes.limit("a", device_tokens, host_tokens)
            case blocks:
                prefixes.record(blocks, "a")
        if "a" in prefixes:
            assert [prefixes.cached(prompt, "a") for prompt in PROMPTS] == [counted(prefixes, each) for each in PROMPTS]
