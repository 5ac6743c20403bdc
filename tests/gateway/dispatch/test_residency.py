"""How long models stay in memory: evictions, sleep, idle times, pins, and workers that are replaced."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.fleet.catalogue import Alias, Catalogue, ModelSpec
from cortex.fleet.rules import EvictionRules
from cortex.wire.errors import InsufficientCapacity, Overloaded, UpstreamUnavailable
from cortex.wire.node.host_splits import HostSplit, HostSplits
from cortex.wire.node.protocol import HostHealth, ModelState

from ..fake_fleet import GB, FakeFleet, lease_of, node_of


def test_alternating_requests_cost_two_swaps() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    got = [fake.ask(name) for name in ["a", "b", "a", "b", "a", "b"]]
    assert [len(each) for each in got] == [1, 0, 1, 0, 1, 0]
    assert not fake.unloads, "a busy model is not evicted"
    for each in got[::2]:
        fake.dispatcher.release(lease_of(each))
    assert fake.unloads == [("n", "a", "evicted")]
    fake.finish_unload()
    assert fake.loads == [("n", "b")]
    fake.finish_load()
    assert all(node_of(each) == "n" for each in got[1::2])


def test_overdue_model_closes_the_model_that_blocks_it() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}}, rules=EvictionRules(min_residency_s=0, fair_wait_s=30))
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    running = fake.ask("a")
    starving = fake.ask("b")
    fake.now += 31
    fake.poll()
    late = fake.ask("a")
    assert late == [], "`a` takes no new requests: `b` is overdue"
    fake.dispatcher.release(lease_of(running))
    fake.finish_unload()
    fake.finish_load()
    assert node_of(starving) == "n"
    assert late == []
    fake.dispatcher.release(lease_of(starving))
    fake.finish_unload()
    fake.finish_load()
    assert node_of(late) == "n"


def test_stale_report_does_not_route_to_a_model_being_unloaded() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    fake.ask("b")
    assert fake.unloads
    fake.poll()  # the node still reports it ready
    assert fake.ask("a") == []


def test_background_alias_never_evicts() -> None:
    catalogue = Catalogue(
        models=(ModelSpec(id="main"), ModelSpec(id="small")),
        aliases={"claude-*haiku*": Alias(model="small", background=True)},
    )
    fake = FakeFleet({"n": {"main": 20 * GB, "small": 10 * GB}}, catalogue=catalogue)
    fake.ready["n"]["main"] = 900.0
    fake.poll()
    got = fake.ask("claude-3-haiku-1")
    assert isinstance(got[0], Overloaded)
    assert not fake.unloads


def test_idle_models_with_a_ttl_are_unloaded() -> None:
    fake = FakeFleet({"n": {"a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a", ttl_s=60),)))
    fake.ready["n"]["a"] = fake.now
    fake.poll()
    fake.dispatcher.tick()
    assert not fake.unloads
    fake.now += 61
    fake.poll()
    fake.dispatcher.tick()
    fake.dispatcher.tick()
    assert fake.unloads == [("n", "a", "ttl")]


def test_victim_of_a_model_that_needs_host_memory_does_not_sleep_there() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "big": 60 * GB}})
    fake.splits["big"] = HostSplits(
        splits=(
            HostSplit(saved_bytes=GB, host_bytes=GB, tokens_per_s=50.0),
            HostSplit(saved_bytes=50 * GB, host_bytes=50 * GB, tokens_per_s=5.0),
        )
    )
    fake.host = HostHealth(total_bytes=100 * GB, free_bytes=90 * GB, budget_bytes=80 * GB, locked_limit_bytes=75 * GB)
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    fake.ask("big")
    assert (fake.unloads[-1], fake.sleeps[-1]) == (("n", "a", "evicted"), False)
    fake.finish_unload()
    assert fake.loads[-1] == ("n", "big")
    (reservation,) = fake.dispatcher.fleet.nodes[0].reservations
    assert reservation.host_bytes > 0


def test_evicted_model_sleeps_and_wakes_for_a_request() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}})
    events: list[dict[str, Any]] = []
    fake.event_log.subscribe(events.append)
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    for newcomer, victim in (("b", "a"), ("a", "b"), ("b", "a")):
        got = fake.ask(newcomer)
        assert (fake.unloads[-1], fake.sleeps[-1]) == (("n", victim, "evicted"), True)
        fake.finish_unload(asleep=True)
        assert fake.loads[-1] == ("n", newcomer), "a sleeping model holds no device memory"
        fake.finish_load()
        assert node_of(got) == "n"
        fake.dispatcher.release(lease_of(got))
        fake.now += 1
        fake.poll()
    kinds = [event["kind"] for event in events]
    assert "model_asleep" in kinds
    assert "model_unloaded" not in kinds


def test_model_that_sleep_would_not_free_is_unloaded_when_evicted() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}}, device_kind="cpu")
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    fake.ask("b")
    assert (fake.unloads, fake.sleeps) == ([("n", "a", "evicted")], [False])


def test_sleeping_model_that_holds_memory_is_evicted() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}}, device_kind="cpu")
    fake.asleep["n", "a"] = 900.0
    fake.poll()
    got = fake.ask("b")
    assert (fake.unloads, fake.sleeps, fake.loads) == ([("n", "a", "evicted")], [False], [])
    fake.finish_unload()
    fake.finish_load()
    assert node_of(got) == "n"


def test_sleeping_model_wakes_in_the_memory_that_it_holds() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB}}, device_kind="cpu")
    fake.asleep["n", "a"] = 900.0
    fake.poll()
    assert fake.dispatcher.explain("a").action == "wake"


def test_sleeping_model_with_room_wakes_on_its_node() -> None:
    fake = FakeFleet({"n": {"a": GB}, "m": {"a": GB}})
    fake.asleep["m", "a"] = 900.0
    fake.poll()
    assert fake.dispatcher.explain("a").action == "wake"
    got = fake.ask("a")
    assert fake.loads == [("m", "a")]
    fake.finish_load()
    assert node_of(got) == "m"


def test_ttl_puts_to_sleep_then_unloads_after_as_long_again() -> None:
    fake = FakeFleet({"n": {"a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a", ttl_s=60),)))
    fake.ready["n"]["a"] = fake.now
    fake.now += 61
    fake.poll()
    fake.dispatcher.tick()
    fake.finish_unload(asleep=True)
    fake.now += 59
    fake.poll()
    fake.dispatcher.tick()
    assert fake.sleeps == [True]
    fake.now += 2
    fake.poll()
    fake.dispatcher.tick()
    assert (fake.unloads, fake.sleeps) == ([("n", "a", "ttl")] * 2, [True, False])
    fake.finish_unload()
    assert fake.status("n", "a").state is ModelState.COLD


def test_operator_puts_to_sleep_then_unloads() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    assert fake.operator.unload("a", sleep=True) == ("n",)
    fake.finish_unload(asleep=True)
    assert fake.operator.unload("a") == ("n",)
    assert fake.sleeps == [True, False]


def test_workers_with_sleeping_models_are_not_recycled() -> None:
    fake = FakeFleet({"n": {"a": GB}}, rules=EvictionRules(defrag_after_cycles=1))
    fake.poll()
    fake.ask("a")
    fake.finish_load()
    fake.ready["n"].clear()
    fake.asleep["n", "a"] = fake.now
    fake.poll()
    fake.dispatcher.tick()
    assert fake.recycled == []


def test_pinned_model_is_loaded_without_a_request() -> None:
    fake = FakeFleet(
        {"n": {"a": GB}, "m": {"a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a", pinned_on=("m",)),))
    )
    fake.poll()
    fake.dispatcher.tick()
    fake.dispatcher.tick()
    assert fake.loads == [("m", "a")]


def test_model_pinned_by_operator_is_not_evicted_until_unpinned() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    assert fake.operator.pin("a") == ("n",)
    assert isinstance(fake.ask("b")[0], InsufficientCapacity)
    assert fake.operator.unpin("a") == ("n",)
    fake.ask("b")
    assert fake.unloads == [("n", "a", "evicted")]


def load_and_unload(fake: FakeFleet, num_loads: int) -> None:
    """Load and unload `num_loads` times."""
    for _ in range(num_loads):
        fake.operator.load("a")
        fake.finish_load()
        fake.operator.unload("a")
        fake.finish_unload()


def test_workers_are_recycled_after_defrag_cycles_once_the_device_is_empty() -> None:
    fake = FakeFleet({"n": {"a": GB}}, rules=EvictionRules(min_residency_s=0, defrag_after_cycles=3))
    fake.poll()
    load_and_unload(fake, 2)
    fake.dispatcher.tick()
    fake.operator.load("a")
    fake.finish_load()
    fake.poll()
    fake.dispatcher.tick()
    assert fake.recycled == [], "a model is there"
    fake.operator.unload("a")
    fake.finish_unload()
    fake.dispatcher.tick()
    fake.dispatcher.tick()
    assert fake.recycled == [("n", (0,))], "once, while it is under way"
    fake.dispatcher.recycle_ended("n", ())
    fake.dispatcher.tick()
    assert len(fake.recycled) == 2, "the node reported the device as in use: ordered again"
    fake.dispatcher.recycle_ended("n", (0,))
    fake.dispatcher.tick()
    assert len(fake.recycled) == 2
    load_and_unload(fake, 3)
    fake.dispatcher.tick()
    assert len(fake.recycled) == 3, "loads count from zero again"


def test_failed_recycle_is_retried_only_after_as_many_loads() -> None:
    fake = FakeFleet({"n": {"a": GB}}, rules=EvictionRules(min_residency_s=0, defrag_after_cycles=2))
    fake.poll()
    load_and_unload(fake, 2)
    fake.dispatcher.tick()
    fake.dispatcher.recycle_ended("n", UpstreamUnavailable("no such route"))
    fake.dispatcher.tick()
    assert len(fake.recycled) == 1


def test_recycle_is_ordered_again_when_a_node_returns() -> None:
    fake = FakeFleet({"n": {"a": GB}}, rules=EvictionRules(min_residency_s=0, defrag_after_cycles=2))
    fake.poll()
    load_and_unload(fake, 2)
    fake.dispatcher.tick()
    for _ in range(3):
        fake.dispatcher.missed("n", "no response")
    fake.dispatcher.tick()
    assert len(fake.recycled) == 1
    fake.poll()
    fake.dispatcher.tick()
    assert len(fake.recycled) == 2


@pytest.mark.parametrize("num_nodes", [4, 12])
def test_room_that_the_end_of_a_request_makes_is_used_at_once_on_every_node(num_nodes: int) -> None:
    names = [f"n{i:02}" for i in range(num_nodes)]
    for ending in (names[0], names[-1]):
        fake = FakeFleet({name: {f"of-{name}": 20 * GB, "new": 20 * GB} for name in names})
        for name in names:
            fake.ready[name][f"of-{name}"] = 900.0
        fake.poll()
        leases = {name: lease_of(fake.ask(f"of-{name}")) for name in names}
        fake.running = {(name, f"of-{name}"): 1 for name in names}
        fake.poll()
        assert fake.ask("new") == []
        assert not fake.unloads
        fake.dispatcher.release(leases[ending])
        assert fake.polls == [ending], "its last report shows a model that is busy"
        del fake.running[ending, f"of-{ending}"]
        fake.poll(ending)
        assert fake.unloads == [(ending, f"of-{ending}", "evicted")]
