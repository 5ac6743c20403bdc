"""Measured rates of the tiers below device memory, and the rule that decides between fetching and computing a prefix.
Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from cortex.neuron.engine.roofline.step_costs import StepCosts, StepShape

_NEWEST = 0.2
"""The weight of the newest measurement."""
_RETURN = 0.05
"""How far a rate returns to the assumed one each time it causes a rejected fetch, so that a disk that was busy is
retried."""
WORTH = 0.9
"""A fetch must take less than this share of the computing time: estimates err."""
DISK_BYTES_PER_S = 1e9
PAGE_CACHE_BYTES_PER_S = 8e9
LINK_BYTES_PER_S = 1e8
"""Assumed until a fetch is measured."""
EndOfFront = Callable[[int, int, float, Callable[[int], float]], int]
"""See `end_of_front`."""


@dataclass(slots=True)
class CopyRate:
    """How fast blocks arrive on the device."""

    clock: Callable[[], float] = time.monotonic
    bytes_per_s: float | None = None
    assumed: float = 0.0
    """Bytes per second until a fetch is measured; 0: unknown."""

    def measured(self, num_bytes: int, started_s: float, ended_s: float | None = None) -> None:
        """`ended_s`: None: now."""
        duration_s = (self.clock() if ended_s is None else ended_s) - started_s
        if num_bytes and duration_s > 0:
            rate, known = num_bytes / duration_s, self.bytes_per_s
            self.bytes_per_s = rate if known is None else known + _NEWEST * (rate - known)

    @property
    def expected(self) -> float:
        return self.assumed if self.bytes_per_s is None else self.bytes_per_s

    def was_too_slow(self) -> None:
        """Records that a fetch was rejected because of this rate."""
        if self.bytes_per_s is not None and self.bytes_per_s < self.assumed:
            self.bytes_per_s += _RETURN * (self.assumed - self.bytes_per_s)


def fetch_s(parts: Iterable[tuple[int, float]], delay_s: float) -> float:
    """Expected time of a fetch. `parts`: bytes and their rate, one part after another. `delay_s`: before the first
    byte."""
    total_s = delay_s
    for num_bytes, bytes_per_s in parts:
        if num_bytes:
            total_s += num_bytes / bytes_per_s if bytes_per_s > 0 else inf
    return total_s


def saves_time(parts: Iterable[tuple[int, float]], delay_s: float, compute_s: float, *, worth: float = WORTH) -> bool:
    """Whether fetching takes less than `worth` of the time that computing takes; see `fetch_s`."""
    return fetch_s(parts, delay_s) < worth * compute_s


def end_of_front(first: int, end: int, whole_s: float, compute_s: Callable[[int], float]) -> int:
    """The page up to which to compute while the pages after it are fetched, so that both take the same time; `first` if
    that is not much faster than either alone. `whole_s`: time to fetch all pages from `first` to `end`; `compute_s`:
    time to compute those up to a page."""

    def rest_s(page: int) -> float:
        return whole_s * (end - page) / (end - first)

    low, high = first, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if compute_s(middle) <= rest_s(middle) else (low, middle)
    return low if rest_s(low) < WORTH * min(whole_s, compute_s(end)) else first


def prompt_s(costs: StepCosts, step_tokens: int, start: int, end: int) -> float:
    """Expected time to compute the tokens of a prompt from `start` to `end`, in steps of `step_tokens`."""
    total_s = 0.0
    for first in range(start, end, step_tokens):
        count = min(step_tokens, end - first)
        total_s += costs.seconds(StepShape(0, 0, count, costs.work.prompt_worth(first, count)))
    return total_s
