"""The dispatcher's decisions, driven by hand: no sockets, no tasks, no clock but the test's."""

from __future__ import annotations

from dataclasses import dataclass, field

from cortex.fleet.catalogue import Alias, Catalogue, ModelSpec
from cortex.fleet.rules import EvictionRules
from cortex.gateway.config import NeuronSection
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.leases import Lease, PendingRequest
from cortex.wire.errors import CortexError, InsufficientCapacity, LoadFailed, Overloaded, UpstreamUnavailable
from cortex.wire.node import Device, DeviceHealth, Discovery, Health, ModelLoad, ModelState, ModelStatus

GB = 1 << 30


@dataclass
class Bench:
    """A dispatcher whose effects are only written down, and nodes that are plain dictionaries."""

    sizes: dict[str, dict[str, int]]
    catalogue: Catalogue = field(default_factory=Catalogue)
    rules: EvictionRules = field(default_factory=lambda: EvictionRules(min_residency_s=0))
    total_bytes: int = 24 * GB
    max_wait_s: float = 600.0
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.loads: list[tuple[str, str]] = []
        self.unloads: list[tuple[str, str, str]] = []
        self.parks: list[bool] = []
        """Of each of `unloads`, whether the model may sleep."""
        self.asleep: dict[tuple[str, str], float] = {}
        """Since when."""
        self.failed: set[tuple[str, str]] = set()
        self.recycled: list[tuple[str, tuple[int, ...]]] = []
        self.abandoned: list[str] = []
        self.looks: list[str] = []
        self.ready: dict[str, dict[str, float]] = {name: {} for name in self.sizes}
        self.running: dict[tuple[str, str], int] = {}
        self.event_log = EventLog()
        self.dispatcher = Dispatcher(
            self,
            self.event_log,
            lambda: self.now,
            catalogue=self.catalogue,
            rules=self.rules,
            neurons=[NeuronSection(name=name, endpoint="http://x") for name in self.sizes],
            max_wait_s=self.max_wait_s,
            max_waiting=100,
            missed_polls=3,
        )

    # Effects
    def load(self, node, request):
        self.loads.append((node, request.model_id))

    def unload(self, node, request, cause):
        self.unloads.append((node, request.model_id, cause))
        self.parks.append(request.sleep)

    def recycle(self, node, devices):
        self.recycled.append((node, devices))

    def abandon(self, node):
        self.abandoned.append(node)

    def look(self, node):
        self.looks.append(node)

    # the world
    def status(self, node: str, model: str) -> ModelStatus:
        if (slept := self.asleep.get((node, model))) is not None:
            return ModelStatus(
                id=model,
                state=ModelState.ASLEEP,
                devices=(0,),
                measured_bytes=self.sizes[node][model],
                host_bytes=self.sizes[node][model],
                state_age_s=self.now - slept,
                idle_s=self.now - slept,
            )
        since = self.ready[node].get(model)
        absent = ModelState.FAILED if (node, model) in self.failed else ModelState.COLD
        return ModelStatus(
            id=model,
            state=absent if since is None else ModelState.READY,
            devices=() if since is None else (0,),
            estimate_bytes=self.sizes[node][model],
            measured_bytes=None if since is None else self.sizes[node][model],
            state_age_s=0.0 if since is None else self.now - since,
            idle_s=0.0 if since is None else self.now - since,
            load=ModelLoad(running=self.running.get((node, model), 0)),
        )

    def poll(self, *nodes: str) -> None:
        for node in nodes or self.sizes:
            used = sum(self.sizes[node][model] for model in self.ready[node])
            health = Health(
                status="ok",
                uptime_s=1.0,
                devices=(DeviceHealth(index=0, total_bytes=self.total_bytes, free_bytes=self.total_bytes - used),),
                models=tuple(self.status(node, model) for model in self.sizes[node]),
            )
            device = Device(index=0, kind="cuda", name="card", total_bytes=self.total_bytes)
            self.dispatcher.observed(node, Discovery(host=node, os="", version="", devices=(device,)), health)

    def finish_load(self) -> None:
        node, model = self.loads[-1]
        self.asleep.pop((node, model), None)
        self.ready[node][model] = self.now
        self.dispatcher.load_ended(node, model, self.status(node, model))

    def finish_unload(self, *, asleep: bool = False) -> None:
        node, model, _ = self.unloads[-1]
        self.ready[node].pop(model, None)
        self.asleep.pop((node, model), None)
        if asleep:
            self.asleep[node, model] = self.now
        self.poll(node)
        self.dispatcher.unload_ended(node, model, None)

    def ask(self, name: str) -> list[Lease | CortexError]:
        """A request; what it got, once it did, is in the list."""
        got: list[Lease | CortexError] = []
        resolution = self.dispatcher.resolve(name)
        origin = "background" if resolution.background else "request"
        lease = self.dispatcher.acquire(resolution.model_id, bytes)
        if lease is not None:
            got.append(lease)
        else:
            self.dispatcher.wait(PendingRequest(resolution.model_id, bytes, got.append, self.now, origin=origin))
        return got


def node_of(got: list[Lease | CortexError]) -> str:
    assert len(got) == 1
    assert isinstance(got[0], Lease), got[0]
    return got[0].node


def test_a_request_for_a_cold_model_orders_one_load_and_waits_for_it():
    bench = Bench({"n": {"a": GB}})
    bench.poll()
    first, second = bench.ask("a"), bench.ask("a")
    assert bench.loads == [("n", "a")]
    assert first == second == []
    bench.finish_load()
    assert (node_of(first), node_of(second)) == ("n", "n")
    assert bench.dispatcher.in_flight == {("n", "a"): 2}


def test_before_the_first_poll_requests_wait_rather_than_fail():
    bench = Bench({"n": {"a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a"),)))
    got = bench.ask("a")
    assert got == []
    bench.ready["n"]["a"] = bench.now
    bench.poll()
    assert node_of(got) == "n"


def test_after_a_restart_one_poll_rebuilds_the_picture():
    bench = Bench({"n": {"a": GB}, "m": {"b": GB}})
    bench.ready["m"]["b"] = 900.0
    bench.poll()
    assert node_of(bench.ask("b")) == "m"
    assert not bench.loads


def test_alternating_requests_cost_two_swaps():
    bench = Bench({"n": {"a": 20 * GB, "b": 20 * GB}})
    bench.ready["n"]["a"] = 900.0
    bench.poll()
    got = [bench.ask(name) for name in ["a", "b", "a", "b", "a", "b"]]
    assert [len(each) for each in got] == [1, 0, 1, 0, 1, 0]
    assert not bench.unloads, "a busy model stays"
    for each in got[::2]:
        bench.dispatcher.release(each[0])
    assert bench.unloads == [("n", "a", "evicted")]
    bench.finish_unload()
    assert bench.loads == [("n", "b")]
    bench.finish_load()
    assert all(node_of(each) == "n" for each in got[1::2])


def test_a_starving_model_closes_the_one_in_its_way():
    bench = Bench({"n": {"a": 20 * GB, "b": 20 * GB}}, rules=EvictionRules(min_residency_s=0, fair_wait_s=30))
    bench.ready["n"]["a"] = 900.0
    bench.poll()
    running = bench.ask("a")
    starving = bench.ask("b")
    bench.now += 31
    bench.poll()
    late = bench.ask("a")
    assert late == [], "new work on `a` waits: `b` has waited long enough"
    bench.dispatcher.release(running[0])
    bench.finish_unload()
    bench.finish_load()
    assert node_of(starving) == "n"
    assert late == []
    bench.dispatcher.release(starving[0])
    bench.finish_unload()
    bench.finish_load()
    assert node_of(late) == "n"


def test_a_young_model_stays_for_its_minimum_residency():
    bench = Bench({"n": {"a": 20 * GB, "b": 20 * GB}}, rules=EvictionRules(min_residency_s=20))
    bench.ready["n"]["a"] = bench.now
    bench.poll()
    bench.ask("b")
    assert not bench.unloads
    bench.now += 21
    bench.poll()
    assert bench.unloads == [("n", "a", "evicted")]


def test_a_model_being_unloaded_is_not_routed_to_by_a_stale_report():
    bench = Bench({"n": {"a": 20 * GB, "b": 20 * GB}})
    bench.ready["n"]["a"] = 900.0
    bench.poll()
    bench.ask("b")
    assert bench.unloads
    bench.poll()  # the node still says ready
    assert bench.ask("a") == []


def test_a_background_alias_never_evicts():
    catalogue = Catalogue(
        models=(ModelSpec(id="main"), ModelSpec(id="small")),
        aliases={"claude-*haiku*": Alias(model="small", background=True)},
    )
    bench = Bench({"n": {"main": 20 * GB, "small": 10 * GB}}, catalogue=catalogue)
    bench.ready["n"]["main"] = 900.0
    bench.poll()
    got = bench.ask("claude-3-haiku-1")
    assert isinstance(got[0], Overloaded)
    assert not bench.unloads


def test_a_failed_load_goes_to_the_next_node_and_then_fails_with_reasons():
    bench = Bench({"n": {"a": GB}, "m": {"a": GB}})
    bench.poll()
    got = bench.ask("a")
    first = bench.loads[0][0]
    bench.dispatcher.load_ended(first, "a", LoadFailed("broken disk"))
    second = bench.loads[1][0]
    assert {first, second} == {"n", "m"}
    bench.dispatcher.load_ended(second, "a", LoadFailed("no driver"))
    assert isinstance(got[0], LoadFailed)
    assert "broken disk" in got[0].message
    assert "no driver" in got[0].message


def test_a_failed_load_is_tried_again_after_a_while():
    bench = Bench({"n": {"a": GB}}, rules=EvictionRules(retry_failed_after_s=30))
    bench.poll()
    bench.ask("a")
    bench.dispatcher.load_ended("n", "a", LoadFailed("broken disk"))
    assert isinstance(bench.ask("a")[0], LoadFailed)
    bench.now += 31
    bench.poll()
    assert bench.ask("a") == []
    assert bench.loads == [("n", "a"), ("n", "a")]


def test_out_of_memory_is_retried_once_with_more_room():
    bench = Bench({"n": {"old": 4 * GB, "a": GB}})
    bench.ready["n"]["old"] = 900.0
    bench.poll()
    got = bench.ask("a")
    bench.dispatcher.load_ended("n", "a", InsufficientCapacity("out of memory"))
    assert bench.unloads == [("n", "old", "evicted")]
    bench.finish_unload()
    assert bench.loads == [("n", "a"), ("n", "a")]
    bench.dispatcher.load_ended("n", "a", InsufficientCapacity("out of memory"))
    assert len(bench.loads) == 2
    assert isinstance(got[0], LoadFailed)


def test_out_of_memory_waits_for_a_busy_victim_although_the_node_calls_the_model_failed():
    bench = Bench({"n": {"old": 4 * GB, "a": GB}})
    bench.ready["n"]["old"] = 900.0
    bench.poll()
    (lease,) = bench.ask("old")
    got = bench.ask("a")
    bench.failed.add(("n", "a"))
    bench.poll()
    bench.dispatcher.load_ended("n", "a", InsufficientCapacity("out of memory"))
    bench.poll()
    assert (got, bench.unloads) == ([], [])
    bench.dispatcher.release(lease)
    assert bench.unloads == [("n", "old", "evicted")]
    bench.finish_unload()
    assert bench.loads == [("n", "a"), ("n", "a")]
    bench.failed.clear()
    bench.finish_load()
    assert isinstance(got[0], Lease)


def test_out_of_memory_with_nobody_to_evict_is_told_at_once():
    bench = Bench({"n": {"a": GB}})
    bench.poll()
    got = bench.ask("a")
    bench.failed.add(("n", "a"))
    bench.poll()
    bench.dispatcher.load_ended("n", "a", InsufficientCapacity("out of memory"))
    assert isinstance(got[0], LoadFailed)


def test_a_victim_that_cannot_be_unloaded_fails_the_load_not_the_queue():
    bench = Bench({"n": {"old": 20 * GB, "a": 10 * GB}})
    bench.ready["n"]["old"] = 900.0
    bench.poll()
    got = bench.ask("a")
    bench.dispatcher.unload_ended("n", "old", UpstreamUnavailable("stuck"))
    assert isinstance(got[0], LoadFailed)
    assert "stuck" in got[0].message
    assert node_of(bench.ask("old")) == "n"


def test_a_node_that_goes_down_during_a_load_gives_the_work_to_another():
    bench = Bench({"n": {"a": GB}, "m": {"a": GB}})
    bench.poll()
    got = bench.ask("a")
    first = bench.loads[0][0]
    other = "m" if first == "n" else "n"
    for _ in range(3):
        bench.dispatcher.missed(first, "connection refused")
    assert bench.abandoned == [first]
    assert bench.loads[-1] == (other, "a")
    bench.finish_load()
    assert node_of(got) == other


def test_two_missed_polls_change_nothing():
    bench = Bench({"n": {"a": GB}})
    bench.ready["n"]["a"] = 900.0
    bench.poll()
    bench.dispatcher.missed("n", "timeout")
    bench.dispatcher.missed("n", "timeout")
    assert node_of(bench.ask("a")) == "n"


def test_a_model_whose_only_node_is_down_is_refused_at_once():
    bench = Bench({"n": {"a": GB}})
    bench.ready["n"]["a"] = 900.0
    bench.poll()
    for _ in range(3):
        bench.dispatcher.missed("n", "connection refused")
    assert isinstance(bench.ask("a")[0], UpstreamUnavailable)


def test_a_suspected_node_gets_nothing_until_it_has_answered_a_poll():
    bench = Bench({"n": {"a": GB}})
    bench.ready["n"]["a"] = 900.0
    bench.poll()
    bench.dispatcher.suspect("n", "connection reset")
    got = bench.ask("a")
    assert got == []
    assert bench.looks == ["n"]
    bench.poll()
    assert node_of(got) == "n"


def test_idle_models_with_a_ttl_are_unloaded():
    bench = Bench({"n": {"a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a", ttl_s=60),)))
    bench.ready["n"]["a"] = bench.now
    bench.poll()
    bench.dispatcher.tick()
    assert not bench.unloads
    bench.now += 61
    bench.poll()
    bench.dispatcher.tick()
    bench.dispatcher.tick()
    assert bench.unloads == [("n", "a", "ttl")]


def test_who_makes_room_is_parked_and_wakes_when_asked_for():
    bench = Bench({"n": {"a": 20 * GB, "b": 20 * GB}})
    events = []
    bench.event_log.subscribe(events.append)
    bench.ready["n"]["a"] = 900.0
    bench.poll()
    for newcomer, victim in (("b", "a"), ("a", "b"), ("b", "a")):
        got = bench.ask(newcomer)
        assert (bench.unloads[-1], bench.parks[-1]) == (("n", victim, "evicted"), True)
        bench.finish_unload(asleep=True)
        assert bench.loads[-1] == ("n", newcomer), "the bytes of a sleeper are free"
        bench.finish_load()
        assert node_of(got) == "n"
        bench.dispatcher.release(got[0])
        bench.now += 1
        bench.poll()
    kinds = [event["kind"] for event in events]
    assert "model_asleep" in kinds
    assert "model_unloaded" not in kinds


def test_a_sleeper_with_room_is_woken_where_it_sleeps():
    bench = Bench({"n": {"a": GB}, "m": {"a": GB}})
    bench.asleep["m", "a"] = 900.0
    bench.poll()
    assert bench.dispatcher.explain("a").action == "wake"
    got = bench.ask("a")
    assert bench.loads == [("m", "a")]
    bench.finish_load()
    assert node_of(got) == "m"


def test_a_ttl_puts_to_sleep_first_and_unloads_a_sleeper_for_good_after_as_long_again():
    bench = Bench({"n": {"a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a", ttl_s=60),)))
    bench.ready["n"]["a"] = bench.now
    bench.now += 61
    bench.poll()
    bench.dispatcher.tick()
    bench.finish_unload(asleep=True)
    bench.now += 59
    bench.poll()
    bench.dispatcher.tick()
    assert bench.parks == [True]
    bench.now += 2
    bench.poll()
    bench.dispatcher.tick()
    assert (bench.unloads, bench.parks) == ([("n", "a", "ttl")] * 2, [True, False])
    bench.finish_unload()
    assert bench.status("n", "a").state is ModelState.COLD


def test_an_operator_parks_or_unloads_a_sleeper():
    bench = Bench({"n": {"a": GB}})
    bench.ready["n"]["a"] = 900.0
    bench.poll()
    assert bench.dispatcher.unload("a", sleep=True) == ("n",)
    bench.finish_unload(asleep=True)
    assert bench.dispatcher.unload("a") == ("n",)
    assert bench.parks == [True, False]


def test_workers_with_sleepers_are_not_recycled():
    bench = Bench({"n": {"a": GB}}, rules=EvictionRules(defrag_after_cycles=1))
    bench.poll()
    bench.ask("a")
    bench.finish_load()
    bench.ready["n"].clear()
    bench.asleep["n", "a"] = bench.now
    bench.poll()
    bench.dispatcher.tick()
    assert bench.recycled == []


def test_pinned_models_are_loaded_without_being_asked_for():
    bench = Bench({"n": {"a": GB}, "m": {"a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a", pinned_on=("m",)),)))
    bench.poll()
    bench.dispatcher.tick()
    bench.dispatcher.tick()
    assert bench.loads == [("m", "a")]


def test_a_model_pinned_by_hand_is_not_evicted_until_unpinned():
    bench = Bench({"n": {"a": 20 * GB, "b": 20 * GB}})
    bench.ready["n"]["a"] = 900.0
    bench.poll()
    assert bench.dispatcher.pin("a") == ("n",)
    assert isinstance(bench.ask("b")[0], InsufficientCapacity)
    assert bench.dispatcher.unpin("a") == ("n",)
    bench.ask("b")
    assert bench.unloads == [("n", "a", "evicted")]


def test_waiting_is_bounded_and_the_refusal_says_what_it_waited_for():
    bench = Bench({"n": {"a": 20 * GB, "b": 20 * GB}}, max_wait_s=100)
    bench.ready["n"]["a"] = 900.0
    bench.running["n", "a"] = 1
    bench.poll()
    got = bench.ask("b")
    bench.now += 101
    bench.dispatcher.tick()
    assert isinstance(got[0], Overloaded)
    assert "busy" in got[0].message
    assert bench.dispatcher.queue_depths == {}


def test_a_cancelled_request_gets_nothing_and_leaves_no_queue():
    bench = Bench({"n": {"a": GB}})
    bench.poll()
    got: list[Lease | CortexError] = []
    pending = PendingRequest("a", bytes, got.append, bench.now)
    bench.dispatcher.wait(pending)
    bench.dispatcher.cancel(pending)
    bench.finish_load()
    assert got == []
    assert bench.dispatcher.queue_depths == {}
    assert bench.dispatcher.in_flight == {}


def test_requests_spread_over_replicas_by_load():
    bench = Bench({"n": {"a": GB}, "m": {"a": GB}})
    bench.ready["n"]["a"] = bench.ready["m"]["a"] = 900.0
    bench.poll()
    assert sorted(node_of(bench.ask("a")) for _ in range(4)) == ["m", "m", "n", "n"]


def test_an_operator_hears_when_the_ordered_load_is_over():
    bench = Bench({"n": {"a": GB}})
    bench.poll()
    heard: list[CortexError | None] = []
    assert bench.dispatcher.load("a").node == "n"
    bench.dispatcher.watch(("n", "a"), heard.append)
    bench.finish_load()
    assert heard == [None]


def test_decisions_are_recorded_once_with_their_reasons():
    bench = Bench({"n": {"a": 20 * GB, "b": 20 * GB}})
    bench.ready["n"]["a"] = 900.0
    bench.running["n", "a"] = 1
    bench.poll()
    bench.ask("b")
    bench.poll()
    bench.poll()
    recorded = bench.event_log.decisions
    assert [(each["model"], each["action"]) for each in recorded] == [("b", "wait")]
    assert recorded[0]["nodes"][0]["occupants"][0]["reason"] == "busy with 1 request"


def test_every_waiter_is_woken_when_a_reload_takes_the_node_away():
    bench = Bench({"n": {"a": GB}})
    bench.poll()
    got = bench.ask("a")
    bench.dispatcher.reconfigure(Catalogue(), bench.rules, [], max_wait_s=1, max_waiting=1, missed_polls=3)
    bench.dispatcher.tick()
    assert isinstance(got[0], CortexError)


def test_counters_return_to_zero():
    bench = Bench({"n": {"a": GB}})
    bench.ready["n"]["a"] = 900.0
    bench.poll()
    leases = [bench.ask("a")[0] for _ in range(10)]
    for lease in leases:
        bench.dispatcher.release(lease)
    assert bench.dispatcher.in_flight == {}


def worn(bench: Bench, num_loads: int) -> None:
    """Load and unload, so many times."""
    for _ in range(num_loads):
        bench.dispatcher.load("a")
        bench.finish_load()
        bench.dispatcher.unload("a")
        bench.finish_unload()


def test_workers_are_replaced_after_so_many_loads_once_the_device_is_empty():
    bench = Bench({"n": {"a": GB}}, rules=EvictionRules(min_residency_s=0, defrag_after_cycles=3))
    bench.poll()
    worn(bench, 2)
    bench.dispatcher.tick()
    bench.dispatcher.load("a")
    bench.finish_load()
    bench.poll()
    bench.dispatcher.tick()
    assert bench.recycled == [], "a model is there"
    bench.dispatcher.unload("a")
    bench.finish_unload()
    bench.dispatcher.tick()
    bench.dispatcher.tick()
    assert bench.recycled == [("n", (0,))], "once, while it is under way"
    bench.dispatcher.recycle_ended("n", ())
    bench.dispatcher.tick()
    assert len(bench.recycled) == 2, "the node said that the device was in use: asked again"
    bench.dispatcher.recycle_ended("n", (0,))
    bench.dispatcher.tick()
    assert len(bench.recycled) == 2
    worn(bench, 3)
    bench.dispatcher.tick()
    assert len(bench.recycled) == 3, "loads count from zero again"


def test_a_node_that_cannot_replace_its_workers_is_left_alone_for_as_many_loads():
    bench = Bench({"n": {"a": GB}}, rules=EvictionRules(min_residency_s=0, defrag_after_cycles=2))
    bench.poll()
    worn(bench, 2)
    bench.dispatcher.tick()
    bench.dispatcher.recycle_ended("n", UpstreamUnavailable("no such route"))
    bench.dispatcher.tick()
    assert len(bench.recycled) == 1


def test_a_node_that_went_down_is_asked_again_when_it_is_back():
    bench = Bench({"n": {"a": GB}}, rules=EvictionRules(min_residency_s=0, defrag_after_cycles=2))
    bench.poll()
    worn(bench, 2)
    bench.dispatcher.tick()
    for _ in range(3):
        bench.dispatcher.missed("n", "no answer")
    bench.dispatcher.tick()
    assert len(bench.recycled) == 1
    bench.poll()
    bench.dispatcher.tick()
    assert len(bench.recycled) == 2
