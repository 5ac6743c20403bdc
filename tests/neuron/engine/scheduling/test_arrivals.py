"""Arrivals at an engine whose device takes the times of a GPU, on a virtual clock: what clients wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[4] / "bench"
Simulate = Callable[..., Any]


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Simulate:
    monkeypatch.syspath_prepend(str(BENCH))
    return import_module("modelled_device").simulate  # type: ignore[no-any-return]


@pytest.fixture
def arriving(simulate: Simulate) -> Callable[[float, float], Sequence[tuple[float, int, int]]]:
    return import_module("workloads").arriving_requests  # type: ignore[no-any-return]


def test_same_arrivals_give_the_same_times(simulate: Simulate, arriving: Simulate) -> None:
    assert simulate(arriving(16, 1)) == simulate(arriving(16, 1))


@pytest.mark.parametrize("per_s", [8, 32])
def test_streams_keep_their_pace_while_prompts_arrive(simulate: Simulate, arriving: Simulate, per_s: float) -> None:
    seen = simulate(arriving(per_s, 3))
    gaps_ms = [gap_s * 1e3 for gap_s in sorted(seen.gaps_s)]
    assert gaps_ms[int(0.99 * len(gaps_ms))] < 30
    assert gaps_ms[-1] < 50
    first_ms = [first_s * 1e3 for first_s in sorted(seen.first_s.values())]
    assert first_ms[len(first_ms) // 2] < 60
    assert first_ms[-1] < 300


def test_smaller_bound_gives_smaller_gaps(simulate: Simulate) -> None:
    requests = [(0.0, 100, 200), (0.1, 12_000, 2)]
    gaps = [max(simulate(requests, step_ms / 1e3).gaps_s) for step_ms in (10, 20, 50)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 0.013
    assert gaps[1] < 0.022


def test_short_prompts_behind_a_long_one_wait_for_a_chunk(simulate: Simulate) -> None:
    """The long one takes more than half a second, and loses little."""
    alone = simulate([(0.0, 40_000, 1)]).first_s["0"]
    seen = simulate([(0.0, 40_000, 1), *((0.02 + 0.01 * number, 5, 1) for number in range(4))])
    waits = [seen.first_s[str(number)] for number in range(1, 5)]
    assert max(waits) < 0.6, "0.4 s for the chunk of 16,384 tokens that ran when they came, and one or two more"
    assert seen.first_s["0"] < 1.1 * alone


def test_time_to_the_first_token_has_no_cliff(simulate: Simulate) -> None:
    """Prompts that join 16 streams: each token more costs about the same."""
    streams = [(0.0, 16, 120)] * 16
    waits = {
        tokens: simulate([*streams, (0.25, tokens, 1)]).first_s["16"] * 1e3
        for tokens in (16, 128, 256, 384, 512, 768, 1024, 1536, 2048)
    }
    lengths = sorted(waits)
    for short, long in pairwise(lengths):
        assert -1 < waits[long] - waits[short] < 6 + 0.03 * (long - short)


def test_burst_of_requests_runs_at_the_rate_of_the_device(simulate: Simulate) -> None:
    """The prompts alone take 1.6 s, and 64 steps of all streams another 0.7 s."""
    seen = simulate([(0.0, 400, 64)] * 160)
    assert 160 * 64 / seen.tokens_per_s < 1.2 * (1.6 + 0.7)
