"""What a key may still spend: pure arithmetic on numbers and a clock that is passed in.

A request reserves what it may cost before it runs and settles with what it did cost, so that many at once cannot
spend the same tokens. Time is wall-clock seconds; spend is kept by the minute, as it is in the books.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cortex.wire.errors import InsufficientQuota, RateLimitExceeded

from .keys import KeySection

MINUTE_S = 60


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What the books say about one key."""

    by_minute: dict[int, int] = msgspec.field(default_factory=dict)
    """Tokens by minute (`time // 60`), as far back as the window reaches."""
    total: int = 0
    """Tokens ever."""


class RateBucket:
    """Requests per minute, with bursts up to a minute's worth. Mutable; owned by one account."""

    __slots__ = ("_at", "_level")

    def __init__(self, per_min: int, now: float) -> None:
        self._level = float(per_min)
        self._at = now

    def take(self, per_min: int, now: float) -> float:
        """Take one request: 0 when there was room, else the seconds until there is, with nothing taken."""
        rate = per_min / MINUTE_S
        self._level = min(float(per_min), self._level + max(0.0, now - self._at) * rate)
        self._at = now
        if self._level < 1:
            return (1 - self._level) / rate
        self._level -= 1
        return 0.0

    def give_back(self) -> None:
        """The request just taken did not run."""
        self._level += 1


class Account:
    """What one key has spent and promised. Mutable; owned by the gateway's loop.

    Invariant: with a budget, `spent + reserved + a newcomer's reservation` is at most the budget when it is admitted.
    """

    __slots__ = ("_bucket", "_recorded", "_reserved", "_unrecorded", "key")

    def __init__(self, key: KeySection, recorded: Spent, now: float) -> None:
        self.key = key
        self._recorded = recorded
        self._unrecorded: dict[int, int] = {}
        """Settled here, not yet part of `_recorded`."""
        self._reserved = 0
        self._bucket = RateBucket(key.requests_per_min or 0, now)

    @property
    def reserved_tokens(self) -> int:
        return self._reserved

    def window_spent(self, now: float) -> int:
        """Tokens spent in the rolling window. A minute counts until all of it has left the window."""
        return sum(tokens for _, tokens in self._in_window(now))

    def total_spent(self) -> int:
        return self._recorded.total + sum(self._unrecorded.values())

    def reserve(self, tokens: int, now: float) -> int:
        """Take a request and `tokens` of the budgets; returns what to hand to `settle`.

        A request that asks for more than a whole budget may have all of it. Raises `RateLimitExceeded` or
        `InsufficientQuota`, and then nothing is taken.
        """
        key = self.key
        if key.requests_per_min is not None:
            wait_s = self._bucket.take(key.requests_per_min, now)
            if wait_s:
                message = f"The key `{key.name}` has used its {key.requests_per_min} requests per minute"
                raise RateLimitExceeded(f"{message}; try again in {_seconds(wait_s)}.", retry_after_s=wait_s)
        try:
            tokens = min((tokens, *self._budgets()))
            self._check_balance(tokens)
            self._check_window(tokens, now)
        except (RateLimitExceeded, InsufficientQuota):
            self._bucket.give_back()
            raise
        self._reserved += tokens
        return tokens

    def settle(self, reserved: int, used: int, now: float) -> None:
        """Replace a reservation by what was used. Called exactly once for each `reserve`."""
        self._reserved -= reserved
        if used:
            minute = int(now // MINUTE_S)
            self._unrecorded[minute] = self._unrecorded.get(minute, 0) + used

    def change(self, key: KeySection, now: float) -> None:
        """The operator has changed the key's limits; what was spent and promised stays."""
        if key.requests_per_min != self.key.requests_per_min:
            self._bucket = RateBucket(key.requests_per_min or 0, now)
        self.key = key

    def book(self, recorded: Spent, written: Mapping[int, int]) -> None:
        """The books now say `recorded`, which includes `written` of what was settled here."""
        self._recorded = recorded
        left = {minute: tokens - written.get(minute, 0) for minute, tokens in self._unrecorded.items()}
        self._unrecorded = {minute: tokens for minute, tokens in left.items() if tokens}

    def _budgets(self) -> tuple[int, ...]:
        budgets = (self.key.window_tokens, self.key.balance_tokens)
        return tuple(budget for budget in budgets if budget is not None)

    def _check_balance(self, tokens: int) -> None:
        balance = self.key.balance_tokens
        if balance is None:
            return
        left = balance - self.total_spent() - self._reserved
        if left < tokens or balance == 0:
            raise InsufficientQuota(
                f"The key `{self.key.name}` has {max(0, left)} of {balance} tokens left and this request may take "
                f"{tokens}; lower max_tokens, or ask the operator to top it up."
            )

    def _check_window(self, tokens: int, now: float) -> None:
        budget = self.key.window_tokens
        if budget is None:
            return
        left = budget - self.window_spent(now) - self._reserved
        if left < tokens or budget == 0:
            wait_s = self._until_free(tokens - left, now)
            raise RateLimitExceeded(
                f"The key `{self.key.name}` has {max(0, left)} of {budget} tokens left in its window of "
                f"{_seconds(self.key.window_s)} and this request may take {tokens}; try again in {_seconds(wait_s)}.",
                retry_after_s=wait_s,
            )

    def _in_window(self, now: float) -> list[tuple[int, int]]:
        first = int((now - self.key.window_s) // MINUTE_S)
        both = (*self._recorded.by_minute.items(), *self._unrecorded.items())
        return [(minute, tokens) for minute, tokens in both if minute >= first]

    def _until_free(self, missing: int, now: float) -> float:
        """Seconds until `missing` tokens have left the window. What is only reserved may settle much sooner."""
        for minute, tokens in sorted(self._in_window(now)):
            missing -= tokens
            if missing <= 0:
                return max(1.0, (minute + 1) * MINUTE_S + self.key.window_s - now)
        return 1.0


def _seconds(seconds: float) -> str:
    return f"{max(1, round(seconds))} s"
