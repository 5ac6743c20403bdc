"""The decisions of the dispatcher, event by event: which node a request gets, and when."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.placement.explain import DRAINING_RETRY_S
from cortex.fleet.topology import ModelOnNode
from cortex.gateway.dispatch.leases import Lease, PendingRequest
from cortex.wire.errors import CortexError, Draining, LoadFailed, Overloaded, UpstreamUnavailable

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
        (ModelSpec(id="a", tensor_parallel=2), (2, 1)),
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


def test_request_waits_for_a_node_that_starts_after_the_gateway() -> None:
    fake = FakeFleet({"n": {"a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a"),)))
    for _ in range(5):
        fake.dispatcher.missed("n", "connection refused")
    got = fake.ask("a")
    fake.now += 20
    fake.dispatcher.tick()
    assert got == []
    fake.ready["n"]["a"] = fake.now
    fake.poll()
    assert node_of(got) == "n"


def test_request_fails_when_a_node_has_not_started_within_the_fair_wait() -> None:
    fake = FakeFleet({"n": {"a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a"),)))
    for _ in range(5):
        fake.dispatcher.missed("n", "connection refused")
    got = fake.ask("a")
    fake.now += fake.rules.fair_wait_s
    fake.dispatcher.tick()
    [error] = got
    assert isinstance(error, UpstreamUnavailable)
    [error] = fake.ask("a")
    assert isinstance(error, UpstreamUnavailable), "later requests do not wait for it"


def test_one_poll_after_restart_restores_the_fleet() -> None:
    fake = FakeFleet({"n": {"a": GB}, "m": {"b": GB}})
    fake.ready["m"]["b"] = 900.0
    fake.poll()
    assert node_of(fake.ask("b")) == "m"
    assert not fake.loads


def sharing_fleet(**sizes: int) -> FakeFleet:
    """Models `a` and `b` take 15 GB on each of two nodes of 24 GB; `a` is ready. `y` is a model of the second node."""
    specs = tuple(ModelSpec(id=model, harness="vllm", nodes=("n", "m")) for model in "ab")
    fake = FakeFleet(
        {"n": {"a": 15 * GB, "b": 15 * GB}, "m": sizes},
        catalogue=Catalogue(models=specs),
        spans=dict.fromkeys("ab", ("n", "m")),
    )
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    return fake


def test_smallest_ceiling_of_its_nodes_limits_every_member_of_a_group() -> None:
    catalogue = Catalogue(models=(ModelSpec(id="a", harness="vllm", nodes=("n", "m")),))
    fake = FakeFleet({"n": {"a": 6 * GB}, "m": {}}, catalogue=catalogue, spans={"a": ("n", "m")})
    settings = fake.settings("n", "m")
    limited = tuple(
        msgspec.structs.replace(each, memory_mb=ceiling >> 20)
        for each, ceiling in zip(settings.neurons, (9 * GB, 8 * GB), strict=True)
    )
    fake.dispatcher.reconfigure(replace(settings, neurons=limited))
    fake.poll()
    fake.ask("a")
    (request,) = fake.load_requests
    assert (request.tensor_parallel, request.max_bytes) == (1, 8 * GB)


def test_group_that_is_lost_is_started_again_and_one_that_was_unloaded_is_not() -> None:
    fake = sharing_fleet()
    fake.ready["n"].clear()
    fake.poll()
    fake.dispatcher.tick()
    assert fake.loads == [("n", "a")], "nobody asked for it"
    fake.finish_load()
    fake.poll()
    fake.dispatcher.unload(ModelOnNode("n", "a"), force=False, sleep=False)
    fake.finish_unload()
    fake.poll()
    fake.dispatcher.tick()
    assert fake.loads == [("n", "a")]


def test_group_whose_node_went_down_is_started_again_when_that_is_back() -> None:
    fake = sharing_fleet()
    for _ in range(3):
        fake.dispatcher.missed("n", "connection refused")
    fake.dispatcher.tick()
    assert fake.loads == []
    fake.ready["n"].clear()
    fake.poll()
    fake.dispatcher.tick()
    assert fake.loads == [("n", "a")]


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
    assert isinstance(refused, Draining)
    assert "m runs a part of it, and is drained by the operator" in refused.message
    fake.operator.drain("m", drained=False)
    assert node_of(fake.ask("a")) == "n"


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


def test_model_that_the_catalogue_no_longer_names_is_forgotten_by_its_nodes() -> None:
    fake = FakeFleet({"n": {"a": GB, "own": GB}, "m": {"b": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a"),)))
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    fake.dispatcher.reconfigure(fake.settings("n", "m"))
    assert fake.forgotten == []
    fake.catalogue = Catalogue()
    fake.dispatcher.reconfigure(fake.settings("n", "m"))
    assert fake.forgotten == [("n", "a")]


def test_counters_return_to_zero() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    leases = [lease_of(fake.ask("a")) for _ in range(10)]
    for lease in leases:
        fake.dispatcher.release(lease)
    assert fake.dispatcher.in_flight == {}


def test_request_for_the_only_copy_on_a_drained_node_fails_at_once_and_may_be_sent_again() -> None:
    fake = FakeFleet({"n": {"a": GB}, "m": {"a": GB}})
    fake.ready["n"]["a"] = fake.now
    fake.poll()
    fake.operator.drain("n", drained=True)
    fake.operator.drain("m", drained=True)
    (error,) = fake.ask("a")
    assert isinstance(error, Draining)
    assert error.retry_after_s == DRAINING_RETRY_S
    assert "cortex undrain n" in error.message
    fake.operator.drain("n", drained=False)
    assert node_of(fake.ask("a")) == "n"


def test_request_waits_for_a_node_that_restarts_while_another_is_drained() -> None:
    fake = FakeFleet({"n": {"a": GB}, "m": {"a": GB}})
    fake.ready["n"]["a"] = fake.ready["m"]["a"] = fake.now
    fake.poll()
    fake.operator.drain("m", drained=True)
    for _ in range(3):
        fake.dispatcher.missed("n", "connection refused")
    waiting = fake.ask("a")
    assert waiting == []
    fake.poll("n")
    assert node_of(waiting) == "n"


def test_waiting_requests_fail_when_the_last_node_that_could_serve_them_is_drained() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.ready["n"]["a"] = fake.now
    fake.poll()
    for _ in range(3):
        fake.dispatcher.missed("n", "connection refused")
    waiting = fake.ask("a")
    assert waiting == []
    fake.operator.drain("n", drained=True)
    fake.dispatcher.tick()
    (error,) = waiting
    assert isinstance(error, Draining)


def test_request_for_the_only_copy_on_a_node_that_is_down_fails_after_the_fair_wait() -> None:
    fake = FakeFleet({"n": {"a": GB}, "m": {"b": GB}})
    fake.ready["n"]["a"] = fake.now
    fake.poll()
    for _ in range(3):
        fake.dispatcher.missed("n", "connection refused")
    first = fake.ask("a")
    fake.now += 20
    second = fake.ask("a")
    fake.now += 15
    fake.dispatcher.tick()
    [error] = first
    assert isinstance(error, UpstreamUnavailable)
    assert second == [], "each request has the time for itself"
    fake.poll("n")
    assert node_of(second) == "n"


def test_request_does_not_wait_for_a_node_that_is_down_and_does_not_have_the_model() -> None:
    fake = FakeFleet({"n": {"a": GB}, "m": {"b": 100 * GB}})
    fake.poll()
    for _ in range(3):
        fake.dispatcher.missed("n", "connection refused")
    [error] = fake.ask("b")
    assert isinstance(error, CortexError)


def test_tokens_that_only_a_node_that_is_down_could_count_can_be_asked_for_again() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.poll()
    got: list[Lease | CortexError] = []
    counting = PendingRequest("a", bytes, got.append, fake.now, need="count")
    for _ in range(3):
        fake.dispatcher.missed("n", "connection refused")
    with pytest.raises(Overloaded, match="are down"):
        fake.dispatcher.request_lease(counting)
    fake.poll()
    fake.dispatcher.request_lease(counting)
    assert node_of(got) == "n"
