from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.routing.prefixes import BYTES_PER_TOKEN, EDGES, HOST_WORTH, MAX_PREFIX_BYTES, PrefixRecord, leading_blocks

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
    known = prefixes.num_cached_tokens(leading_blocks(prompt + b"more"), "a") * BYTES_PER_TOKEN
    assert num_bytes - max(256, 0.02 * num_bytes) - BYTES_PER_TOKEN <= known <= num_bytes


@pytest.mark.parametrize("shared", [8_000, 60_000, 250_000])
def test_tells_conversations_behind_one_long_system_prompt_apart(shared: int) -> None:
    system = (LONG * 3)[:shared]
    first, second = system + b"a" * 8_000, system + b"b" * 8_000
    prefixes = PrefixRecord()
    prefixes.record(leading_blocks(first), "a")
    prefixes.record(leading_blocks(second), "b")
    blocks = leading_blocks(first + b"the next turn")
    assert prefixes.num_cached_tokens(blocks, "a") - prefixes.num_cached_tokens(blocks, "b") > 500


def test_record_is_bounded_for_each_place_and_keeps_recent_prefixes_from_their_start() -> None:
    prefixes = PrefixRecord(max_blocks_per_place=25)
    prompts = [leading_blocks(bytes([number]) * 2560) for number in range(50)]
    for blocks in prompts:
        prefixes.record(blocks, "a")
    prefixes.record(prompts[0], "b")
    assert len(prefixes) == 25 + 10
    cached = [prefixes.num_cached_tokens(blocks, "a") for blocks in prompts]
    assert cached[-3:] == [5 * 256 // BYTES_PER_TOKEN, 640, 640]
    assert not any(cached[:-3])


def test_forgets_one_place_only() -> None:
    prefixes = PrefixRecord()
    blocks = leading_blocks(LONG)
    prefixes.record(blocks, "a")
    prefixes.record(blocks, "b")
    prefixes.forget("a")
    assert prefixes.num_cached_tokens(blocks, "a") == 0
    assert prefixes.num_cached_tokens(blocks, "b") > 0


def test_prefix_in_host_memory_is_worth_less_than_on_the_device_and_more_than_none() -> None:
    prefixes = PrefixRecord()
    blocks = leading_blocks(LONG)
    for place in ("device", "host", "both"):
        prefixes.record(blocks, place)
    prefixes.moved_to_host("host")
    prefixes.moved_to_host("both")
    prefixes.record(blocks[: len(blocks) // 2], "both")
    prefixes.moved_to_host("unknown")
    tokens = [prefixes.num_cached_tokens(blocks, place) for place in ("device", "both", "host", "unknown")]
    assert tokens == sorted(tokens, reverse=True)
    assert len(set(tokens)) == 4
    assert tokens[2] == pytest.approx(tokens[0] * HOST_WORTH, abs=1)


PROMPTS = [leading_blocks(bytes([0] * shared + [number] * 2560)) for number in range(3) for shared in (0, 1024, 2048)]
recorded = st.tuples(st.sampled_from(PROMPTS), st.integers(1, 16)).map(lambda each: each[0][: each[1]])


@given(st.lists(st.one_of(recorded, st.just(None)), max_size=12), st.sampled_from(PROMPTS))
def test_counts_what_a_look_at_every_block_would_find(
    events: list[tuple[int, ...] | None], prompt: tuple[int, ...]
) -> None:
    """None: the model left the device."""
    prefixes, every = PrefixRecord(max_blocks_per_place=20), OrderedDict[int, bool]()
    for blocks in events:
        if blocks is None:
            prefixes.moved_to_host("a")
            every = OrderedDict.fromkeys(every, False)
            continue
        prefixes.record(blocks, "a")
        for block in reversed(blocks):
            every[block] = True
            every.move_to_end(block)
        while len(every) > 20:
            every.popitem(last=False)
    num_known = len(list(takewhile(every.__contains__, prompt)))
    num_on_device = len(list(takewhile(every.get, prompt)))
    num_bytes = EDGES[num_on_device] + HOST_WORTH * (EDGES[num_known] - EDGES[num_on_device])
    assert prefixes.num_cached_tokens(prompt, "a") == int(num_bytes) // BYTES_PER_TOKEN
