"""What the dispatcher does when loads, unloads and nodes fail."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cortex.fleet.catalogue import Alias, Catalogue, ModelSpec
from cortex.fleet.rules import EvictionRules
from cortex.fleet.topology import ModelOnNode, Residency
from cortex.gateway.dispatch.leases import Lease
from cortex.wire.errors import CortexError, InsufficientCapacity, LoadFailed, UpstreamUnavailable
from cortex.wire.node.protocol import ModelState

from ..fake_fleet import GB, FakeFleet, lease_of, node_of


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


@pytest.mark.parametrize("is_joined", [False, True])
def test_out_of_memory_evicts_nothing_for_background_requests(is_joined: bool) -> None:
    catalogue = Catalogue(models=(ModelSpec(id="a"),), aliases={"bg": Alias("a", background=True)})
    fake = FakeFleet({"n": {"old": 4 * GB, "a": GB}}, catalogue=catalogue)
    fake.ready["n"]["old"] = 900.0
    fake.poll()
    got = fake.ask("bg")
    joined = fake.ask("a") if is_joined else []
    fake.failed.add(("n", "a"))
    fake.poll()
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), InsufficientCapacity("out of memory"))
    assert fake.unloads == ([("n", "old", "evicted")] if is_joined else [])
    assert joined == []
    if not is_joined:
        (error,) = got
        assert isinstance(error, CortexError)
        assert "background requests evict nothing" in error.message
        assert fake.ask("a") == []
        assert fake.unloads == [("n", "old", "evicted")], "a client's request is not held up by what failed before"


def test_out_of_memory_of_a_manual_model_that_the_operator_loads_is_retried() -> None:
    fake = FakeFleet({"n": {"old": 4 * GB, "a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a", load="manual"),)))
    fake.ready["n"]["old"] = 900.0
    fake.poll()
    fake.dispatcher.start_load(fake.dispatcher.explain("a", "operator"))
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), InsufficientCapacity("out of memory"))
    assert fake.unloads == [("n", "old", "evicted")]


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


def test_requests_wait_while_another_program_has_the_memory_that_a_load_lacked() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB}})
    fake.poll()
    got = fake.ask("a")
    fake.foreign_bytes = 10 * GB  # it was faster
    fake.poll()
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), InsufficientCapacity("out of memory"))
    assert got == []
    fake.now += 2
    fake.foreign_bytes = 0
    fake.poll()
    assert fake.loads == [("n", "a")] * 2
    fake.finish_load()
    assert node_of(got) == "n"


@pytest.mark.parametrize("reports_failure", [False, True])
def test_load_that_lacked_memory_is_tried_again_once_there_is_more(reports_failure: bool) -> None:
    fake = FakeFleet({"n": {"a": 20 * GB}})
    fake.foreign_bytes = 3 * GB
    fake.poll()
    got = fake.ask("a")
    if reports_failure:
        fake.failed.add(("n", "a"))
        fake.failure_code = InsufficientCapacity.code
    for _ in range(2):
        fake.dispatcher.load_ended(ModelOnNode("n", "a"), InsufficientCapacity("out of memory"))
        fake.foreign_bytes = 0
        fake.poll()
    assert isinstance(got[0], LoadFailed)
    fake.foreign_bytes = 3 * GB
    for _ in range(5):
        fake.now += 1
        fake.poll()
    assert isinstance(fake.ask("a")[0], LoadFailed), "there is no more than before"
    fake.total_bytes = 30 * GB
    fake.now += 1
    fake.poll()
    assert fake.ask("a") == []
    assert len(fake.loads) == 3


def test_failure_of_another_kind_lasts_whatever_is_free() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.foreign_bytes = 3 * GB
    fake.poll()
    fake.ask("a")
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), LoadFailed("broken disk"))
    fake.now += 5
    fake.foreign_bytes = 0
    fake.poll()
    assert isinstance(fake.ask("a")[0], LoadFailed)


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
    spec = ModelSpec(id="a", harness="vllm", nodes=("n", "m"))
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
    fake.now += 31
    fake.dispatcher.tick()
    assert isinstance(got[0], UpstreamUnavailable)
    fake.finish_unload()
    assert fake.loads == []


def test_two_missed_polls_do_not_take_a_node_down() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    fake.dispatcher.missed("n", "timeout")
    fake.dispatcher.missed("n", "timeout")
    assert node_of(fake.ask("a")) == "n"


@pytest.mark.parametrize("was_up", [True, False])
def test_node_that_is_down_is_logged_once(was_up: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fake = FakeFleet({"n": {"a": GB}})
    if was_up:
        fake.poll()
    for _ in range(6):
        fake.dispatcher.missed("n", "connection refused")
    assert [record.message for record in caplog.records].count("node down") == 1


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


def test_reason_of_a_failed_load_stays_after_it_may_be_tried_again() -> None:
    fake = FakeFleet({"n": {"a": GB}}, rules=EvictionRules(retry_failed_after_s=30))
    fake.poll()
    fake.ask("a")
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), LoadFailed("broken disk"))
    assert _held(fake).state is ModelState.FAILED
    fake.now += 31
    fake.dispatcher.tick()
    assert (_held(fake).state, _held(fake).failure) == (ModelState.COLD, "broken disk")
    fake.now += 3600
    fake.poll()
    assert _held(fake).failure == "broken disk"
    fake.ask("a")
    fake.finish_load()
    fake.poll()
    assert (_held(fake).state, _held(fake).failure) == (ModelState.READY, None)


@pytest.mark.parametrize("is_asleep", [False, True])
def test_reason_of_a_failed_load_is_gone_once_the_node_reports_that_the_model_was_loaded(is_asleep: bool) -> None:
    fake = FakeFleet({"n": {"a": GB}}, rules=EvictionRules(retry_failed_after_s=30))
    fake.poll()
    fake.ask("a")
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), LoadFailed("broken disk"))
    fake.now += 31
    since = fake.asleep if is_asleep else fake.ready["n"]
    key: Any = ("n", "a") if is_asleep else "a"
    since[key] = fake.now  # another gateway had it loaded
    fake.poll()
    del since[key]
    fake.poll()
    assert (_held(fake).state, _held(fake).failure) == (ModelState.COLD, None)


def test_model_that_cannot_wake_is_not_tried_again_at_once() -> None:
    fake = FakeFleet({"n": {"a": GB}}, rules=EvictionRules(retry_failed_after_s=30))
    fake.asleep["n", "a"] = fake.now
    fake.poll()
    fake.now += 1
    fake.ask("a")
    fake.dispatcher.load_ended(ModelOnNode("n", "a"), LoadFailed("broken device"))
    fake.now += 1
    fake.poll()
    assert (_held(fake).state, _held(fake).failure) == (ModelState.FAILED, "broken device")


def _held(fake: FakeFleet) -> Residency:
    (node,) = fake.dispatcher.fleet.nodes
    return node.residencies["a"]
