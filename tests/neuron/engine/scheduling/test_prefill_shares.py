"""Shares of prefill tokens: all of the budget is used, and nobody with a smaller share needs more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.scheduling.prefill_shares import LEAST_TOKENS, PrefillShares, fair_shares

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
