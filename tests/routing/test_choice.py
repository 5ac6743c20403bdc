from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.routing.choice import Replica, choose, expected_s, prefill_s
from cortex.routing.prefixes import CachedPrefix, PrefixRecord, leading_blocks

LONG = bytes(range(256)) * 400
"""25,600 tokens: 6.4 s at the rate that is assumed."""


def recorded_at(*nodes: str) -> PrefixRecord:
    prefixes = PrefixRecord()
    for node in nodes:
        prefixes.record(leading_blocks(LONG), node)
    return prefixes


def chosen_of(replicas: list[Replica], prompt: bytes, prefixes: PrefixRecord) -> Replica:
    return replicas[choose(replicas, prompt, prefixes).position]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        pytest.param({}, {}, "b", id="cached prefix"),
        pytest.param({}, {"running": 1}, "b", id="one running request costs less than a long prompt"),
        pytest.param({}, {"running": 30}, "b", id="a batch costs less than a long prompt"),
        pytest.param({}, {"running": 4, "waiting": 8}, "a", id="a queue costs more"),
        pytest.param({}, {"running": 4, "waiting": 8, "request_s": 0.5}, "b", id="a fast queue costs less"),
        pytest.param({}, {"backlog_s": 9.0}, "a", id="prompts ahead cost more"),
        pytest.param({}, {"backlog_s": 2.0}, "b", id="prompts ahead cost less"),
        pytest.param({}, {"running": 1, "kv_used_fraction": 0.97}, "a", id="full cache"),
        pytest.param({}, {"kv_used_fraction": 0.97}, "b", id="full cache that nobody uses"),
        pytest.param({"prefill_tokens_per_s": 1e6}, {"running": 2}, "a", id="computed faster than it waits"),
    ],
)
def test_weighs_a_cached_prefix_in_seconds(a: dict[str, float], b: dict[str, float], expected: str) -> None:
    replicas = [msgspec.convert({"place": "a", **a}, Replica), msgspec.convert({"place": "b", **b}, Replica)]
    assert chosen_of(replicas, LONG + b"more", recorded_at("b")).place == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        pytest.param({}, {}, "b", id="copying is assumed to be faster than computing"),
        pytest.param({}, {"copied_tokens_per_s": 100_000.0}, "b", id="a fast bus"),
        pytest.param({}, {"copied_tokens_per_s": 3_000.0}, "a", id="a bus that is slower than computing"),
        pytest.param({}, {"copied_tokens_per_s": 100_000.0, "running": 30}, "b", id="a batch costs less"),
        pytest.param({}, {"copied_tokens_per_s": 100_000.0, "backlog_s": 7.0}, "a", id="prompts ahead cost more"),
        pytest.param({"prefill_tokens_per_s": 1e6}, {"copied_tokens_per_s": 1e5}, "a", id="computed faster"),
    ],
)
def test_weighs_a_prefix_in_host_memory_by_the_time_to_copy_it(
    a: dict[str, float], b: dict[str, float], expected: str
) -> None:
    replicas = [msgspec.convert({"place": "a", **a}, Replica), msgspec.convert({"place": "b", **b}, Replica)]
    prefixes = recorded_at("b")
    prefixes.moved_to_host("b")
    chosen = choose(replicas, LONG + b"more", prefixes)
    assert replicas[chosen.position].place == expected
    assert bool(chosen.cached.host_tokens) == (expected == "b")


def test_device_comes_before_host_memory_and_that_before_computing() -> None:
    prefixes = recorded_at("host", "device")
    prefixes.moved_to_host("host")
    places = ["none", "host", "device"]
    while places:
        chosen = choose([Replica(place=place) for place in places], LONG, prefixes)
        assert places[chosen.position] == places.pop()


@pytest.mark.parametrize(
    ("fetched_tokens_per_s", "expected"),
    [
        pytest.param(None, "a", id="nothing was fetched yet: it would be computed"),
        pytest.param(1000.0, "a", id="slower than computing"),
        pytest.param(40_000.0, "b", id="ten times as fast as computing"),
    ],
)
def test_weighs_a_prefix_in_another_place_by_the_time_to_fetch_it(
    fetched_tokens_per_s: float | None, expected: str
) -> None:
    prefixes = recorded_at("a")
    replicas = [Replica(place="a", backlog_s=3.0), Replica(place="b", fetched_tokens_per_s=fetched_tokens_per_s)]
    chosen = choose(replicas, LONG + b"more", prefixes)
    assert replicas[chosen.position].place == expected
    assert chosen.source == ("a" if expected == "b" else "")


def test_place_that_cannot_be_asked_is_no_source() -> None:
    prefixes = recorded_at("a")
    chosen = choose([Replica(place="b")], LONG + b"more", prefixes, lambda place: place != "a")
    assert chosen.source == ""
    assert choose([Replica(place="c")], LONG + b"more", recorded_at("a")).source == "a"


def test_records_the_chosen_replica_and_expects_less_work_the_next_time() -> None:
    prefixes = PrefixRecord()
    first = choose([Replica(place="a", running=1), Replica(place="b")], LONG, prefixes)
    second = choose([Replica(place="a"), Replica(place="b")], LONG + b"more", prefixes)
    assert first.position == second.position == 1
    assert first.prefill_s == pytest.approx(6.4)
    assert second.prefill_s < 0.2


def test_routes_to_the_least_busy_replica_without_a_prefix() -> None:
    replicas = [Replica(place="a", running=2), Replica(place="b", running=1), Replica(place="c", waiting=2, running=1)]
    assert chosen_of(replicas, b"hi", PrefixRecord()).place == "b"


def test_chooses_by_name_among_equals_whatever_their_order() -> None:
    assert chosen_of([Replica(place="b"), Replica(place="a")], b"hi", PrefixRecord()).place == "a"


replicas = st.builds(
    Replica,
    place=st.sampled_from("abcdef"),
    running=st.integers(0, 20),
    waiting=st.integers(0, 5),
    kv_used_fraction=st.floats(0, 1),
    backlog_s=st.floats(0, 100),
    prefill_tokens_per_s=st.floats(10, 1e5),
    request_s=st.floats(0.01, 100),
)


@given(st.lists(replicas, min_size=2, max_size=6, unique_by=lambda replica: replica.place), st.data())
def test_affinity_never_overrides_saturation(candidates: list[Replica], data: st.DataObject) -> None:
    prefixes = PrefixRecord()
    for replica in candidates:
        prefixes.record(leading_blocks(LONG[: data.draw(st.integers(0, len(LONG)))]), replica.place)
    chosen = chosen_of(candidates, LONG, prefixes)
    assert not chosen.is_saturated or all(replica.is_saturated for replica in candidates)


def time_with(replica: Replica, num_prompt_tokens: int, num_cached_tokens: int) -> float:
    return expected_s(replica, prefill_s(replica, num_prompt_tokens, CachedPrefix(num_cached_tokens)))


@given(replicas, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10))
def test_more_work_never_scores_better(replica: Replica, prompt: int, cached: int, extra: int) -> None:
    queued = msgspec.structs.replace(replica, waiting=replica.waiting + extra)
    behind = msgspec.structs.replace(replica, backlog_s=replica.backlog_s + extra)
    time_s = time_with(replica, prompt, cached)
    assert time_with(queued, prompt, cached) >= time_s
    assert time_with(behind, prompt, cached) >= time_s
    assert time_with(replica, prompt + extra, cached) >= time_s
    assert time_with(replica, prompt, cached + extra) <= time_s
