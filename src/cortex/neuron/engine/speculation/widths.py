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
_TRIES: Final = 3
"""The first steps of a kind may load what they need: the fastest of this many counts."""
_MOST_CHANGE: Final = 0.1
"""The time of steps that were not made falls to no less than this part at once, so it stays above zero."""


class MeasuredTimes:
    """Seconds of several kinds of steps, as they were measured."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def record(self, kind: int, seconds: float) -> float:
        """Returns by how much steps of this kind became slower, which the first few cannot tell."""
        known = self._times.get(kind, seconds)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        # A pause of the machine says little about the next step.
        if count <= _TRIES:
            self._times[kind] = min(known, seconds)
            return 0.0
        change = (min(seconds, 3 * known) - known) * PACE
        self._times[kind] = known + change
        return change

    def known(self, kind: int) -> float | None:
        """None: there was no such step yet."""
        return self._times.get(kind)

    def tried(self, kind: int) -> float | None:
        """None: there were not enough such steps."""
        return self._times[kind] if self._counts.get(kind, 0) >= _TRIES else None

    def move(self, kind: int, change: float) -> None:
        known = self._times[kind]
        self._times[kind] = max(known + change, known * _MOST_CHANGE)

    @property
    def kinds(self) -> list[int]:
        """The kinds of the steps so far."""
        return list(self._times)


class StepCosts:
    """Seconds that steps take, by their number of tokens and whether they check drafts."""

    def __init__(self, sizes: Sequence[int], growth: float) -> None:
        """`sizes`: ascending; steps up to the same one of them take about as long. `growth`: what a token more adds to
        the time of a step, in proportion to a step of one token, until it is measured."""
        self._sizes = sizes
        self._growth = growth
        self._plain = MeasuredTimes()
        self._checking = MeasuredTimes()

    def record(self, num_tokens: int, seconds: float, *, checks_drafts: bool) -> None:
        (self._checking if checks_drafts else self._plain).record(self.size(num_tokens), seconds)
        if not checks_drafts:
            for other in self._checking.kinds:
                self._checking.move(other, (self._assumed(other) - (self._checking.known(other) or 0.0)) * RECOVERY)

    def plain(self, num_tokens: int) -> float | None:
        """What a step without drafts takes; None if there was no such step yet."""
        return self._plain.known(self.size(num_tokens))

    def checking(self, num_tokens: int) -> float:
        """What a step that checks drafts takes."""
        size = self.size(num_tokens)
        tried = self._checking.tried(size)
        return self._assumed(size) if tried is None else tried

    def _assumed(self, size: int) -> float:
        """From the nearest smaller step without drafts."""
        sizes = self._plain.kinds
        near = max((one for one in sizes if one <= size), default=min(sizes, default=0))
        return (self._plain.known(near) or 0.0) * (1 + self._growth * max(0, size - near))

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
    most_likely = sorted(((one, row) for row, each in enumerate(odds) for one in each), reverse=True)
    for number, (one, row) in enumerate(most_likely[: max(0, max_tokens - num_tokens)], start=1):
        gain += one
        chosen[row] += 1
        rate = (len(odds) + gain) / checking_s(num_tokens + number)
        if rate > best:
            best, widths = rate, chosen.copy()
    return widths
