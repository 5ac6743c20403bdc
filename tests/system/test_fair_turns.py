from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.system.fair_turns import DEFAULT, FLEX, IDLE, PRIORITY, RISES_AFTER_S, VirtualTime, aged


@pytest.mark.parametrize(
    ("level", "waited_s", "expected"),
    [
        (DEFAULT, 0, DEFAULT),
        (FLEX, 59, FLEX),
        (FLEX, 60, DEFAULT),
        (FLEX, 120, PRIORITY),
        (FLEX, 10_000, PRIORITY),
        (IDLE, 599, IDLE),
        (IDLE, 600, FLEX),
        (IDLE, 660, DEFAULT),
        (PRIORITY, 0, PRIORITY),
    ],
)
def test_request_rises_with_its_wait(level: int, waited_s: float, expected: int) -> None:
    assert aged(level, waited_s) == expected


@given(st.integers(IDLE, PRIORITY), st.floats(0, 1e6), st.floats(0, 1e6))
def test_every_class_is_the_highest_after_a_bounded_wait(level: int, one: float, other: float) -> None:
    assert aged(level, sum(RISES_AFTER_S)) == PRIORITY
    assert aged(level, min(one, other)) <= aged(level, max(one, other))


def serve(time: VirtualTime[str], clients: list[str], cost: float) -> str:
    client = min(clients, key=time.used)
    time.charge(client, cost)
    return client


@given(st.dictionaries(st.sampled_from("abcd"), st.floats(1, 100), min_size=2), st.integers(50, 200))
def test_clients_that_always_wait_use_the_same(costs: dict[str, float], rounds: int) -> None:
    time: VirtualTime[str] = VirtualTime()
    used = dict.fromkeys(costs, 0.0)
    for client in costs:
        time.joins(client)
    for _ in range(rounds):
        client = min(costs, key=time.used)
        time.charge(client, costs[client])
        used[client] += costs[client]
    assert max(used.values()) - min(used.values()) <= max(costs.values())


@given(st.integers(1, 500), st.floats(0.5, 50))
def test_returning_client_has_nothing_stored_up(rounds_away: int, cost: float) -> None:
    time: VirtualTime[str] = VirtualTime()
    time.joins("busy")
    for _ in range(rounds_away):
        time.charge("busy", cost)
    time.joins("back")
    served = [serve(time, ["busy", "back"], cost) for _ in range(20)]
    assert abs(served.count("back") - served.count("busy")) <= 1


def test_client_that_leaves_ahead_of_others_comes_back_no_better() -> None:
    time: VirtualTime[str] = VirtualTime()
    time.joins("greedy")
    time.joins("other")
    time.charge("greedy", 100)
    time.leaves("greedy")
    time.joins("greedy")
    assert time.used("greedy") == 100
    assert time.used("other") == 0


@given(st.lists(st.tuples(st.sampled_from("jlc"), st.sampled_from("abc"), st.floats(0, 10)), max_size=60))
def test_usage_never_falls_below_the_least_of_those_that_wait(steps: list[tuple[str, str, float]]) -> None:
    time: VirtualTime[str] = VirtualTime()
    waiting: list[str] = []
    for step, client, cost in steps:
        if step == "j":
            least = min((time.used(each) for each in waiting), default=0.0)
            time.joins(client)
            waiting.append(client)
            assert time.used(client) >= least
        elif step == "l" and client in waiting:
            time.leaves(client)
            waiting.remove(client)
        elif step == "c":
            before = time.used(client)
            time.charge(client, cost)
            assert time.used(client) == (before + cost if waiting else 0.0)


def test_nothing_is_kept_of_clients_when_nobody_waits() -> None:
    time: VirtualTime[str] = VirtualTime()
    for number in range(100):
        time.joins(f"client {number}")
        time.leaves(f"client {number}")
        time.charge(f"client {number}", 1)
    assert [time.used(f"client {number}") for number in range(100)] == [0.0] * 100
