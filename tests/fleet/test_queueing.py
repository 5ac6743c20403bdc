from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.devices import DeviceState
from cortex.fleet.queueing import Plan, Waiting, plan, turns
from cortex.fleet.rules import EvictionRules
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.wire.node.protocol import ModelState, ModelStatus

GIB = 1024**3
NOW = 10_000.0
Make = Callable[..., Any]


def waits(name: str, waited_s: float = 1.0, **facts: Any) -> Waiting:
    return Waiting(model_id=name, since=NOW - waited_s, **facts)


def test_starts_waiting_models_that_fit_together(node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("n", [24]), specs=[spec("a", 8), spec("b", 8)])
    found = plan([waits("a"), waits("b")], snapshot, NOW)
    assert [decision.model_id for decision in found.starts] == ["a", "b"]


def test_starts_do_not_compete_for_the_same_bytes(node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("n", [24]), specs=[spec("a", 20), spec("b", 20)])
    found = plan([waits("b", 1), waits("a", 2)], snapshot, NOW)
    assert [decision.model_id for decision in found.starts] == ["a"]
    assert [decision.model_id for decision in found.waits] == ["b"]
    assert not found.rejections


def test_two_newcomers_do_not_evict_the_same_model_twice(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("n", [24], model("old", 20)), specs=[spec("a", 20), spec("b", 20)])
    found = plan([waits("a", 2), waits("b", 1)], snapshot, NOW)
    assert [(decision.model_id, decision.victims) for decision in found.starts] == [("a", ("old",))]
    assert [decision.model_id for decision in found.waits] == ["b"]


@pytest.mark.parametrize(
    ("waited_s", "occupant", "origin", "closed"),
    [
        (29, {"running": 1}, "request", set()),
        (30, {"running": 1}, "request", {("n", "old")}),
        (30, {"in_flight": 4}, "request", {("n", "old")}),
        (30, {"running": 1, "age_s": 5}, "request", set()),
        (30, {"running": 1, "pinned": True}, "request", set()),
        (30, {"running": 1}, "background", set()),
    ],
)
def test_overdue_model_closes_models_that_block_it(
    model: Make, node: Make, fleet: Make, spec: Make, waited_s: float, occupant: Any, origin: Any, closed: Any
) -> None:
    snapshot = fleet(node("n", [24], model("old", 20, **occupant)), specs=[spec("new", 20)])
    found = plan([waits("new", waited_s, origin=origin)], snapshot, NOW)
    assert found.closed == closed
    assert not found.starts


def test_closes_no_more_models_than_the_longest_waiting_one_needs(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    cold, warm = model("cold", 10, running=1, idle_s=9), model("warm", 10, running=1, idle_s=1)
    snapshot = fleet(node("n", [24], cold, warm), specs=[spec("new", 12), spec("other", 12)])
    found = plan([waits("other", 40), waits("new", 50)], snapshot, NOW)
    assert found.closed == {("n", "cold")}
    assert [decision.model_id for decision in found.waits] == ["new", "other"]


def test_rejects_models_that_never_fit(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    snapshot = fleet(node("n", [24], model("old", 20, pinned=True)), specs=[spec("new", 20), spec("huge", 90)])
    found = plan([waits("new"), waits("huge")], snapshot, NOW)
    assert {decision.model_id for decision in found.rejections} == {"new", "huge"}


def test_turns_go_by_overdue_then_priority_then_age(fleet: Make, spec: Make) -> None:
    snapshot = fleet(specs=[spec("important", priority=5), spec("plain"), spec("late"), spec("later")])
    groups = [waits("plain", 3), waits("important", 1), waits("later", 40), waits("late", 50)]
    assert [group.model_id for group in turns(groups, snapshot, NOW)] == ["late", "later", "important", "plain"]


@pytest.mark.parametrize("waited_s", [1, 100])
def test_models_behind_many_that_have_no_room_get_a_turn(
    model: Make, node: Make, fleet: Make, spec: Make, waited_s: float
) -> None:
    """Eight older ones wait for a busy node; what they do not need becomes free elsewhere."""
    large, small = [f"large{i}" for i in range(8)], [f"small{i}" for i in range(6)]
    specs = [*(spec(name, 40) for name in large), *(spec(name, 8) for name in small)]
    snapshot = fleet(node("big", [48], model("busy", 44, running=1)), node("n", [10]), specs=specs)
    groups = [*(waits(name, waited_s + 10) for name in large), *(waits(name, waited_s) for name in small)]
    blocked = {*large, *small}
    first = plan(groups, snapshot, NOW, blocked=blocked)
    assert [decision.model_id for decision in first.starts] == ["small0"], "time alone gives a turn"
    (free,) = (each for each in snapshot.nodes if each.name == "n")
    after_news = plan(groups, snapshot, NOW, blocked=blocked, news=[free])
    assert [decision.model_id for decision in after_news.starts] == ["small0"]
    assert plan(groups, snapshot, NOW, blocked=blocked, news=[]).starts == ()


def test_models_without_room_take_turns(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    names = [f"m{i:02}" for i in range(20)]
    snapshot = fleet(node("n", [48], model("busy", 40, running=1)), specs=[spec(name, 40) for name in names])
    groups = [waits(name, 100 - i) for i, name in enumerate(names)]
    looked_at: list[set[str]] = []
    last, closed = "", set()
    for _ in range(3):
        found = plan(groups, snapshot, NOW, blocked=set(names), last_rechecked=last)
        assert found.blocked == set(names)
        looked_at.append({decision.model_id for decision in found.waits})
        last = found.last_rechecked
        closed.add(found.closed)
    assert all(set(names[:8]) <= each and len(each) == 12 for each in looked_at)
    assert set.union(*looked_at) == set(names)
    assert len(closed) == 1, "what is closed does not change with the turns"


# A simulation that carries out the plan, one second at a time.

LOAD_S, RESPONSE_S = 5, 4
RULES = EvictionRules(min_residency_s=3, fair_wait_s=20)


@dataclass
class Simulation:
    """One device that holds one model at a time, a queue, and a gateway that carries out the plan."""

    arrivals: list[tuple[int, str]]
    now: int = 0
    resident: str | None = None
    ready_at: int = 0
    ends: list[int] = field(default_factory=list)
    queue: list[tuple[int, str]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    num_loads: int = 0
    last_used: int = 0

    def fleet(self) -> Fleet:
        residencies = {}
        if self.resident is not None:
            loading = self.now < self.ready_at
            status = ModelStatus(
                id=self.resident,
                state=ModelState.LOADING if loading else ModelState.READY,
                devices=(0,),
                measured_bytes=20 * GIB,
                state_age_s=0 if loading else self.now - self.ready_at,
                idle_s=self.now - self.last_used,
            )
            residencies = {self.resident: Residency(status=status, seen_at=self.now, in_flight=len(self.ends))}
        free = 24 * GIB if self.resident is None else 4 * GIB
        device = DeviceState(index=0, kind="cuda", name="card", total_bytes=24 * GIB, free_bytes=free)
        host = Node(name="n", devices=(device,), residencies=residencies, healthy=True)
        specs = tuple(ModelSpec(id=name, vram_mb=20 * 1024) for name in "abc")
        return Fleet(nodes=(host,), catalogue=Catalogue(models=specs), rules=RULES)

    def step(self) -> None:
        self.ends = [end for end in self.ends if end > self.now]
        self.queue += [arrival for arrival in self.arrivals if arrival[0] == self.now]
        found = self.plan()
        for start in found.starts:
            self.resident, self.ready_at = start.model_id, self.now + LOAD_S
            self.num_loads += 1
            self.last_used = self.now
        if self.resident and self.now >= self.ready_at and ("n", self.resident) not in found.closed:
            for since, name in [one for one in self.queue if one[1] == self.resident]:
                self.queue.remove((since, name))
                self.waits.append(self.now - since)
                self.ends.append(self.now + RESPONSE_S)
                self.last_used = self.now
        self.now += 1

    def plan(self) -> Plan:
        oldest: dict[str, int] = {}
        for since, name in self.queue:
            oldest[name] = min(since, oldest.get(name, since))
        return plan([Waiting(model_id=name, since=since) for name, since in oldest.items()], self.fleet(), self.now)

    def run(self) -> Simulation:
        while self.now < 2000 and (self.queue or self.now <= max((at for at, _ in self.arrivals), default=0)):
            self.step()
        return self


def test_alternating_requests_cost_two_loads() -> None:
    simulation = Simulation([(0, name) for name in "abababab"]).run()
    assert (simulation.num_loads, len(simulation.waits)) == (2, 8)


def test_alternating_requests_over_time_are_collated() -> None:
    simulation = Simulation([(second, "ab"[second % 2]) for second in range(20)]).run()
    assert simulation.num_loads == 2


def test_steady_traffic_on_one_model_does_not_starve_another() -> None:
    simulation = Simulation([(second, "a") for second in range(300)] + [(10, "b")]).run()
    assert len(simulation.waits) == 301
    assert max(simulation.waits) <= RULES.fair_wait_s + RESPONSE_S + 2 * LOAD_S + RULES.min_residency_s + 2


@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from("abc")), min_size=1, max_size=80))
def test_every_request_is_served_in_bounded_time(arrivals: list[tuple[int, str]]) -> None:
    simulation = Simulation(arrivals).run()
    assert len(simulation.waits) == len(arrivals)
    turn = LOAD_S + RULES.min_residency_s + RESPONSE_S + 2
    assert max(simulation.waits) <= RULES.fair_wait_s + 3 * turn
    assert simulation.num_loads <= len(arrivals)
