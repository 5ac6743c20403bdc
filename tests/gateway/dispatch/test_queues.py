"""Order, bounds and removal of waiting requests."""

from __future__ import annotations

from typing import Literal

import pytest

from cortex.fleet.demand import Demand
from cortex.gateway.dispatch.leases import PendingRequest
from cortex.gateway.dispatch.queues import Queues
from cortex.system.fair_turns import DEFAULT, FLEX, IDLE, PRIORITY
from cortex.wire.errors import Overloaded

from ..fake_fleet import GB, FakeFleet


def pending(
    model: str = "a",
    *,
    since: float = 0.0,
    origin: Literal["request", "background"] = "request",
    level: int = DEFAULT,
) -> PendingRequest:
    return PendingRequest(model, lambda: b"", lambda result: None, since, origin=origin, level=level)


@pytest.fixture
def queues() -> Queues:
    queues = Queues(Demand())
    queues.max_waiting = 3
    queues.max_wait_s = 10.0
    return queues


def test_each_model_has_its_own_queue(queues: Queues) -> None:
    first, second, other = pending(), pending(), pending("b")
    for each in (first, second, other):
        queues.join(each)
    assert queues.depths == {"a": 2, "b": 1}
    assert queues.first("a", 0.0) is first
    queues.leave(first)
    queues.leave(first)
    assert queues.first("a", 0.0) is second
    queues.leave(second)
    assert queues.first("a", 0.0) is None
    assert queues.models == ("b",)
    assert "a" not in queues


def test_full_queue_rejects_and_stays_unchanged(queues: Queues) -> None:
    for _ in range(3):
        queues.join(pending())
    with pytest.raises(Overloaded, match="3 requests wait for a"):
        queues.join(pending())
    queues.max_waiting = 0
    with pytest.raises(Overloaded):
        queues.join(pending("b"))
    assert queues.depths == {"a": 3}


def test_join_may_change_a_decision_only_if_no_client_request_waits(queues: Queues) -> None:
    assert queues.join(pending(origin="background"))
    assert queues.join(pending())
    assert not queues.join(pending())


def test_overdue_requests_are_removed_one_by_one(queues: Queues) -> None:
    late, later, punctual = pending(since=0.0), pending(since=1.0), pending(since=5.0)
    for each in (late, later, punctual):
        queues.join(each)
    overdue = queues.overdue(12.0)
    assert next(overdue) is late
    queues.leave(later)  # its client disconnected meanwhile
    assert list(overdue) == []
    assert queues.first("a", 0.0) is punctual


def test_remove_all_empties_the_queue_before_it_returns(queues: Queues) -> None:
    first, second = pending(), pending()
    queues.join(first)
    queues.join(second)
    assert list(queues.remove_all("a")) == [first, second]
    assert not queues
    assert list(queues.remove_all("a")) == []


def test_queue_counts_as_its_most_urgent_origin_and_oldest_request(queues: Queues) -> None:
    queues.join(pending(since=3.0, origin="background"))
    queues.join(pending(since=4.0))
    [waiting] = queues.waiting()
    assert (waiting.model_id, waiting.since, waiting.count, waiting.origin) == ("a", 3.0, 2, "request")


def test_higher_class_is_served_first_and_a_long_wait_raises_a_lower_one(queues: Queues) -> None:
    idle, flex = pending(level=IDLE), pending(since=1.0, level=FLEX)
    queues.join(flex)
    queues.join(idle)
    urgent = pending(since=50.0, level=PRIORITY)
    queues.join(urgent)
    assert queues.first("a", 55.0) is urgent
    assert queues.first("a", 130.0) is flex, "it waited for two minutes"
    assert queues.by_class("a") == {"idle": 1, "flex": 1, "priority": 1}
    queues.leave(urgent)
    assert queues.first("a", 55.0) is flex
    assert queues.waiting()[0].since == 0.0


def test_work_that_can_wait_leaves_places_in_the_queue(queues: Queues) -> None:
    queues.max_waiting = 4
    for _ in range(3):
        queues.join(pending(level=IDLE))
    with pytest.raises(Overloaded):
        queues.join(pending(level=FLEX))
    queues.join(pending())


def test_dispatcher_says_what_waits_in_which_class() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.poll()
    fake.ask("a")
    fake.dispatcher.request_lease(pending(since=fake.now, level=IDLE))
    assert fake.dispatcher.queued("a") == {"": {"idle": 1, "default": 1}}
