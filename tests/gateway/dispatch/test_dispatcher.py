"""The decisions of the dispatcher, event by event."""

from __future__ import annotations

from typing import Any

from cortex.fleet.catalogue import Alias, Catalogue, ModelSpec
from cortex.fleet.rules import EvictionRules
from cortex.fleet.topology import ModelOnNode
from cortex.gateway.dispatch.leases import Lease, PendingRequest
from cortex.wire.errors import CortexError, InsufficientCapacity, LoadFailed, Overloaded, UpstreamUnavailable
from cortex.wire.node import ModelState

from ..fake_fleet import GB, FakeFleet, lease_of, node_of


def test_requests_for_a_cold_model_wait_for_one_load() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.poll()
    first, second = fake.ask("a"), fake.ask("a")
    assert fake.loads == [("n", "a")]
    assert first == second == []
    fake.finish_load()
    assert (node_of(first), node_of(second)) == ("n", "n")
    assert fake.dispatcher.in_flight == {("n", "a"): 2}


def test_load_says_how_the_model_is_divided() -> None:
    for spec, expected in (
        (ModelSpec(id="a", min_devices=2), (2, 1)),
        (ModelSpec(id="a", pipeline_parallel=2), (1, 2)),
        (ModelSpec(id="a"), (1, 1)),
    ):
        fake = FakeFleet({"n": {"a": GB}}, catalogue=Catalogue(models=(spec,)), num_devices=2)
        fake.poll()
        fake.ask("a")
        [request] = fake.load_requests
        assert (request.tensor_parallel, request.pipeline_parallel) == expected


def test_requests_before_the_first_poll_wait() -> None:
    fake = FakeFleet({"n": {"a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a"),)))
    got = fake.ask("a")
    assert got == []
    fake.ready["n"]["a"] = fake.now
    fake.poll()
    assert node_of(got) == "n"


def test_one_poll_after_restart_restores_the_fleet() -> None:
    fake = FakeFleet({"n": {"a": GB}, "m": {"b": GB}})
    fake.ready["m"]["b"] = 900.0
    fake.poll()
    assert node_of(fake.ask("b")) == "m"
    assert not fake.loads


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


def test_model_is_not_evicted_within_min_residency() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}}, rules=EvictionRules(min_residency_s=20))
    fake.ready["n"]["a"] = fake.now
    fake.poll()
    fake.ask("b")
    assert not fake.unloads
    fake.now += 21
    fake.poll()
    assert fake.unloads == [("n", "a", "evicted")]


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


def test_failed_load_tries_the_next_node_then_fails_with_all_reasons() -> None:
    fake = FakeFleet({"n": {"a": GB}, "m": {"a": GB}})
    fake.poll()
    got = fake.ask("a")
    first = fake.loads[0][0]
    fake.dispatcher.load_ended(ModelOnNode(first, "a"), LoadFailed("broken disk"))
    second = fake.loads[1][0]
    assert {first, second} == {"n", "m"}
    fake.dispatcher.load_ended(ModelOnNode(second, "a"), LoadFailed("no driver"))
    assert isinstance(got[0], LoadFailed)
    assert "broken disk" in got[0].message
    assert "no driver" in got[0].message


def test_failed_load_is_retried_after_retry_failed_after_s() -> None:
    fake = FakeFleet({"n": {"a": GB}}, rules=EvictionRules(retry_failed_after_s=30))
    fake.poll()
    fake.ask("a")
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), LoadFailed("broken disk"))
    assert isinstance(fake.ask("a")[0], LoadFailed)
    fake.now += 31
    fake.poll()
    assert fake.ask("a") == []
    assert fake.loads == [("n", "a"), ("n", "a")]


def test_out_of_memory_is_retried_once_with_more_room() -> None:
    fake = FakeFleet({"n": {"old": 4 * GB, "a": GB}})
    fake.ready["n"]["old"] = 900.0
    fake.poll()
    got = fake.ask("a")
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), InsufficientCapacity("out of memory"))
    assert fake.unloads == [("n", "old", "evicted")]
    fake.finish_unload()
    assert fake.loads == [("n", "a"), ("n", "a")]
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), InsufficientCapacity("out of memory"))
    assert len(fake.loads) == 2
    assert isinstance(got[0], LoadFailed)


def test_out_of_memory_waits_for_a_busy_victim() -> None:
    fake = FakeFleet({"n": {"old": 4 * GB, "a": GB}})
    fake.ready["n"]["old"] = 900.0
    fake.poll()
    lease = lease_of(fake.ask("old"))
    got = fake.ask("a")
    fake.failed.add(("n", "a"))
    fake.poll()
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), InsufficientCapacity("out of memory"))
    fake.poll()
    assert (got, fake.unloads) == ([], [])
    fake.dispatcher.release(lease)
    assert fake.unloads == [("n", "old", "evicted")]
    fake.finish_unload()
    assert fake.loads == [("n", "a"), ("n", "a")]
    fake.failed.clear()
    fake.finish_load()
    assert isinstance(got[0], Lease)


def test_out_of_memory_without_victims_fails_at_once() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.poll()
    got = fake.ask("a")
    fake.failed.add(("n", "a"))
    fake.poll()
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), InsufficientCapacity("out of memory"))
    assert isinstance(got[0], LoadFailed)


def test_failed_unload_of_a_victim_fails_the_load_only() -> None:
    fake = FakeFleet({"n": {"old": 20 * GB, "a": 10 * GB}})
    fake.ready["n"]["old"] = 900.0
    fake.poll()
    got = fake.ask("a")
    fake.dispatcher.unload_ended(ModelOnNode("n", "old"), UpstreamUnavailable("stuck"))
    assert isinstance(got[0], LoadFailed)
    assert "stuck" in got[0].message
    assert node_of(fake.ask("old")) == "n"


def test_node_down_during_load_moves_the_load_to_another_node() -> None:
    fake = FakeFleet({"n": {"a": GB}, "m": {"a": GB}})
    fake.poll()
    got = fake.ask("a")
    first = fake.loads[0][0]
    other = "m" if first == "n" else "n"
    for _ in range(3):
        fake.dispatcher.missed(first, "connection refused")
    assert fake.abandoned == [first]
    assert fake.loads[-1] == (other, "a")
    fake.finish_load()
    assert node_of(got) == other


def spanning_fleet() -> FakeFleet:
    """Model `a` takes 15 GB on each of two nodes of 24 GB, which hold 20 GB of others."""
    spec = ModelSpec(id="a", nodes=("n", "m"))
    fake = FakeFleet({"n": {"a": 30 * GB, "x": 20 * GB}, "m": {"y": 20 * GB}}, catalogue=Catalogue(models=(spec,)))
    fake.ready["n"]["x"] = fake.ready["m"]["y"] = 900.0
    fake.poll()
    return fake


def test_model_that_spans_nodes_is_loaded_when_the_victims_on_all_of_them_are_gone() -> None:
    fake = spanning_fleet()
    got = fake.ask("a")
    assert fake.unloads == [("n", "x", "evicted"), ("m", "y", "evicted")]
    fake.finish_unload()
    assert fake.loads == []
    fake.unloads.pop()
    fake.finish_unload()
    assert fake.loads == [("n", "a")]
    (reserved,) = fake.reservations("m")
    assert (reserved.model_id, reserved.num_bytes) == ("a", 15 * GB)
    fake.finish_load()
    assert node_of(got) == "n"
    assert fake.reservations("m") == ()


def test_model_that_spans_nodes_does_not_wait_for_a_victim_on_a_node_that_went_down() -> None:
    fake = spanning_fleet()
    got = fake.ask("a")
    for _ in range(3):
        fake.dispatcher.missed("m", "connection refused")
    assert isinstance(got[0], UpstreamUnavailable)
    fake.finish_unload()
    assert fake.loads == []


def sharing_fleet(**sizes: int) -> FakeFleet:
    """Models `a` and `b` take 15 GB on each of two nodes of 24 GB; `a` is ready. `y` is a model of the second node."""
    specs = tuple(ModelSpec(id=model, nodes=("n", "m")) for model in "ab")
    fake = FakeFleet(
        {"n": {"a": 15 * GB, "b": 15 * GB}, "m": sizes},
        catalogue=Catalogue(models=specs),
        spans=dict.fromkeys("ab", ("n", "m")),
    )
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    return fake


def test_models_that_span_the_same_nodes_replace_each_other() -> None:
    fake = sharing_fleet()
    for newcomer, victim in (("b", "a"), ("a", "b"), ("b", "a")):
        got = fake.ask(newcomer)
        assert fake.unloads[-1] == ("n", victim, "evicted")
        fake.finish_unload()
        fake.poll("m")
        assert fake.loads[-1] == ("n", newcomer)
        fake.finish_load()
        assert node_of(got) == "n"
        fake.dispatcher.release(lease_of(got))
        fake.now += 1
        fake.poll()
    assert len(fake.unloads) == len(fake.loads) == 3


def test_model_of_a_peer_evicts_the_model_whose_part_it_holds_on_the_lead() -> None:
    fake = sharing_fleet(y=20 * GB)
    running = fake.ask("a")
    got = fake.ask("y")
    assert fake.unloads == [], "it is busy on its lead"
    fake.dispatcher.release(lease_of(running))
    assert fake.unloads == [("n", "a", "evicted")]
    assert fake.ask("a") == []
    fake.finish_unload()
    assert fake.loads == [("m", "y")], "as the order says, whatever the last poll of the peer shows"
    fake.finish_load()
    assert node_of(got) == "m"


def test_overdue_model_of_a_peer_closes_the_model_whose_part_it_holds() -> None:
    fake = sharing_fleet(y=20 * GB)
    fake.ask("a")
    fake.ask("y")
    fake.now += 31
    fake.poll()
    assert fake.ask("a") == []


def test_model_takes_no_requests_while_a_node_with_a_part_of_it_is_drained() -> None:
    fake = sharing_fleet()
    fake.operator.drain("m", drained=True)
    (refused,) = fake.ask("a")
    assert isinstance(refused, UpstreamUnavailable)
    assert "m has a part of it, and is drained by the operator" in refused.message
    fake.operator.drain("m", drained=False)
    assert node_of(fake.ask("a")) == "n"


def test_two_missed_polls_do_not_take_a_node_down() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    fake.dispatcher.missed("n", "timeout")
    fake.dispatcher.missed("n", "timeout")
    assert node_of(fake.ask("a")) == "n"


def test_rejects_at_once_when_the_only_node_is_down() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    for _ in range(3):
        fake.dispatcher.missed("n", "connection refused")
    assert isinstance(fake.ask("a")[0], UpstreamUnavailable)


def test_suspected_node_gets_no_request_until_a_poll_succeeds() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    fake.dispatcher.request_failed("n", "connection reset")
    got = fake.ask("a")
    assert got == []
    assert fake.polls == ["n"]
    fake.poll()
    assert node_of(got) == "n"


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


def test_evicted_model_sleeps_and_wakes_for_a_request() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}})
    events: list[dict[str, Any]] = []
    fake.event_log.subscribe(events.append)
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    for newcomer, victim in (("b", "a"), ("a", "b"), ("b", "a")):
        got = fake.ask(newcomer)
        assert (fake.unloads[-1], fake.parks[-1]) == (("n", victim, "evicted"), True)
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
    assert fake.parks == [True]
    fake.now += 2
    fake.poll()
    fake.dispatcher.tick()
    assert (fake.unloads, fake.parks) == ([("n", "a", "ttl")] * 2, [True, False])
    fake.finish_unload()
    assert fake.status("n", "a").state is ModelState.COLD


def test_operator_puts_to_sleep_then_unloads() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    assert fake.operator.unload("a", sleep=True) == ("n",)
    fake.finish_unload(asleep=True)
    assert fake.operator.unload("a") == ("n",)
    assert fake.parks == [True, False]


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


def test_request_fails_after_max_wait_with_the_reason() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}}, max_wait_s=100)
    fake.ready["n"]["a"] = 900.0
    fake.running["n", "a"] = 1
    fake.poll()
    got = fake.ask("b")
    fake.now += 101
    fake.dispatcher.tick()
    assert isinstance(got[0], Overloaded)
    assert "busy" in got[0].message
    assert fake.dispatcher.queue_depths == {}


def test_cancelled_request_is_not_delivered_and_leaves_no_queue() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.poll()
    got: list[Lease | CortexError] = []
    pending = PendingRequest("a", bytes, got.append, fake.now)
    fake.dispatcher.request_lease(pending)
    fake.dispatcher.cancel(pending)
    fake.finish_load()
    assert got == []
    assert fake.dispatcher.queue_depths == {}
    assert fake.dispatcher.in_flight == {}


def test_spreads_requests_over_replicas_by_load() -> None:
    fake = FakeFleet({"n": {"a": GB}, "m": {"a": GB}})
    fake.ready["n"]["a"] = fake.ready["m"]["a"] = 900.0
    fake.poll()
    assert sorted(node_of(fake.ask("a")) for _ in range(4)) == ["m", "m", "n", "n"]


def test_watcher_is_called_when_the_load_ends() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.poll()
    outcomes: list[CortexError | None] = []
    assert fake.operator.load("a").node == "n"
    fake.dispatcher.watch(ModelOnNode("n", "a"), "load", outcomes.append)
    fake.finish_load()
    assert outcomes == [None]


def test_watchers_of_a_load_and_of_an_unload_get_their_own_outcome() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.poll()
    fake.operator.load("a")
    loaded: list[CortexError | None] = []
    unloaded: list[CortexError | None] = []
    target = ModelOnNode("n", "a")
    fake.dispatcher.watch(target, "unload", unloaded.append)
    fake.finish_load()
    assert unloaded == [], "the end of a load is not that of an unload"
    fake.dispatcher.watch(target, "load", loaded.append)
    fake.operator.unload("a")
    fake.finish_unload()
    assert unloaded == [None]
    assert [type(error) for error in loaded] == [LoadFailed], "the model is not loaded"


def test_repeated_decision_is_recorded_once() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}})
    fake.ready["n"]["a"] = 900.0
    fake.running["n", "a"] = 1
    fake.poll()
    fake.ask("b")
    fake.poll()
    fake.poll()
    recorded = fake.event_log.decisions
    assert [(each["model"], each["action"]) for each in recorded] == [("b", "wait")]
    assert recorded[0]["nodes"][0]["occupants"][0]["reason"] == "busy with 1 request"


def test_reload_that_removes_the_node_fails_waiting_requests() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.poll()
    got = fake.ask("a")
    fake.dispatcher.reconfigure(fake.settings())
    fake.dispatcher.tick()
    assert isinstance(got[0], CortexError)


def test_counters_return_to_zero() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    leases = [lease_of(fake.ask("a")) for _ in range(10)]
    for lease in leases:
        fake.dispatcher.release(lease)
    assert fake.dispatcher.in_flight == {}


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
        fake.dispatcher.missed("n", "no answer")
    fake.dispatcher.tick()
    assert len(fake.recycled) == 1
    fake.poll()
    fake.dispatcher.tick()
    assert len(fake.recycled) == 2
