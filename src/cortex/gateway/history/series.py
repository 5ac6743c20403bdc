"""Traffic over time: rings of buckets, each a step of time. Pure.

First-token times are counted in buckets of their own, each a tenth longer than the one before: two of them can be
added, and a quantile of the sum is exact to a twentieth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_GROWTH = math.log(1.1)
_SHORTEST_S = 1e-4


@dataclass(slots=True, kw_only=True)
class Bucket:
    """What happened in one step of time."""

    at: float
    """When the step began: seconds since 1970."""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_tokens: dict[int, int] = field(default_factory=dict)
    """How many times to the first token were of each length, on a scale that grows by a tenth."""
    waiting: int = 0
    """The most requests that waited at a time."""
    loads: int = 0
    evictions: int = 0

    def count_first_token(self, first_token_s: float) -> None:
        length = int(math.log(first_token_s / _SHORTEST_S) / _GROWTH) if first_token_s > _SHORTEST_S else 0
        self.first_tokens[length] = self.first_tokens.get(length, 0) + 1

    def add(self, other: Bucket) -> None:
        """Count what happened in `other` here too."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        for length, count in other.first_tokens.items():
            self.first_tokens[length] = self.first_tokens.get(length, 0) + count
        self.waiting = max(self.waiting, other.waiting)
        self.loads += other.loads
        self.evictions += other.evictions

    def quantile(self, part: float) -> float | None:
        """The time to the first token that `part` of the requests did not exceed."""
        total = sum(self.first_tokens.values())
        left = math.ceil(part * total)
        for length in sorted(self.first_tokens):
            left -= self.first_tokens[length]
            if left <= 0:
                return _SHORTEST_S * math.exp((length + 0.5) * _GROWTH)
        return None


class Ring:
    """The latest buckets of one step. Those of times in which nothing happened are absent."""

    def __init__(self, step_s: int, num_steps: int) -> None:
        self.step_s = step_s
        self.num_steps = num_steps
        self._buckets: deque[Bucket] = deque()

    def current(self, now: float) -> Bucket:
        """The bucket of this moment. A clock that was set back continues the latest one."""
        at = now - now % self.step_s
        if not self._buckets or self._buckets[-1].at < at:
            self._buckets.append(Bucket(at=at))
            while self._buckets[0].at <= at - self.num_steps * self.step_s:
                self._buckets.popleft()
        return self._buckets[-1]

    def restore(self, buckets: Iterable[Bucket], now: float) -> None:
        """Begin with the buckets of an earlier process, before the first of this one."""
        oldest = now - self.num_steps * self.step_s
        self._buckets = deque(sorted((each for each in buckets if oldest < each.at <= now), key=lambda each: each.at))

    def since(self, at: float) -> list[Bucket]:
        """The buckets that began at `at` or later, the current one included."""
        return [bucket for bucket in self._buckets if bucket.at >= at]

    def window(self, now: float) -> list[Bucket]:
        """One bucket for every step until now, oldest first."""
        last = int(now // self.step_s)
        known = {int(bucket.at // self.step_s): bucket for bucket in self._buckets}
        steps = range(last - self.num_steps + 1, last + 1)
        return [known.get(step) or Bucket(at=float(step * self.step_s)) for step in steps]
