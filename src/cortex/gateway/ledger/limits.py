"""The limits of a key: pure arithmetic on numbers and a clock that is passed in.

A request reserves what it may use before it runs, and settles with what it did use, so that concurrent requests cannot
spend the same tokens. The gateway does not tokenise, so a prompt is estimated by its size, and what a request reserves
is also the most that its node lets it use. An estimate that is too low therefore never exceeds a budget: it ends the
response early or, where the prompt alone is larger, makes the gateway reserve again with the number of tokens that the
node counted. Spend is kept by the minute of the wall clock, as in the store. Rates use a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from cortex.gateway.ledger.keys import KeySection
from cortex.wire.errors import InsufficientQuota, RateLimitExceeded
from cortex.wire.fields.sampling import DEFAULT_COMPLETION_TOKENS
from cortex.wire.words import duration, plural

BYTES_PER_TOKEN = 4
"""Typical of texts. No token has less than one byte."""
LIKELY_TEMPLATE_TOKENS = 256
"""Tokens that a chat template adds to the texts of a request."""
MAX_TEMPLATE_TOKENS = 4096
UNKNOWN = 2**62
"""Exceeds any budget."""


class Estimate(NamedTuple):
    """What is known about the tokens of a request before it runs."""

    prompt_bytes: int
    """0 where its tokens are not in its bytes."""
    completion_limit: int | None
    """Tokens of one choice; None where the client sets no limit, 0 where nothing is generated."""
    num_choices: int = 1
    context_tokens: int | None = None
    """The context of its model, if that is known."""
    prompt_tokens: int | None = None
    """The tokens of its prompt, once counted."""
    picture_tokens: int = 0
    """What its pictures take, beyond `prompt_bytes`."""

    @property
    def least_tokens(self) -> int:
        """The fewest tokens with which the request can be served."""
        if not self._prompt_size and not self.picture_tokens and not self.completion_limit:
            return 0
        return max(1, self.prompt_tokens or 0) + (0 if self.completion_limit == 0 else self.num_choices)

    def max_prompt_tokens(self, most: int) -> int:
        """An upper bound on the prompt's tokens, given at most `most` by its size: no prompt exceeds the context."""
        if self.context_tokens is None or self.completion_limit == 0:
            return most
        return min(most, self.context_tokens * self.num_choices)

    @property
    def _prompt_size(self) -> int:
        """No text has more tokens than bytes."""
        return max(self.prompt_bytes, self.prompt_tokens or 0)

    @property
    def likely_tokens(self) -> int:
        """The prompt, by its size unless it was counted, and the limit of every choice or a default."""
        prompt = self.prompt_tokens
        if prompt is None:
            prompt = -(-self.prompt_bytes // BYTES_PER_TOKEN) + self.picture_tokens
        completion = DEFAULT_COMPLETION_TOKENS if self.completion_limit is None else self.completion_limit
        return prompt + completion * self.num_choices

    @property
    def most_tokens(self) -> int:
        """Upper bound of its tokens; `UNKNOWN` if neither a limit nor the context is known."""
        prompt_bytes, limit, num_choices, context, prompt, picture_tokens = self
        if limit == 0:
            return self._prompt_size + picture_tokens
        most = UNKNOWN if context is None else context * num_choices
        if limit is not None:
            most_prompt = prompt_bytes + picture_tokens + MAX_TEMPLATE_TOKENS if prompt is None else prompt
            by_limit = most_prompt + limit * num_choices
            if by_limit < most:
                return by_limit
        return most

    def reserved(self, left: int) -> int:
        """The tokens to reserve of the `left` ones of its key: all that it can use, but at most half of them, so that
        other requests of the key can run meanwhile, or its likely usage if that is more."""
        most, half = self.most_tokens, left // 2
        if most <= half:
            return most
        likely = self.likely_tokens + (LIKELY_TEMPLATE_TOKENS if self.completion_limit != 0 else 0)
        return min(most, left, max(likely, half))


MINUTE_S = 60
MAX_SKEW_MINUTES = 5
"""Spend may be dated this far in the future, because clocks of gateways differ. Spend beyond it comes from a wrong
clock and counts only when its time has come, so that it fills a window no longer than once."""


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows about one key."""

    by_minute: dict[int, int] = msgspec.field(default_factory=dict)
    """Tokens by minute (`time // 60`), within the window."""
    total: int = 0
    """Lifetime tokens of the key."""
    reserved_elsewhere: int = 0
    """Tokens that other gateways have reserved, including those that have died."""


class RateBucket:
    """A token bucket of requests, with bursts up to one minute's worth. Mutable; owned by one account.

    `now` is monotonic: a wall clock that is set back or ahead neither blocks nor refills it.
    """

    __slots__ = ("_at", "_level")

    def __init__(self, per_min: int, now: float) -> None:
        self._level = float(per_min)
        self._at = now

    def take(self, per_min: int, now: float) -> float:
        """Take one request and return 0, or take nothing and return the seconds until one is available."""
        rate = per_min / MINUTE_S
        self._level = min(float(per_min), self._level + max(0.0, now - self._at) * rate)
        self._at = now
        if self._level < 1:
            return (1 - self._level) / rate
        self._level -= 1
        return 0.0

    def give_back(self) -> None:
        """Return the request just taken: it did not run."""
        self._level += 1


class RollingSum:
    """Tokens by minute, and their sum over a window that only moves forward. Mutable; owned by one account.

    Adding and reading take constant time, whatever the length of the window.
    """

    __slots__ = ("_minutes", "_sum")

    def __init__(self, by_minute: Mapping[int, int]) -> None:
        self._minutes = deque(sorted(by_minute.items()))
        self._sum = sum(by_minute.values())

    def add(self, minute: int, tokens: int) -> None:
        """Add tokens spent in `minute`. After a small step back of the clock they are added to the latest minute."""
        self._drop_after(minute + MAX_SKEW_MINUTES)
        if self._minutes and self._minutes[-1][0] >= minute:
            minute, earlier = self._minutes.pop()
            tokens_there = earlier + tokens
        else:
            tokens_there = tokens
        self._minutes.append((minute, tokens_there))
        self._sum += tokens

    def between(self, first: int, now: int) -> int:
        """The sum from minute `first` to `now`, with `MAX_SKEW_MINUTES` added. Other minutes are dropped."""
        self._drop_after(now + MAX_SKEW_MINUTES)
        while self._minutes and self._minutes[0][0] < first:
            self._sum -= self._minutes.popleft()[1]
        return self._sum

    def _drop_after(self, last: int) -> None:
        while self._minutes and self._minutes[-1][0] > last:
            self._sum -= self._minutes.pop()[1]

    def minute_of_oldest(self, tokens: int) -> int | None:
        """The minute by which the oldest `tokens` were spent; `None` if there were fewer."""
        for minute, spent in self._minutes:
            tokens -= spent
            if tokens <= 0:
                return minute
        return None


class Account:
    """What one key has spent and reserved. Mutable; owned by the gateway's loop.

    Invariant: `spent + reserved` is at most each budget of the key, where `reserved` includes what other gateways have
    reserved, as long as no request uses more than it reserved.
    """

    __slots__ = (
        "_bucket",
        "_held_by_lines",
        "_is_cost",
        "_label",
        "_reserved",
        "_reserved_elsewhere",
        "_total",
        "_unrecorded",
        "_window",
        "has_budget",
        "key",
        "num_reservations",
    )

    def __init__(
        self, key: KeySection, recorded: Spent, monotonic_now: float, label: str | None = None, *, is_cost: bool = False
    ) -> None:
        """`label` and `is_cost`: of a `Budget`, whose amounts are tokens or money."""
        self.key = key
        self._label = label or f"The key `{key.name}`"
        self._is_cost = is_cost
        self._total = recorded.total
        self._window = RollingSum(recorded.by_minute)
        self._unrecorded: dict[int, int] = {}
        """By minute: settled here, not yet confirmed as stored."""
        self._reserved = 0
        self._held_by_lines = 0
        """As `_reserved`, for lines of batches."""
        self._reserved_elsewhere = recorded.reserved_elsewhere
        self.num_reservations = 0
        """Running requests with a reservation."""
        self._bucket = RateBucket(key.requests_per_min or 0, monotonic_now)
        self.has_budget = _has_budget(key)
        """Whether its tokens are limited."""

    @property
    def reserved_tokens(self) -> int:
        """Reserved by running requests of this gateway."""
        return self._reserved

    def window_spent(self, now: float) -> int:
        """Tokens spent in the rolling window. A minute counts until the window has passed all of it."""
        return self._window.between(int((now - self.key.window_s) // MINUTE_S), int(now // MINUTE_S))

    def total_spent(self) -> int:
        return self._total

    def reserve(self, estimate: Estimate, now: float, monotonic_now: float | None = None, *, price: int = 1) -> int:
        """Reserve a request and the tokens that it may use; returns the amount, for `settle`.

        With a budget they are the most that it may use; without one, what it likely uses. `monotonic_now` is the time
        for the rate; without it, `now` is. `price`: the amount of one token, 1 where the account counts tokens.

        Raises `RateLimitExceeded` for too many requests, `InsufficientQuota` for a budget that has too little left, and
        then reserves nothing.
        """
        key = self.key
        if key.requests_per_min is not None:
            wait_s = self._bucket.take(key.requests_per_min, now if monotonic_now is None else monotonic_now)
            if wait_s:
                message = f"{self._label} has used its {plural(key.requests_per_min, 'request')} per minute"
                raise RateLimitExceeded(f"{message}; try again in {duration(max(1.0, wait_s))}.", retry_after_s=wait_s)
        try:
            tokens = self._granted(estimate, now, price) if self.has_budget else estimate.likely_tokens
        except InsufficientQuota:
            self._bucket.give_back()
            raise
        self._reserved += tokens * price
        self.num_reservations += 1
        return tokens * price

    def hold(self, estimate: Estimate, now: float, *, price: int = 1) -> int:
        """Reserve what a line of a batch may use; returns the amount, for `end_hold`. Lines do not count as requests
        per minute, and their holds are not stored: a lost line runs again and is charged then.

        Raises `InsufficientQuota`.
        """
        amount = (self._granted(estimate, now, price) if self.has_budget else estimate.likely_tokens) * price
        self._held_by_lines += amount
        return amount

    def extend_hold(self, held: int, estimate: Estimate, now: float, *, price: int = 1) -> int:
        """As `extend`, for what a line of a batch holds."""
        self._held_by_lines -= held
        amount = held
        try:
            amount = max(held, self._granted(estimate, now, price) * price)
        finally:
            self._held_by_lines += amount
        return amount

    def end_hold(self, held: int, recorded: int, now: float) -> None:
        """Replace what a line holds by what the store has recorded for it."""
        self._held_by_lines -= held
        if recorded:
            self._window.add(int(now // MINUTE_S), recorded)
            self._total += recorded

    def extend(self, reserved: int, estimate: Estimate, now: float, *, price: int = 1) -> int:
        """Enlarge a reservation to match a better estimate; returns its amount. Raises `InsufficientQuota`, and then
        the reservation is unchanged."""
        self._reserved -= reserved
        amount = reserved
        try:
            amount = max(reserved, self._granted(estimate, now, price) * price)
        finally:
            self._reserved += amount
        return amount

    def settle(self, reserved: int, used: int, now: float) -> None:
        """Replace a reservation by what was used. Call it exactly once for each `reserve`."""
        self._reserved -= reserved
        self.num_reservations -= 1
        if used:
            minute = int(now // MINUTE_S)
            self._unrecorded[minute] = self._unrecorded.get(minute, 0) + used
            self._window.add(minute, used)
            self._total += used

    def change(self, key: KeySection, monotonic_now: float) -> None:
        """Use changed limits of the key. What was spent and reserved stays."""
        if key.requests_per_min != self.key.requests_per_min:
            self._bucket = RateBucket(key.requests_per_min or 0, monotonic_now)
        self.key = key
        self.has_budget = _has_budget(key)

    def synchronise(self, recorded: Spent | None, written: Mapping[int, int]) -> None:
        """Adopt `recorded` from the store, which includes `written` of what was settled here.

        `recorded` is None for a key without a token limit, whose local values stay.
        """
        unrecorded = {minute: tokens - written.get(minute, 0) for minute, tokens in self._unrecorded.items()}
        self._unrecorded = {minute: tokens for minute, tokens in unrecorded.items() if tokens}
        if recorded is None:
            self._window = RollingSum(dict(self._unrecorded))
            return
        self._reserved_elsewhere = recorded.reserved_elsewhere
        self._total = recorded.total + sum(self._unrecorded.values())
        by_minute = dict(recorded.by_minute)
        for minute, tokens in self._unrecorded.items():
            by_minute[minute] = by_minute.get(minute, 0) + tokens
        self._window = RollingSum(by_minute)

    def withdraw(self, reserved: int) -> None:
        """Undo a `reserve`."""
        self._reserved -= reserved
        self.num_reservations -= 1
        self._bucket.give_back()

    def _granted(self, estimate: Estimate, now: float, price: int) -> int:
        """The tokens to reserve. Raises the error of a budget that has too little left."""
        held, least = self._reserved + self._held_by_lines + self._reserved_elsewhere, estimate.least_tokens * price
        left = UNKNOWN
        if (balance := self.key.balance_tokens) is not None:
            left = balance - self._total - held
            if left < least or balance == 0:
                raise self._over_balance(left + held, held, least, balance)
        if (budget := self.key.window_tokens) is not None:
            left_in_window = budget - self.window_spent(now) - held
            if left_in_window < least or budget == 0:
                raise self._over_window(left_in_window + held, held, least, budget, now)
            left = min(left, left_in_window)
        return estimate.reserved(max(0, left // price))

    def _over_balance(self, unspent: int, held: int, least: int, balance: int) -> InsufficientQuota:
        show = self._shown
        has = f"{self._label} has {show(max(0, unspent - held))} of {show(balance)}{self._noun} left"
        if 0 < least <= unspent:
            return self._held(has, held)
        return InsufficientQuota(
            f"{has} and this request needs at least {show(max(1, least))}; ask the operator to top it up."
        )

    def _held(self, has: str, held: int) -> InsufficientQuota:
        return InsufficientQuota(
            f"{has}, because its running requests hold {self._shown(held)}; try again when one has ended.",
            retry_after_s=1.0,
        )

    def _over_window(self, unspent: int, held: int, least: int, budget: int, now: float) -> InsufficientQuota:
        window, show = duration(self.key.window_s), self._shown
        if least > budget or budget == 0:
            return InsufficientQuota(
                f"{self._label} has {show(budget)}{self._noun} in any {window} and this request needs at least "
                f"{show(least)}; shorten the prompt or lower the number of choices."
            )
        left = max(0, unspent - held)
        has = f"{self._label} has {show(left)} of {show(budget)}{self._noun} left in its window of {window}"
        if least <= unspent:
            return self._held(has, held)
        wait_s = self._until_free(least - unspent, now)
        return InsufficientQuota(
            f"{has} and this request needs at least {show(least)}; try again in {duration(max(1.0, wait_s))}.",
            retry_after_s=wait_s,
        )

    @property
    def _noun(self) -> str:
        return " (cost by the prices of the models)" if self._is_cost else " tokens"

    def _shown(self, amount: int) -> str:
        return f"{amount / 1e9:.6g}" if self._is_cost else str(amount)

    def _until_free(self, missing: int, now: float) -> float:
        """Seconds until the window has passed `missing` tokens."""
        minute = self._window.minute_of_oldest(missing)
        return 1.0 if minute is None else max(1.0, (minute + 1) * MINUTE_S + self.key.window_s - now)


def _has_budget(key: KeySection) -> bool:
    return key.balance_tokens is not None or key.window_tokens is not None
