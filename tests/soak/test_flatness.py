from __future__ import annotations

import random

import pytest

from .flatness import Bound, compared, growth

BOUND = Bound("memory", "MB", most=5.0, most_part=0.02)


@pytest.mark.parametrize(("per_step", "is_flat"), [(0.0, True), (0.02, True), (0.1, False), (-1.0, True)])
def test_growth_is_found_below_the_noise(per_step: float, is_flat: bool) -> None:
    chance = random.Random(1)
    readings = [(float(step), 100 + per_step * step + chance.gauss(0, 5)) for step in range(200)]
    found = growth(readings, BOUND)
    assert found.is_flat == is_flat
    assert abs(found.grown - per_step * 180) < 3


def test_first_tenth_does_not_count() -> None:
    readings = [(float(step), min(step, 10) * 10.0) for step in range(101)]
    assert growth(readings, BOUND).grown == 0.0


def test_too_few_readings_are_an_error() -> None:
    with pytest.raises(ValueError, match="say nothing"):
        growth([(0.0, 1.0), (1.0, 1.0)], BOUND)


def test_readings_of_a_busy_time_are_compared_with_a_yardstick() -> None:
    readings = [(0.0, 10.0), (15.0, 30.0), (30.0, 20.0), (45.0, 7.0)]
    yardsticks = [(0.0, 1.0), (15.0, 3.0), (30.0, 1.0)]
    assert compared(readings, yardsticks) == [(0.0, 10.0), (15.0, 10.0), (30.0, 20.0)]
