from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.gateway.ledger.keys import generate
from cortex.gateway.ledger.limits import Account, Estimate, RateBucket, RollingSum, Spent
from cortex.wire.errors import InsufficientQuota, RateLimitExceeded

NOW = 1_000_000.0


def tokens(completion: int) -> Estimate:
    return Estimate(0, completion)


def account(recorded: Spent | None = None, **limits: Any) -> Account:
    return Account(generate("alice", **limits).section, recorded or Spent(), NOW)


def test_admits_everything_without_limits() -> None:
    unlimited = account()
    for _ in range(1000):
        unlimited.reserve(tokens(10**9), NOW)


def test_admits_a_burst_then_enforces_the_rate() -> None:
    limited = account(requests_per_min=6)
    for _ in range(6):
        limited.reserve(tokens(1), NOW)
    with pytest.raises(RateLimitExceeded, match="6 requests per minute") as caught:
        limited.reserve(tokens(1), NOW)
    assert caught.value.retry_after_s == pytest.approx(10)
    with pytest.raises(RateLimitExceeded):
        limited.reserve(tokens(1), NOW + 9.9)
    limited.reserve(tokens(1), NOW + 10.1)


@given(st.integers(1, 50), st.lists(st.floats(0, 30), max_size=200))
def test_no_minute_exceeds_burst_plus_rate(per_min: int, gaps: list[float]) -> None:
    bucket, now, taken = RateBucket(per_min, NOW), NOW, []
    for gap in gaps:
        now += gap
        wait_s = bucket.take(per_min, now)
        if wait_s == 0:
            taken.append(now)
        else:
            assert 0 < wait_s <= 60 / per_min + 1e-6
    for start in taken:
        assert sum(start <= at < start + 60 for at in taken) <= 2 * per_min


def test_clock_step_back_adds_no_requests() -> None:
    bucket = RateBucket(1, NOW)
    assert bucket.take(1, NOW) == 0
    assert bucket.take(1, NOW - 1000) > 0
    assert bucket.take(1, NOW - 990) > 0


def test_reservation_lasts_until_it_is_settled() -> None:
    limited = account(balance_tokens=100)
    first = limited.reserve(tokens(60), NOW)
    with pytest.raises(InsufficientQuota, match="has 40 of 100 tokens left and this request may take 60"):
        limited.reserve(tokens(60), NOW)
    limited.settle(first, 10, NOW)
    assert (limited.reserved_tokens, limited.total_spent()) == (0, 10)
    limited.reserve(tokens(60), NOW)


@pytest.mark.parametrize(
    "limited", [account(balance_tokens=100), account(window_tokens=100)], ids=["balance_tokens", "window_tokens"]
)
def test_rejects_a_request_over_the_whole_budget_without_retry(limited: Account) -> None:
    with pytest.raises(InsufficientQuota, match="may take 101"):
        limited.reserve(tokens(101), NOW)
    assert limited.reserve(tokens(100), NOW) == 100


def test_reserves_every_choice_and_the_prompt_once() -> None:
    limited = account(balance_tokens=300)
    with pytest.raises(InsufficientQuota, match="may take 3082"):
        limited.reserve(Estimate(40, 96, 32), NOW)
    assert limited.reserve(Estimate(40, 96, 3), NOW) == 298


def test_request_without_a_limit_reserves_a_default_within_a_small_budget() -> None:
    assert account().reserve(Estimate(41, None, 2), NOW) == 11 + 2 * 1024
    limited = account(balance_tokens=100)
    assert limited.reserve(Estimate(40, None), NOW) == 100
    with pytest.raises(InsufficientQuota):
        limited.reserve(Estimate(4, None), NOW)
    with pytest.raises(InsufficientQuota):
        account(balance_tokens=300).reserve(Estimate(40, None, 32), NOW)


def test_reservations_of_other_gateways_count_against_the_budget() -> None:
    limited = account(Spent(total=20, reserved_elsewhere=50), balance_tokens=100)
    with pytest.raises(InsufficientQuota, match="has 30 of 100"):
        limited.reserve(tokens(31), NOW)
    limited.synchronise(Spent(total=60), {})
    limited.reserve(tokens(40), NOW)


def test_rejects_everything_with_a_balance_of_zero() -> None:
    with pytest.raises(InsufficientQuota):
        account(balance_tokens=0).reserve(tokens(0), NOW)


def test_spend_leaves_the_window() -> None:
    limited = account(window_tokens=100, window_s=600)
    limited.settle(limited.reserve(tokens(100), NOW), 100, NOW)
    with pytest.raises(RateLimitExceeded, match=r"its window of 10 min .* try again in 5 min") as caught:
        limited.reserve(tokens(50), NOW + 300)
    wait_s = caught.value.retry_after_s
    assert wait_s is not None
    assert 300 <= wait_s <= 360
    with pytest.raises(RateLimitExceeded):
        limited.reserve(tokens(50), NOW + 300 + wait_s - 1)
    limited.reserve(tokens(50), NOW + 300 + wait_s + 1)


def test_counts_stored_spend_from_the_start() -> None:
    minute = int(NOW // 60)
    spent = Spent(by_minute={minute - 1: 70, minute - 1000: 1000}, total=1070)
    with pytest.raises(RateLimitExceeded):
        account(spent, window_tokens=100, window_s=600).reserve(tokens(31), NOW)
    account(spent, window_tokens=100, window_s=600).reserve(tokens(30), NOW)
    with pytest.raises(InsufficientQuota):
        account(spent, balance_tokens=1100).reserve(tokens(31), NOW)


def test_synchronise_adopts_what_is_stored() -> None:
    limited = account(balance_tokens=1000, window_tokens=1000)
    minute = int(NOW // 60)
    limited.settle(limited.reserve(tokens(10), NOW), 10, NOW)
    limited.settle(limited.reserve(tokens(5), NOW), 5, NOW)
    limited.synchronise(Spent(by_minute={minute: 110}, total=310), {minute: 10})
    assert (limited.window_spent(NOW), limited.total_spent()) == (115, 315)


def test_rejection_by_budget_does_not_count_towards_the_rate() -> None:
    limited = account(requests_per_min=1, balance_tokens=10)
    held = limited.reserve(tokens(10), NOW)
    limited.settle(held, 0, NOW)
    spent = account(requests_per_min=1, balance_tokens=10, recorded=Spent(total=10))
    with pytest.raises(InsufficientQuota):
        spent.reserve(tokens(5), NOW)
    with pytest.raises(InsufficientQuota):
        spent.reserve(tokens(5), NOW)


def test_changed_limits_keep_what_was_spent() -> None:
    limited = account(balance_tokens=100)
    limited.settle(limited.reserve(tokens(100), NOW), 100, NOW)
    limited.change(generate("alice", balance_tokens=150, requests_per_min=5).section, NOW)
    limited.reserve(tokens(50), NOW)
    with pytest.raises(InsufficientQuota):
        limited.reserve(tokens(1), NOW)


@given(
    st.integers(0, 500),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200), st.booleans(), st.integers(0, 120)), max_size=40),
)
def test_admitted_requests_never_reserve_more_than_the_budget(
    budget: int, steps: list[tuple[int, int, bool, int]]
) -> None:
    limited = account(window_tokens=budget, window_s=600)
    now, held = NOW, []
    for asked, used, ends, gap in steps:
        now += gap
        try:
            held.append(limited.reserve(tokens(asked), now))
        except (RateLimitExceeded, InsufficientQuota):
            assert limited.window_spent(now) + limited.reserved_tokens + asked > budget or budget == 0
        else:
            assert limited.window_spent(now) + limited.reserved_tokens <= budget
        if ends and held:
            reserved = held.pop()
            limited.settle(reserved, min(used, reserved), now)
    assert limited.reserved_tokens == sum(held)


@given(
    st.dictionaries(st.integers(0, 30), st.integers(1, 100), max_size=10),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100), st.integers(1, 20)), max_size=30),
)
def test_rolling_sum_equals_the_sum(start: dict[int, int], steps: list[tuple[int, int, int]]) -> None:
    window, expected, minute = RollingSum(start), dict(start), max(start, default=0)
    for gap, tokens, length in steps:
        minute += gap
        window.add(minute, tokens)
        expected[minute] = expected.get(minute, 0) + tokens
        expected = {at: spent for at, spent in expected.items() if at >= minute - length}
        assert window.between(minute - length, minute) == sum(expected.values())


def test_clock_step_back_loses_no_spend() -> None:
    limited = account(window_tokens=100, window_s=600)
    limited.settle(limited.reserve(tokens(10), NOW), 10, NOW)
    limited.settle(limited.reserve(tokens(10), NOW - 120), 10, NOW - 120)
    assert limited.window_spent(NOW) == 20


def test_clock_far_ahead_does_not_fill_the_window_after_it_is_set_back() -> None:
    limited = account(window_tokens=100, window_s=600)
    limited.settle(limited.reserve(tokens(100), NOW + 86400), 100, NOW + 86400)
    assert limited.window_spent(NOW) == 0
    limited.settle(limited.reserve(tokens(30), NOW), 30, NOW)
    assert (limited.window_spent(NOW), limited.total_spent()) == (30, 130)
