from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.speculation.width_rule import (
    MIN_GAIN,
    ProposalCosts,
    StepCosts,
    choose_proposals,
    choose_widths,
)

ODDS = st.lists(
    st.lists(st.floats(0, 1), max_size=4).map(lambda odds: sorted(odds, reverse=True)), min_size=1, max_size=3
)


def rate(odds: list[list[float]], widths: tuple[int, ...], growth: float) -> float:
    expected = len(odds) + sum(sum(row[:width]) for row, width in zip(odds, widths, strict=True))
    return expected / (1 + growth * sum(widths))


@given(odds=ODDS, growth=st.floats(0, 2), spare=st.integers(0, 12))
def test_no_other_widths_give_more_tokens_per_second(odds: list[list[float]], growth: float, spare: int) -> None:
    num_tokens = len(odds)
    chosen = choose_widths(odds, num_tokens, num_tokens + spare, 1.0, lambda tokens: 1 + growth * (tokens - num_tokens))
    assert sum(chosen) <= spare
    possible = [widths for widths in product(*(range(len(row) + 1) for row in odds)) if sum(widths) <= spare]
    best = max(rate(odds, widths, growth) for widths in possible)
    if any(chosen):
        assert rate(odds, tuple(chosen), growth) == pytest.approx(best)
        assert best > MIN_GAIN * len(odds)
    else:
        assert best <= MIN_GAIN * len(odds) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("odds", "num_rows", "step_s", "expected"),
    [
        ([0.9, 0.8, 0.7], 1, 1.1, [3]),
        ([0.9, 0.8, 0.7], 1, 5.0, [0]),
        ([0.05], 1, 1.1, [0]),
        ([], 1, 1.1, [0]),
        ([0.9, 0.8, 0.7], 3, 1.2, [3, 3, 3]),
    ],
)
def test_widths_follow_odds_and_cost(odds: list[float], num_rows: int, step_s: float, expected: list[int]) -> None:
    assert choose_widths([odds] * num_rows, num_rows, 64, 1.0, lambda _: step_s) == expected


def test_draft_that_pays_is_checked_beside_one_that_does_not() -> None:
    widths = choose_widths([[0.95, 0.9, 0.9], [0.1, 0.01]], 2, 64, 1.0, lambda tokens: 1 + 0.2 * (tokens - 2))
    assert widths == [3, 0]


def test_unmeasured_steps_cost_as_assumed_and_measured_ones_as_measured() -> None:
    costs = StepCosts((1, 2, 4, 8), growth=0.1)
    assert costs.plain(1) is None
    costs.record(1, 2.0, checks_drafts=False)
    assert costs.checking(3) == pytest.approx(2.0 * 1.3)
    for seconds in (70.0, 6.0, 5.0):
        assert costs.checking(4) == pytest.approx(2.0 * 1.3)
        costs.record(3, seconds, checks_drafts=True)
    assert costs.checking(4) == pytest.approx(5.0)
    assert costs.checking(8) == pytest.approx(2.0 * 1.7)
    assert costs.plain(1) == 2.0


def test_one_long_pause_changes_little() -> None:
    costs = StepCosts((1, 2), growth=0.1)
    for _ in range(5):
        costs.record(1, 1.0, checks_drafts=False)
    costs.record(1, 1000.0, checks_drafts=False)
    assert costs.plain(1) < 1.5  # type: ignore[operator]


def test_expensive_step_is_tried_again_after_many_others() -> None:
    costs = StepCosts((1, 2), growth=0.1)
    costs.record(1, 1.0, checks_drafts=False)
    for _ in range(3):
        costs.record(2, 10.0, checks_drafts=True)
    for _ in range(100):
        costs.record(1, 1.0, checks_drafts=False)
    assert costs.checking(2) > 5
    for _ in range(5_000):
        costs.record(1, 1.0, checks_drafts=False)
    assert costs.checking(2) == pytest.approx(1.1, rel=0.01)


@pytest.mark.parametrize("slow_s", [0.4, 400.0])
def test_slow_first_step_of_one_more_proposal_says_nothing_about_fewer(slow_s: float) -> None:
    steps = StepCosts((1, 2, 4, 8), growth=0.015)
    costs = ProposalCosts(steps, 0.03)
    steps.record(1, 0.008, checks_drafts=False)
    for count, times in ((1, [0.009] * 4), (2, [slow_s, 0.01, 0.01, 0.01])):
        for seconds in times:
            costs.record(1, count, seconds)
            assert costs.seconds(1, 1) == pytest.approx(0.009, rel=0.1)
    assert choose_proposals([[0.9, 0.8]], 1, 2, 0.008, lambda count: costs.seconds(1, count)) == 2


def test_measured_times_stay_above_zero() -> None:
    costs = ProposalCosts(StepCosts((1, 2, 4, 8), growth=0.015), 0.03)
    for count, seconds in ((1, 0.01), (2, 10.0)):
        for _ in range(4):
            costs.record(1, count, seconds)
    for _ in range(50):
        costs.record(1, 2, 0.0)
        assert costs.seconds(1, 1) > 0
