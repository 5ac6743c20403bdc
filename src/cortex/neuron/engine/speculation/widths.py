"""How many draft tokens a step checks: as many as give the most tokens per second. Pure.

A step of more tokens takes longer, and gives more tokens if drafts are right. Both are known from earlier steps: the
odds of each draft token from its sequence, the time of a step from steps of the same size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

MIN_GAIN: Final = 1.03
"""Drafts are checked only if they are expected to give this many times as many tokens per second."""
PACE: Final = 0.2
"""The weight of the latest step in the time of steps of its size."""
RECOVERY: Final = 0.002
"""How fast the time of steps that are not made returns to the assumed one, so that they are tried again."""


class StepCosts:
    """Seconds that steps take, by their number of tokens and whether they check drafts."""

    def __init__(self, sizes: Sequence[int], growth: float) -> None:
        """`sizes`: ascending; steps up to the same one of them take about as long. `growth`: what a token more adds to
        the time of a step, in proportion to a step of one token, until it is measured."""
        self._sizes = sizes
        self._growth = growth
        self._plain: dict[int, float] = {}
        self._checking: dict[int, float] = {}

    def record(self, num_tokens: int, seconds: float, *, checks_drafts: bool) -> None:
        times, size = (self._checking if checks_drafts else self._plain), self.size(num_tokens)
        known = times.get(size, seconds)
        # A pause of the machine says little about the next step.
        times[size] = known + (min(seconds, 3 * known) - known) * PACE
        if not checks_drafts:
            for other, time in self._checking.items():
                self._checking[other] = time + (self._assumed(other) - time) * RECOVERY

    def plain(self, num_tokens: int) -> float | None:
        """Of a step without drafts; None if there was no such step yet."""
        return self._plain.get(self.size(num_tokens))

    def checking(self, num_tokens: int) -> float:
        """Of a step that checks drafts."""
        size = self.size(num_tokens)
        return self._checking[size] if size in self._checking else self._assumed(size)

    def _assumed(self, size: int) -> float:
        """From the nearest smaller step without drafts."""
        if not self._plain:
            return 0.0
        near = max((one for one in self._plain if one <= size), default=min(self._plain))
        return self._plain[near] * (1 + self._growth * max(0, size - near))

    def size(self, num_tokens: int) -> int:
        """The one of the sizes whose steps those of `num_tokens` are like."""
        place = bisect_left(self._sizes, num_tokens)
        return self._sizes[place] if place < len(self._sizes) else num_tokens


def choose_widths(
    odds: Sequence[Sequence[float]],
    num_tokens: int,
    max_tokens: int,
    plain_s: float,
    checking_s: Callable[[int], float],
) -> list[int]:
    """How many draft tokens each row of a step checks. The step has `num_tokens` without drafts and takes `plain_s`;
    with drafts it may have up to `max_tokens`. `odds`: of each row's draft tokens, each together with those before
    it, so they do not increase."""
    best, widths = MIN_GAIN * len(odds) / plain_s, [0] * len(odds)
    chosen = [0] * len(odds)
    gain = 0.0
    likeliest = sorted(((one, row) for row, each in enumerate(odds) for one in each), reverse=True)
    for number, (one, row) in enumerate(likeliest[: max(0, max_tokens - num_tokens)], start=1):
        gain += one
        chosen[row] += 1
        rate = (len(odds) + gain) / checking_s(num_tokens + number)
        if rate > best:
            best, widths = rate, chosen.copy()
    return widths
