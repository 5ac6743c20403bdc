"""The prefill tokens of a step, and their shares: all of the budget is used, and nobody with a smaller share needs
more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.scheduling.budget import LEAST_TOKENS, PrefillShares, SchedulerLimits, fair_shares

NEEDED = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5000), max_size=8)


@pytest.mark.parametrize(
    ("budget", "needed", "expected"),
    [
        (512, {}, {}),
        (512, {"a": 9000}, {"a": 512}),
        (512, {"a": 9000, "b": 9000}, {"a": 256, "b": 256}),
        (512, {"a": 9000, "b": 100}, {"a": 412, "b": 100}),
        (513, {"a": 9000, "b": 9000}, {"a": 256, "b": 257}),
        (64, {"a": 9000, "b": 9000}, {"a": 64, "b": 0}),
        (128, {"a": 10, "b": 10, "c": 9000}, {"a": 10, "b": 10, "c": 108}),
        (0, {"a": 5}, {"a": 0}),
    ],
)
def test_shares(budget: int, needed: dict[str, int], expected: dict[str, int]) -> None:
    assert fair_shares(budget, needed) == expected


@given(st.integers(0, 20_000), NEEDED)
def test_nobody_gets_more_than_another_who_needs_more(budget: int, needed: dict[str, int]) -> None:
    shares = fair_shares(budget, needed)
    assert sum(shares.values()) == min(budget, sum(needed.values()))
    assert all(0 <= shares[each] <= needed[each] for each in needed)
    if budget >= LEAST_TOKENS * len(needed):
        unmet = [share for each, share in shares.items() if share < needed[each]]
        assert all(share <= least + len(needed) for least in unmet for share in shares.values())


@given(st.integers(1, 500), st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=8, unique=True))
def test_over_many_steps_principals_that_always_wait_get_the_same(budget: int, principals: list[str]) -> None:
    shares, total = PrefillShares(), dict.fromkeys(principals, 0)
    for _ in range(40):
        for principal, share in shares.of_step(budget, dict.fromkeys(principals, 10**6)).items():
            shares.count(principal, share)
            total[principal] += share
    assert max(total.values()) - min(total.values()) <= 2 * budget


@pytest.mark.parametrize(
    ("num_decodes", "num_waiting", "expected"),
    [
        (0, 1, 16_384),  # no stream to delay
        (0, 200, 16_384),
        (1, 1, 2_048),
        (200, 7, 2_048),
        (1, 15, 2_048),
        (1, 16, 4_096),  # more waiting prompts get more
        (16, 31, 6_144),
        (16, 240, 8_192),  # but never more than half of a step
        (15_000, 240, 1_384),  # the rest of the step
    ],
)
def test_prefill_budget_of_a_step(num_decodes: int, num_waiting: int, expected: int) -> None:
    limits = SchedulerLimits(max_rows=512, step_tokens=16_384, mixed_prefill_tokens=2_048, context_tokens=40_960)
    assert limits.prefill_tokens(num_decodes, num_waiting) == expected
