"""Buckets of time: what they hold, when they end, and what they forget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.gateway.history.history import Bucket, Ring

times_s = st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=200)


@given(times_s, st.sampled_from([0.5, 0.95]))
def test_quantile_is_near_the_exact_one(times: list[float], part: float) -> None:
    bucket = Bucket(at=0.0)
    for each in times:
        bucket.count_first_token(each)
    exact = sorted(times)[max(0, -(-int(part * len(times) * 1000) // 1000) - 1)]
    ordered = sorted(times)
    position = ordered.index(exact)
    near = ordered[max(0, position - 1) : position + 2]
    found = bucket.quantile(part)
    assert found is not None
    assert min(near) * 0.9 <= found <= max(near) * 1.1


def test_quantile_of_nothing_is_unknown() -> None:
    assert Bucket(at=0.0).quantile(0.5) is None


def test_window_has_every_step_and_forgets_old_ones() -> None:
    ring = Ring(10, 6)
    ring.current(1000.0).loads += 1
    ring.current(1009.9).loads += 1
    ring.current(1035.0).loads += 1
    window = ring.window(1041.0)
    assert [bucket.at for bucket in window] == [990.0, 1000.0, 1010.0, 1020.0, 1030.0, 1040.0]
    assert [bucket.loads for bucket in window] == [0, 2, 0, 0, 1, 0]
    assert [bucket.loads for bucket in ring.window(1065.0)] == [0, 0, 1, 0, 0, 0]
    ring.current(1095.0)
    assert len(ring.since(0.0)) == 1  # the others are older than six steps


def test_clock_that_was_set_back_goes_on_with_the_latest_step() -> None:
    ring = Ring(10, 6)
    ring.current(1000.0)
    ring.current(900.0).loads += 1
    assert [bucket.loads for bucket in ring.since(0.0)] == [1]


@pytest.mark.parametrize(("now", "kept"), [(1000.0, 2), (1055.0, 1), (2000.0, 0)])
def test_restored_buckets_are_those_of_the_window(now: float, kept: int) -> None:
    ring = Ring(10, 6)
    ring.restore([Bucket(at=1000.0), Bucket(at=990.0), Bucket(at=5000.0)], now)
    assert len(ring.since(0.0)) == kept
