"""Caps on batch lines, driven by a simulated node whose pace depends on how much runs there."""

from __future__ import annotations

import random

import pytest

from cortex.fleet.idle_caps import MAX_GAP_RATIO, MAX_PACED_GAP_RATIO, MAX_TTFT_RATIO, QUIET_S, IdleCaps

NODE, MODEL = "node", "model"


class Simulation:
    """Interactive requests, one every `every_s`, beside as many lines as the cap admits. `harm`: what one line adds to
    the times of a request, as a part of them."""

    def __init__(self, harm: float, *, seed: int = 7, every_s: float = 0.5, num_clean: int = 40) -> None:
        self.harm = harm
        self.every_s = every_s
        self.caps = IdleCaps(most=64)
        self.now = 1000.0
        self.random = random.Random(seed)
        for _ in range(num_clean):
            self.request(lines=0)

    def request(self, lines: int | None = None) -> tuple[float, float]:
        """The times of one request, against those of an average one without batches."""
        self.now += self.every_s
        self.caps.began(NODE, self.now)
        if lines is None:
            lines = self.caps.cap(NODE, self.now, num_interactive=1)
        self.caps.lines[NODE] = lines
        noise = 1 + 0.05 * self.random.random()
        slowed = (1 + self.harm * lines) * noise
        self.caps.served(NODE, MODEL, self.now, ttft_s=0.1 * slowed, num_tokens=500, gap_s=0.02 * slowed)
        return slowed, float(lines)


@pytest.mark.parametrize("harm", [0.005, 0.02, 0.05, 0.1])
def test_interactive_requests_stay_within_the_limits_at_most_of_the_throughput_that_is_possible(harm: float) -> None:
    simulation = Simulation(harm)
    times = [simulation.request() for _ in range(2000)][200:]
    slowed = sorted(time for time, _ in times)
    most_lines = min(64.0, (MAX_GAP_RATIO * 1.05 - 1) / harm)

    assert slowed[int(0.97 * len(slowed))] <= MAX_GAP_RATIO * 1.05 * 1.05 + harm
    assert sum(lines for _, lines in times) / len(times) >= 0.55 * most_lines


def test_a_cap_falls_when_lines_begin_to_hurt_and_rises_when_they_no_longer_do() -> None:
    simulation = Simulation(0.001)
    for _ in range(600):
        simulation.request()
    high = simulation.caps.cap(NODE, simulation.now, num_interactive=1)

    simulation.harm = 0.2
    for _ in range(60):
        simulation.request()
    low = simulation.caps.cap(NODE, simulation.now, num_interactive=1)
    simulation.harm = 0.001
    for _ in range(600):
        simulation.request()

    assert high >= 32
    assert low <= 2
    assert simulation.caps.cap(NODE, simulation.now, num_interactive=1) >= 32


def test_lines_that_hurt_whatever_their_number_are_stopped_and_tried_again() -> None:
    simulation = Simulation(1.0)
    lines = [simulation.request()[1] for _ in range(1000)][200:]

    assert sum(lines) / len(lines) <= 0.05
    assert max(lines) >= 1


def test_a_node_without_other_requests_fills_up_and_gives_way_to_the_first_one() -> None:
    caps, now = IdleCaps(most=16), 50.0
    for _ in range(10):
        now += 1.1
        caps.lines[NODE] = caps.cap(NODE, now, num_interactive=0)
        caps.completed(NODE, now)
    assert caps.cap(NODE, now, num_interactive=0) == 16

    assert caps.cap(NODE, now, num_interactive=1) == 1
    assert caps.cap(NODE, now + QUIET_S - 0.1, num_interactive=0) == 1
    assert caps.cap(NODE, now + QUIET_S, num_interactive=0) == 16


def test_a_node_whose_requests_are_far_between_is_not_free_between_two_of_them() -> None:
    caps, now = IdleCaps(most=16), 50.0
    for _ in range(60):
        now += 20.0
        caps.began(NODE, now)
    for _ in range(10):
        caps.lines[NODE] = 64
        caps.completed(NODE, now + 1000)
    assert caps.cap(NODE, now + 60, num_interactive=0) == 1
    assert caps.cap(NODE, now + 110, num_interactive=0) > 1, "the next one is overdue"


def test_a_node_that_rejects_lines_gets_half_as_many() -> None:
    caps, now = IdleCaps(most=16), 50.0
    for _ in range(10):
        now += 1.1
        caps.lines[NODE] = caps.cap(NODE, now, num_interactive=0)
        caps.completed(NODE, now)

    caps.full(NODE, now)

    assert caps.cap(NODE, now, num_interactive=0) == 8


def test_a_node_that_was_never_seen_without_batches_is_measured_by_its_fastest_requests() -> None:
    caps, now = IdleCaps(), 0.0
    caps.lines[NODE] = 8
    for number in range(60):
        now += 3
        slow = 1.0 if number % 3 else 5.0
        caps.served(NODE, MODEL, now, ttft_s=0.1 * slow, num_tokens=100, gap_s=None)

    assert caps.cap(NODE, now, num_interactive=1) <= 4
    assert MAX_TTFT_RATIO < 5


def test_long_prompts_are_not_compared_with_short_ones() -> None:
    caps, now = IdleCaps(), 0.0
    for number in range(200):
        now += 2
        caps.lines[NODE] = 0 if number < 40 else caps.cap(NODE, now, num_interactive=1)
        tokens = 100 if number % 2 else 10_000
        caps.served(NODE, MODEL, now, ttft_s=tokens / 1000, num_tokens=tokens, gap_s=0.02)

    assert caps.cap(NODE, now, num_interactive=1) >= 16


@pytest.mark.parametrize(("num_paced", "may_grow"), [(8, True), (7, False)])
def test_lines_that_engines_run_may_lengthen_the_mean_gap_further(num_paced: int, may_grow: bool) -> None:
    caps, now = IdleCaps(), 0.0
    for number in range(60):
        now += 3
        caps.lines[NODE], caps.paced[NODE] = (0, 0) if number < 40 else (8, num_paced)
        slowed = (MAX_GAP_RATIO + MAX_PACED_GAP_RATIO) / 2 if number >= 40 else 1.0
        caps.served(NODE, MODEL, now, ttft_s=0.1, num_tokens=100, gap_s=0.02 * slowed)

    assert (caps.cap(NODE, now, num_interactive=1) > 1) == may_grow
