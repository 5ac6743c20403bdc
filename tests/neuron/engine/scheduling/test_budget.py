"""The prefill tokens of a step, and their shares: all of the budget is used, and nobody with a smaller share needs
more."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.roofline.step_costs import StepCosts, StepShape
from cortex.neuron.engine.roofline.step_work import DeviceLimits, StepWork
from cortex.neuron.engine.scheduling.budget import (
    LEAST_TOKENS,
    READS_PER_STEP,
    STREAM_SHARE,
    Flow,
    PrefillShares,
    Prompt,
    SchedulerLimits,
    StepShares,
    fair_shares,
    turns,
)
from cortex.system.fair_turns import FLEX, PRIORITY

NONE: Mapping[int, tuple[int, ...]] = {}
MIXED_SIZES = {48: (16, 64, 80, 208, 336, 464, 592, 720, 976), 256: (16, 64, 128, 256, 384, 512, 768, 1024)}

FLOWS = [Flow(name) for name in "abcdefgh"]
A, B, C, *_ = FLOWS
NEEDED = st.dictionaries(st.sampled_from(FLOWS), st.integers(1, 5000), max_size=8)


@pytest.mark.parametrize(
    ("budget", "needed", "expected"),
    [
        (512, {}, {}),
        (512, {A: 9000}, {A: 512}),
        (512, {A: 9000, B: 9000}, {A: 256, B: 256}),
        (512, {A: 9000, B: 100}, {A: 412, B: 100}),
        (513, {A: 9000, B: 9000}, {A: 256, B: 257}),
        (64, {A: 9000, B: 9000}, {A: 64, B: 0}),
        (128, {A: 10, B: 10, C: 9000}, {A: 10, B: 10, C: 108}),
        (0, {A: 5}, {A: 0}),
    ],
)
def test_shares(budget: int, needed: dict[Flow, int], expected: dict[Flow, int]) -> None:
    assert fair_shares(budget, needed) == expected


@given(st.integers(0, 20_000), NEEDED)
def test_nobody_gets_more_than_another_who_needs_more(budget: int, needed: dict[Flow, int]) -> None:
    shares = fair_shares(budget, needed)
    assert sum(shares.values()) == min(budget, sum(needed.values()))
    assert all(0 <= shares[each] <= needed[each] for each in needed)
    if budget >= LEAST_TOKENS * len(needed):
        unmet = [share for each, share in shares.items() if share < needed[each]]
        assert all(share <= least + len(needed) for least in unmet for share in shares.values())


@given(st.integers(1, 500), st.lists(st.sampled_from(FLOWS), min_size=2, max_size=8, unique=True))
def test_over_many_steps_principals_that_always_wait_get_the_same(budget: int, principals: list[Flow]) -> None:
    shares, total = PrefillShares(), dict.fromkeys(principals, 0)
    for _ in range(40):
        for principal, share in shares.of_step(budget, dict.fromkeys(principals, 10**6)).items():
            shares.count(principal, share)
            total[principal] += share
    assert max(total.values()) - min(total.values()) <= 2 * budget


def test_higher_class_gets_its_shares_first_and_a_lower_one_what_is_left() -> None:
    high, low = Flow("a", PRIORITY), Flow("a", FLEX)
    needed = {low: 9000, A: 100, high: 300}
    assert PrefillShares().of_step(512, needed) == {high: 300, A: 100, low: 112}
    assert PrefillShares().of_step(256, needed) == {high: 256, A: 0, low: 0}


def test_principal_that_comes_back_is_level_with_those_that_waited() -> None:
    shares = PrefillShares()
    for _ in range(10):  # all is of A, while B is away
        shares.count(A, shares.of_step(64, {A: 10**6})[A])
    assert shares.of_step(64, {A: 10**6, B: 10**6}) == {A: 64, B: 0}  # level: the first of equals
    shares.count(A, 64)
    assert shares.of_step(64, {A: 10**6, B: 10**6}) == {A: 0, B: 64}
    shares.count(B, 64)
    assert shares.of_step(64, {A: 10**6, B: 10**6})[B] == 0, "it has nothing stored up"


def costs() -> StepCosts:
    """An 8B model in bfloat16 on an H200, as steps were measured there."""
    work = StepWork(15_000_000_000, token_bytes=131_072, weights_per_token=7_500_000_000, attention_width=131_072)
    return StepCosts(work, DeviceLimits(4.0e12, 7.5e14))


def limits(step_ms: float, mixed_sizes: Mapping[int, tuple[int, ...]] = NONE) -> SchedulerLimits:
    return SchedulerLimits(512, 16_384, step_ms / 1e3, 40_960, mixed_sizes=mixed_sizes)


@pytest.mark.parametrize(
    ("step_ms", "mixed_sizes", "num_streams", "num_prompts", "expected"),
    [
        (50, NONE, 0, 1, None),  # nobody waits for the step but its one prompt
        (50, NONE, 0, 2, 2_812),  # long enough to be efficient: 16 times as long as reading the weights
        (100, NONE, 0, 2, 4_812),
        (50, NONE, 1, 1, 2_311),
        (50, NONE, 48, 9, 2_264),
        (50, MIXED_SIZES, 48, 9, 976),  # the largest graph: as efficient, and half as long
        (20, MIXED_SIZES, 48, 9, 720),  # the largest that fits into the bound
        (4, MIXED_SIZES, 48, 1, 464),  # streams alone take longer than the bound: prompts take twice as long again
        (50, MIXED_SIZES, 200, 9, 1_024),
        (50, MIXED_SIZES, 500, 9, 1_812),  # there are no graphs of as many
        (50, MIXED_SIZES, 1500, 9, 3_375),  # where streams take half of a step, its prompts are long
    ],
)
def test_prompts_of_a_step_by_its_expected_time(
    step_ms: float, mixed_sizes: Mapping[int, tuple[int, ...]], num_streams: int, num_prompts: int, expected: int | None
) -> None:
    streams = StepShape(num_streams)
    assert limits(step_ms, mixed_sizes).prompt_budget(costs(), streams, num_prompts) == expected


@pytest.mark.parametrize(
    ("num_streams", "tokens", "expected"), [(48, 500, 464), (48, 464, 464), (48, 5, 5), (500, 300, 300)]
)
def test_prompts_fill_a_graph_if_there_is_one(num_streams: int, tokens: int, expected: int) -> None:
    assert limits(50, MIXED_SIZES).graph_tokens(num_streams, tokens) == expected


@given(st.floats(1.0, 500.0), st.integers(0, 512), st.integers(0, 40_000), st.integers(1, 300), st.booleans())
def test_streams_wait_no_longer_than_the_bound(
    step_ms: float, num_streams: int, context: int, num_prompts: int, has_graphs: bool
) -> None:
    streams, expected = StepShape(num_streams, num_streams * context), costs()
    step = limits(step_ms, MIXED_SIZES if has_graphs else NONE)
    budget = step.prompt_budget(expected, streams, num_prompts)
    if budget is None:
        assert (num_streams, num_prompts) == (0, 1)
        return
    assert 1 <= budget <= step.step_tokens - num_streams
    streams_s = expected.seconds(streams)
    most_s = max(step_ms / 1e3, streams_s / STREAM_SHARE if num_streams else READS_PER_STEP * streams_s)
    assert expected.seconds(streams.with_prompts(budget)) <= most_s * (1 + 1e-9)


PROMPTS = st.lists(st.builds(Prompt, st.sampled_from([A, B]), st.integers(1, 3000)), max_size=12)


@pytest.mark.parametrize(
    ("prompts", "share", "overtaking"),
    [
        ([111_000, 5], 1024, [1]),
        ([111_000, 300, 200, 5, 20], 1024, [3, 4, 2]),  # the shortest first, up to half of the share
        ([111_000, 513], 1024, []),  # it would take more than half
        ([1000, 5], 1024, []),  # the oldest ends with this step
        ([5, 111_000], 1024, []),
        ([111_000], 1024, []),
        ([], 1024, []),
    ],
)
def test_short_prompts_overtake_a_long_one_of_their_principal(
    prompts: list[int], share: int, overtaking: list[int]
) -> None:
    assert turns([Prompt(A, worth) for worth in prompts], {A: share}).overtaking == overtaking


@given(PROMPTS, st.integers(0, 2000), st.integers(0, 2000))
def test_the_oldest_prompt_of_each_principal_keeps_half_of_its_share(prompts: list[Prompt], a: int, b: int) -> None:
    shares = {A: a, B: b}
    order = turns(prompts, shares)
    assert sorted([*order.overtaking, *order.by_age]) == list(range(len(prompts)))
    assert order.by_age == sorted(order.by_age)
    for principal, share in shares.items():
        own = [index for index, prompt in enumerate(prompts) if prompt.flow == principal]
        taken = [index for index in own if index in order.overtaking]
        assert sum(prompts[index].worth for index in taken) <= share // 2
        assert not taken or own[0] not in taken


@given(st.integers(0, 120_000), st.integers(1, 20_000))
def test_chunk_takes_from_the_share_what_it_is_worth(start: int, share: int) -> None:
    shares = StepShares(costs().work, {A: share})
    count = shares.tokens(A, start, 10**6)
    assert 1 <= count <= share
    shares.take(A, start, count)
    assert shares.left[A] >= 0 or count == 1
    assert shares.tokens(B, start, 10) == 0
