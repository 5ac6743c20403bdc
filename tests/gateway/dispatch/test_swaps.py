"""When a model makes room for another one: who needs it, what its load costs, and room that comes anyway."""

from __future__ import annotations

import pytest

from cortex.fleet.rules import EvictionRules

from ..fake_fleet import GB, FakeFleet, lease_of, node_of


def test_model_is_not_evicted_within_min_residency() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}}, rules=EvictionRules(min_residency_s=20))
    fake.ready["n"]["a"] = fake.now
    fake.poll()
    fake.ask("b")
    assert not fake.unloads
    fake.now += 21
    fake.poll()
    assert fake.unloads == [("n", "a", "evicted")]


def loaded_by(client: str, load_s: float | None) -> FakeFleet:
    """`a` was loaded for a request of this client, which has ended."""
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}}, rules=EvictionRules(min_residency_s=20))
    fake.load_s = load_s
    fake.poll()
    got = fake.ask("a", client)
    fake.finish_load()
    fake.dispatcher.release(lease_of(got))
    fake.poll()
    return fake


def test_model_makes_room_at_once_for_what_its_only_client_needs_next() -> None:
    fake = loaded_by("one", load_s=5.0)
    got = fake.ask("b", "one")
    assert fake.unloads == [("n", "a", "evicted")]
    fake.finish_unload()
    fake.finish_load()
    assert node_of(got) == "n"


@pytest.mark.parametrize(("load_s", "kept_s"), [(0.4, 2.0), (3.0, 15.0), (8.0, 20.0), (50.0, 50.0), (None, 20.0)])
def test_model_of_another_client_stays_in_proportion_to_what_its_load_costs(
    load_s: float | None, kept_s: float
) -> None:
    fake = loaded_by("one", load_s)
    fake.ask("b", "two")
    fake.now += kept_s - 0.1
    fake.dispatcher.tick()
    assert not fake.unloads
    fake.now += 0.2
    fake.dispatcher.tick()
    assert fake.unloads == [("n", "a", "evicted")]


def test_model_makes_room_once_its_client_waits_for_the_other_one_too() -> None:
    fake = loaded_by("one", load_s=5.0)
    fake.ask("b", "two")
    assert not fake.unloads
    fake.ask("b", "one")
    assert fake.unloads == [("n", "a", "evicted")]


def test_model_that_the_operator_loaded_stays_for_a_while() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}}, rules=EvictionRules(min_residency_s=20))
    fake.poll()
    fake.operator.load("a")
    fake.finish_load()
    fake.poll()
    fake.ask("b", "one")
    assert not fake.unloads


def test_request_that_ended_since_the_last_report_does_not_keep_its_model() -> None:
    fake = loaded_by("one", load_s=5.0)
    lease = lease_of(fake.ask("a", "one"))
    fake.running["n", "a"] = 1
    fake.poll()
    fake.now += 0.1
    fake.dispatcher.release(lease)
    del fake.running["n", "a"]
    assert fake.polls == [], "nobody waits"
    fake.ask("b", "one")
    assert fake.polls == ["n"]
    fake.poll()
    assert fake.unloads == [("n", "a", "evicted")]
    assert fake.polls == ["n"]


@pytest.mark.parametrize("by_gateway", [True, False], ids=["ordered here", "reported"])
def test_unload_in_progress_is_room_that_comes(by_gateway: bool) -> None:
    fake = FakeFleet({"n": {"a": 10 * GB, "b": 10 * GB, "c": 10 * GB}})
    fake.ready["n"] = {"a": 900.0, "b": 900.0}
    if by_gateway:
        fake.poll()
        fake.operator.unload("a")
    else:
        fake.leaving.add(("n", "a"))
        fake.poll()
    got = fake.ask("c")
    assert [model for _, model, _ in fake.unloads] == ["a"], "b stays"
    assert not fake.loads
    fake.leaving.clear()
    fake.finish_unload()
    assert fake.loads == [("n", "c")]
    fake.finish_load()
    assert node_of(got) == "n"


def test_room_of_one_unload_is_given_once() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 13 * GB, "c": 13 * GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    fake.operator.unload("a")
    fake.ask("b")
    fake.ask("c")
    fake.finish_unload()
    assert fake.loads == [("n", "b")]


def test_unload_in_progress_is_preferred_to_an_eviction_elsewhere() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "c": 10 * GB}, "m": {"b": 15 * GB, "c": 10 * GB}})
    fake.ready = {"n": {"a": 900.0}, "m": {"b": 900.0}}
    fake.poll()
    fake.operator.unload("a")
    fake.ask("c")
    fake.finish_unload()
    assert (fake.loads, len(fake.unloads)) == ([("n", "c")], 1)


def test_sleep_that_would_free_nothing_is_no_room() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}}, device_kind="cpu")
    fake.ready["n"]["a"] = 900.0
    fake.leaving.add(("n", "a"))
    fake.poll()
    assert fake.dispatcher.explain("b").action == "wait"


def test_idle_model_goes_where_models_have_grown_beyond_the_ceiling() -> None:
    fake = FakeFleet({"n": {"old": 4 * GB, "new": 4 * GB, "grown": 4 * GB}})
    fake.ready["n"] = {"old": 900.0, "new": 950.0, "grown": 920.0}
    fake.ceiling_bytes = 12 * GB
    fake.poll()
    fake.dispatcher.tick()
    assert not fake.unloads
    lease = lease_of(fake.ask("grown"))
    fake.sizes["n"]["grown"] = 7 * GB
    fake.poll()
    fake.dispatcher.tick()
    fake.dispatcher.tick()
    assert fake.unloads == [("n", "old", "evicted")], "the least recently used, and only that"
    fake.finish_unload()
    fake.sizes["n"]["grown"] = 13 * GB
    fake.poll()
    fake.dispatcher.tick()
    assert len(fake.unloads) == 1, "no idle model makes enough room"
    fake.dispatcher.release(lease)
    fake.poll()
    fake.dispatcher.tick()
    assert fake.unloads[1:] == [("n", "grown", "evicted")]
