"""When nodes are suspended and woken, through the dispatcher."""

from __future__ import annotations

import msgspec
import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.sleeping import WakeRules
from cortex.gateway.dispatch.leases import PendingRequest
from cortex.wire.errors import CortexError, ModelInUse, UpstreamUnavailable
from cortex.wire.node.protocol import ModelState

from ..fake_fleet import GB, FakeFleet, lease_of, node_of

RULES = WakeRules(mac="0a:1b:2c:3d:4e:5f", suspend_after_s=600, timeout_s=120)


def fleet(rules: WakeRules = RULES, **more: object) -> FakeFleet:
    """`a` fits everywhere and is ready on `big`, `huge` fits only there."""
    fake = FakeFleet(
        {"small": {"a": 10 * GB}, "big": {"a": 10 * GB, "huge": 20 * GB}},
        wakes={"big": rules},
        **more,  # type: ignore[arg-type]
    )
    fake.ready["big"]["a"] = fake.now
    fake.poll()
    fake.dispatcher.tick()
    return fake


def idle(fake: FakeFleet, seconds: float) -> None:
    fake.now += seconds
    fake.poll()
    fake.dispatcher.tick()


def asleep(fake: FakeFleet) -> FakeFleet:
    idle(fake, 601)
    fake.dispatcher.suspend_ended("big", None)
    for _ in range(3):
        fake.dispatcher.missed("big", "no route to host")
    fake.poll("small")
    return fake


def state(fake: FakeFleet, node: str = "big") -> str:
    found = fake.dispatcher.fleet.node(node)
    assert found is not None
    return found.sleep


def events(fake: FakeFleet) -> list[str]:
    return [event["kind"] for event in reversed(fake.event_log.events) if "node" in event["kind"]]


def test_idle_node_is_suspended_once_and_gets_no_requests_from_then_on() -> None:
    fake = fleet()
    idle(fake, 590)
    assert fake.suspended == []
    idle(fake, 11)
    assert fake.suspended == ["big"]
    got = fake.ask("a")
    assert (got, fake.loads) == ([], [("small", "a")]), "it is not sent to a node that is about to sleep"
    idle(fake, 1)
    assert fake.suspended == ["big"]
    fake.dispatcher.suspend_ended("big", None)
    for _ in range(5):
        fake.dispatcher.missed("big", "no route to host")
    assert state(fake) == "asleep"
    assert "node_down" not in events(fake)


def test_use_of_a_model_keeps_its_node_awake() -> None:
    fake = fleet()
    idle(fake, 500)
    fake.dispatcher.release(lease_of(fake.ask("a")))
    fake.ready["big"]["a"] = fake.now  # the node says that it was used
    idle(fake, 500)
    assert fake.suspended == []
    fake.running["big", "a"] = 1
    idle(fake, 5000)
    assert fake.suspended == [], "never under a request, of whichever gateway"


@pytest.mark.parametrize("pinned_on", [("big",), ()])
def test_node_with_a_pinned_model_is_not_suspended(pinned_on: tuple[str, ...]) -> None:
    spec = ModelSpec(id="a", load="pinned", pinned_on=pinned_on)
    fake = fleet(catalogue=Catalogue(models=(spec,)))
    idle(fake, 5000)
    assert fake.suspended == []


def test_as_many_nodes_as_configured_stay_awake() -> None:
    fake = FakeFleet({"one": {"a": GB}, "two": {"a": GB}}, wakes={"one": RULES, "two": RULES})
    fake.poll()
    fake.dispatcher.tick()
    idle(fake, 700)
    assert fake.suspended == ["one"]


def test_node_that_refuses_serves_again() -> None:
    fake = fleet()
    idle(fake, 601)
    fake.dispatcher.suspend_ended("big", ModelInUse("it downloads a model"))
    fake.poll()
    assert state(fake) == "awake"
    assert node_of(fake.ask("a")) == "big"


def test_request_that_only_a_sleeping_node_can_serve_wakes_it_and_learns_how_long_that_takes() -> None:
    fake = asleep(fleet())
    told: list[float] = []
    got: list[object] = []
    pending = PendingRequest("huge", bytes, got.append, fake.now, tell=told.append)
    fake.dispatcher.request_lease(pending)
    assert (fake.woken, told, got) == (["big"], [60.0], [])
    fake.now += 20
    fake.poll("small")
    fake.dispatcher.tick()
    assert fake.woken == ["big", "big"], "a packet may be lost on the way"
    assert got == [], "it waits, although no node can serve it now"
    fake.now += 20
    fake.poll("big")
    assert state(fake) == "awake"
    assert fake.unloads == [("big", "a", "evicted")]
    fake.finish_unload()
    assert fake.loads == [("big", "huge")]
    fake.finish_load()
    assert len(got) == 1
    assert events(fake)[-2:] == ["node_woken", "node_up"]


def test_reason_of_waiting_requests_says_that_their_node_is_being_woken() -> None:
    fake = asleep(fleet())
    fake.ask("huge")
    fake.dispatcher.tick()
    reason = fake.event_log.why_waiting("huge")
    assert reason is not None
    assert "waking up" in reason["outcome"], reason["outcome"]


def test_sleeping_node_is_listed_as_one_that_could_serve_until_it_is_lost() -> None:
    fake = asleep(fleet())
    assert fake.dispatcher.feasibility().nodes("huge") == ("big",)
    fake.ask("huge")
    fake.now += 121
    fake.poll("small")
    fake.dispatcher.tick()
    assert state(fake) == "lost"
    assert fake.dispatcher.feasibility().nodes("huge") == ()


def test_model_on_a_sleeping_node_is_shown_as_suspended_and_not_as_unreachable() -> None:
    fake = asleep(fleet())
    big = fake.dispatcher.fleet.node("big")
    assert big is not None
    assert big.shown_state(big.residencies["a"]) is ModelState.SUSPENDED
    lost = msgspec.structs.replace(big, sleep="lost")
    assert lost.shown_state(lost.residencies["a"]) is ModelState.UNREACHABLE
    up = msgspec.structs.replace(big, sleep="awake", healthy=True)
    assert up.shown_state(up.residencies["a"]) is ModelState.READY


def test_expected_wait_is_learned() -> None:
    fake = asleep(fleet())
    got = fake.ask("huge")
    fake.now += 10
    fake.poll("big")
    fake.finish_unload()
    fake.finish_load()
    fake.dispatcher.release(lease_of(got))
    idle(fake, 1)
    idle(fake, 700)
    fake.dispatcher.suspend_ended("big", None)
    fake.dispatcher.missed("big", "gone")
    (problem,) = [each.reason for each in fake.dispatcher.explain("huge").assessments if each.node == "big"]
    assert "asleep" in problem
    assert "45 s" in problem


def test_expected_wait_is_not_longer_than_the_wait_for_a_node() -> None:
    fake = asleep(fleet(msgspec.structs.replace(RULES, timeout_s=25)))
    told: list[float] = []
    fake.dispatcher.request_lease(PendingRequest("huge", bytes, lambda _: None, fake.now, tell=told.append))
    assert told == [25.0]


def test_request_that_a_node_which_is_awake_can_serve_wakes_nobody() -> None:
    fake = asleep(fleet())
    fake.ask("a")
    assert (fake.woken, fake.loads) == ([], [("small", "a")])


def test_ready_model_on_a_sleeping_node_wakes_it_where_no_other_node_has_room() -> None:
    fake = fleet(total_bytes=24 * GB)
    fake.foreign_bytes = 20 * GB
    asleep(fake)
    got = fake.ask("a")
    assert (fake.woken, got) == (["big"], [])


def test_command_that_fails_after_its_node_responded_loses_no_node() -> None:
    fake = asleep(fleet())
    fake.ask("huge")
    fake.now += 30
    fake.poll("big")
    fake.dispatcher.wake_failed("big", UpstreamUnavailable("`ipmitool` failed"))
    assert state(fake) == "awake"
    assert "node_lost" not in events(fake)


@pytest.mark.parametrize("how", ["timeout", "command"])
def test_node_that_does_not_come_back_is_reported_and_routed_around(how: str) -> None:
    fake = asleep(fleet())
    got = fake.ask("huge")
    if how == "command":
        fake.dispatcher.wake_failed("big", UpstreamUnavailable("`ipmitool` failed"))
    else:
        fake.now += 121
        fake.poll("small")
        fake.dispatcher.tick()
    assert state(fake) == "lost"
    assert "node_lost" in events(fake)
    fake.now += 60
    fake.poll("small")
    fake.dispatcher.tick()
    assert isinstance(got[0], CortexError)
    assert fake.ask("a") == []
    assert fake.loads[-1] == ("small", "a")
    fake.poll("big")
    assert state(fake) == "awake", "whenever it responds"


def test_node_that_is_woken_by_somebody_else_serves_again() -> None:
    fake = asleep(fleet())
    fake.poll("big")
    assert state(fake) == "awake"
    assert node_of(fake.ask("a")) == "big"


def test_node_that_still_responds_is_not_awake_again_until_it_has_had_time_to_sleep() -> None:
    fake = fleet()
    idle(fake, 601)
    fake.dispatcher.suspend_ended("big", None)
    fake.now += 5
    fake.poll("big")
    assert state(fake) == "asleep"
    fake.now += 31
    fake.poll("big")
    assert state(fake) == "awake"
    assert events(fake)[-1] == "node_not_suspended"


@pytest.mark.parametrize("how", ["it goes down", "it is changed"])
def test_node_whose_response_to_the_order_to_sleep_is_lost_counts_as_asleep(how: str) -> None:
    fake = fleet()
    idle(fake, 601)
    ends: list[object] = []
    fake.dispatcher.when_awake("big", ends.append)
    if how == "it is changed":
        fake.dispatcher.reconfigure(fake.settings(*fake.sizes, endpoint="http://y"))
    for _ in range(3):
        fake.dispatcher.missed("big", "no route to host")
    fake.dispatcher.tick()
    assert (state(fake), fake.woken) == ("waking", ["big"]), "for the order"
    fake.dispatcher.suspend_ended("big", UpstreamUnavailable("no response"))
    assert (state(fake), ends) == ("waking", [])
    fake.poll("big")
    assert (state(fake), ends) == ("awake", [None])


def test_node_that_went_down_while_it_was_told_to_sleep_is_woken_for_a_request() -> None:
    fake = fleet()
    idle(fake, 601)
    for _ in range(3):
        fake.dispatcher.missed("big", "no route to host")
    assert state(fake) == "asleep"
    fake.ask("huge")
    assert fake.woken == ["big"]
    fake.poll("big")
    assert state(fake) == "awake"


def test_node_that_another_gateway_has_suspended_is_woken_for_a_request() -> None:
    fake = fleet()
    for _ in range(3):
        fake.dispatcher.missed("big", "no route to host")
    fake.poll("small")
    assert (state(fake), fake.woken) == ("asleep", [])
    assert "node_down" in events(fake), "this gateway does not know why"
    (problem,) = [each.reason for each in fake.dispatcher.explain("huge").assessments if each.node == "big"]
    assert "may be asleep" in problem
    fake.ask("huge")
    fake.poll("small")
    assert (state(fake), fake.woken) == ("waking", ["big"])
    fake.poll("big")
    assert state(fake) == "awake"


def test_gateway_that_starts_wakes_a_node_of_which_it_knows_nothing() -> None:
    fake = FakeFleet({"small": {"a": GB}, "big": {"a": GB}}, wakes={"big": RULES})
    fake.poll("small")
    for _ in range(3):
        fake.dispatcher.missed("big", "no route to host")
    fake.dispatcher.tick()
    assert (state(fake), fake.woken) == ("waking", ["big"])
    fake.now += 121
    fake.poll("small")
    fake.dispatcher.tick()
    fake.dispatcher.missed("big", "no route to host")
    assert (state(fake), fake.woken) == ("lost", ["big"]), "it is tried once"
