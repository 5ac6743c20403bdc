from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.gateway.ledger.keys import generate
from cortex.gateway.ledger.limits import Account, Estimate, RateBucket, RollingSum, Spent
from cortex.wire.errors import InsufficientQuota, RateLimitExceeded

NOW = 1_000_000.0


def tokens(num_tokens: int) -> Estimate:
    """A request that needs exactly this many tokens."""
    return Estimate(num_tokens, 0, prompt_tokens=num_tokens)


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
    first = limited.reserve(tokens(99), NOW)
    with pytest.raises(InsufficientQuota, match="has 1 of 100 tokens left, because its running requests hold 99"):
        limited.reserve(tokens(60), NOW)
    limited.settle(first, 10, NOW)
    assert (limited.reserved_tokens, limited.total_spent()) == (0, 10)
    assert limited.reserve(tokens(60), NOW) == 60


@pytest.mark.parametrize(
    "limited", [account(balance_tokens=100), account(window_tokens=100)], ids=["balance_tokens", "window_tokens"]
)
def test_rejects_only_what_the_whole_budget_cannot_serve(limited: Account) -> None:
    with pytest.raises(InsufficientQuota, match="needs at least 101"):
        limited.reserve(Estimate(400, 50, prompt_tokens=100), NOW)
    assert limited.reserve(Estimate(396, 50, prompt_tokens=99), NOW) == 100


def test_client_limit_is_reserved_for_every_choice_and_capped_by_what_is_left() -> None:
    assert account(balance_tokens=1000).reserve(Estimate(40, 96, 3, prompt_tokens=10), NOW) == 298
    assert account(balance_tokens=300).reserve(Estimate(40, 96, 32), NOW) == 300
    with pytest.raises(InsufficientQuota, match="needs at least 33"):
        account(balance_tokens=32).reserve(Estimate(40, 96, 32), NOW)


def test_request_without_a_limit_is_served_with_what_a_small_window_has_left() -> None:
    limited = account(window_tokens=1000)
    limited.settle(limited.reserve(Estimate(80, None), NOW), 45, NOW)
    assert limited.reserve(Estimate(80, None), NOW) == 955


def test_request_without_a_budget_reserves_what_is_likely() -> None:
    assert account().reserve(Estimate(41, None, 2), NOW) == 11 + 2 * 1024


def test_request_without_a_limit_leaves_half_of_a_large_budget_to_others() -> None:
    limited = account(balance_tokens=1_000_000)
    reserved = [limited.reserve(Estimate(40, None), NOW) for _ in range(3)]
    assert reserved == [500_000, 250_000, 125_000]


def test_reserves_no_more_than_the_context_of_every_choice() -> None:
    limited = account(balance_tokens=1_000_000)
    assert limited.reserve(Estimate(40, None, context_tokens=4096), NOW) == 4096
    assert limited.reserve(Estimate(40, 10**9, 2, context_tokens=4096), NOW) == 8192


def test_request_that_uses_no_tokens_needs_none_left() -> None:
    assert account(Spent(total=100), balance_tokens=100).reserve(Estimate(0, 0), NOW) == 0


def test_extended_reservation_takes_what_a_counted_prompt_needs() -> None:
    limited = account(balance_tokens=10_000)
    limited.reserve(tokens(1000), NOW)
    reserved = limited.reserve(Estimate(4000, 10), NOW)
    assert reserved == 4500
    dense_prompt = Estimate(4000, 10, prompt_tokens=8000)
    reserved = limited.extend(reserved, dense_prompt, NOW)
    assert (reserved, limited.reserved_tokens) == (8010, 9010)
    with pytest.raises(InsufficientQuota):
        limited.extend(reserved, dense_prompt._replace(prompt_tokens=10_000), NOW)
    assert limited.reserved_tokens == 9010
    limited.settle(reserved, 8001, NOW)
    assert limited.reserved_tokens == 1000


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
    with pytest.raises(InsufficientQuota, match=r"its window of 10 min .* try again in 5 min") as caught:
        limited.reserve(tokens(50), NOW + 300)
    wait_s = caught.value.retry_after_s
    assert wait_s is not None
    assert 300 <= wait_s <= 360
    with pytest.raises(InsufficientQuota):
        limited.reserve(tokens(50), NOW + 300 + wait_s - 1)
    limited.reserve(tokens(50), NOW + 300 + wait_s + 1)


def test_counts_stored_spend_from_the_start() -> None:
    minute = int(NOW // 60)
    spent = Spent(by_minute={minute - 1: 70, minute - 1000: 1000}, total=1070)
    with pytest.raises(InsufficientQuota):
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
    limited.settle(limited.reserve(tokens(50), NOW), 50, NOW)
    with pytest.raises(InsufficientQuota):
        limited.reserve(tokens(1), NOW)


requests = st.builds(
    Estimate,
    prompt_bytes=st.integers(1, 2000),
    completion_limit=st.none() | st.integers(0, 400),
    num_choices=st.integers(1, 4),
    context_tokens=st.none() | st.integers(1, 500),
)
steps = st.lists(
    st.tuples(requests, st.integers(0, 600), st.integers(0, 2000), st.booleans(), st.integers(0, 120)), max_size=20
)


@given(st.none() | st.integers(0, 1500), st.none() | st.integers(0, 500), steps)
def test_keys_never_spend_more_than_their_budgets(
    balance: int | None, window: int | None, steps: list[tuple[Estimate, int, int, bool, int]]
) -> None:
    """Concurrent requests of any shape, with prompts that have fewer or more tokens than their sizes suggest."""
    limited = account(balance_tokens=balance, window_tokens=window, window_s=600)
    now, running = NOW, list[tuple[int, int]]()
    for estimate, prompt_tokens, wanted_tokens, ends, gap in steps:
        now += gap
        before = limited.reserved_tokens
        try:
            reserved = limited.reserve(estimate, now)
            try:
                if reserved < (counted := estimate._replace(prompt_tokens=prompt_tokens)).least_tokens:
                    reserved = limited.extend(reserved, counted, now)
            except InsufficientQuota:
                limited.settle(reserved, 0, now)
                raise
        except InsufficientQuota:
            unspent = [] if balance is None else [balance - limited.total_spent()]
            unspent += [] if window is None else [window - limited.window_spent(now)]
            least = max(estimate.least_tokens, estimate._replace(prompt_tokens=prompt_tokens).least_tokens)
            assert min(unspent) - before < least or 0 in (balance, window), "it could have been served"
            assert limited.reserved_tokens == before
        else:
            used = prompt_tokens + wanted_tokens
            running.append((reserved, used if balance is window is None else min(used, reserved)))
        assert balance is None or limited.total_spent() + limited.reserved_tokens <= balance
        assert window is None or limited.window_spent(now) + limited.reserved_tokens <= window
        if ends and running:
            limited.settle(*running.pop(0), now)
    assert limited.reserved_tokens == sum(reserved for reserved, _ in running)


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
