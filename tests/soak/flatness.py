"""Whether a measured value grows: the slope of the line of least squares. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Reading = tuple[float, float]
"""When, and how much."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a value may grow while it is watched."""

    name: str
    unit: str
    most: float
    """In absolute terms."""
    most_part: float = 0.0
    """As a part of its mean; the larger of the two counts."""


@dataclass(frozen=True, slots=True)
class Growth:
    bound: Bound
    mean: float
    grown: float
    """By the line of least squares, from the first reading that counts to the last."""

    @property
    def allowed(self) -> float:
        return max(self.bound.most, self.bound.most_part * self.mean)

    @property
    def is_flat(self) -> bool:
        return self.grown <= self.allowed


def compared(readings: Sequence[Reading], yardsticks: Sequence[Reading]) -> list[Reading]:
    """The readings as they would be if what a fixed computation took at the same times had been as in the best time."""
    at_times = dict(yardsticks)
    best = min(at_times.values(), default=1.0)
    return [(at, value * best / at_times[at]) for at, value in readings if at in at_times]


def growth(readings: Sequence[Reading], bound: Bound) -> Growth:
    """The first tenth of the time does not count: caches fill, and pools reach their size. Raises ValueError where
    fewer than ten readings are left."""
    begin = readings[0][0] + (readings[-1][0] - readings[0][0]) / 10 if readings else 0.0
    counted = [reading for reading in readings if reading[0] >= begin]
    if len(counted) < 10:
        raise ValueError(f"{bound.name} has {len(counted)} readings, which say nothing")
    mean_time = sum(time for time, _ in counted) / len(counted)
    mean = sum(value for _, value in counted) / len(counted)
    spread = sum((time - mean_time) ** 2 for time, _ in counted)
    slope = sum((time - mean_time) * (value - mean) for time, value in counted) / spread if spread else 0.0
    return Growth(bound, mean, slope * (counted[-1][0] - counted[0][0]))
