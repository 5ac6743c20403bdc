"""Events of the dispatcher are applied one by one and in order, also when an effect reports from inside."""


# ruff: noqa: SLF001 - what is derived is private

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.index import FleetIndex
from cortex.fleet.memory import measurements
from cortex.fleet.placement.decision import Origin
from cortex.fleet.topology import ModelOnNode, Node
from cortex.gateway.dispatch.leases import Lease, PendingRequest
from cortex.gateway.dispatch.model_jobs import Cause, MemberPlan
from cortex.gateway.dispatch.replicas import ReadyReplicas
from cortex.wire.errors import CortexError, InsufficientCapacity, LoadFailed, UnloadedWhileLoading, UpstreamUnavailable
from cortex.wire.node.orders import LoadRequest, UnloadRequest

from ..fake_fleet import GB, FakeFleet, node_of

NODES = ("n", "m")
SIZES = {"a": 20 * GB, "b": 14 * GB, "c": 6 * GB, "huge": 90 * GB}


@dataclass
class PromptFleet(FakeFleet):
    """Its effects report at once, from inside the call that ordered them."""

    def load(self, node: str, request: LoadRequest, others: tuple[MemberPlan, ...]) -> None:
        super().load(node, request, others)
        self.finish_load()

    def unload(self, node: str, request: UnloadRequest, cause: Cause, others: tuple[str, ...]) -> None:
        super().unload(node, request, cause, others)
        self.finish_unload()


def test_effects_that_report_at_once_lose_no_event() -> None:
    fake = PromptFleet({"n": {"a": 20 * GB, "b": 20 * GB}})
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    got = fake.ask("b")
    assert (fake.unloads, fake.loads) == ([("n", "a", "evicted")], [("n", "b")])
    assert node_of(got) == "n"


def test_a_request_from_inside_a_delivery_is_served_in_its_turn() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.poll()
    order: list[str] = []

    def first(result: Lease | CortexError) -> None:
        assert isinstance(result, Lease)
        fake.dispatcher.request_lease(PendingRequest("a", bytes, lambda _: order.append("nested"), fake.now))
        order.append("first")

    fake.dispatcher.request_lease(PendingRequest("a", bytes, first, fake.now))
    fake.dispatcher.request_lease(PendingRequest("a", bytes, lambda _: order.append("second"), fake.now))
    fake.finish_load()
    assert order == ["first", "second", "nested"]
    assert fake.dispatcher.in_flight == {("n", "a"): 3}


def test_an_order_from_inside_a_notification_is_carried_out() -> None:
    fake = FakeFleet({"n": {"a": GB, "b": GB}})
    fake.poll()
    fake.operator.load("a")

    def load_another(error: CortexError | None) -> None:
        fake.operator.load("b")

    fake.dispatcher.watch(ModelOnNode("n", "a"), "load", load_another)
    fake.finish_load()
    assert fake.loads == [("n", "a"), ("n", "b")]


def test_a_changed_node_fails_its_watchers_and_its_loads_start_again() -> None:
    fake = FakeFleet({"n": {"a": GB}})
    fake.poll()
    got = fake.ask("a")
    outcomes: list[CortexError | None] = []
    fake.dispatcher.watch(ModelOnNode("n", "a"), "load", outcomes.append)
    fake.dispatcher.reconfigure(fake.settings("n", endpoint="http://elsewhere"))
    fake.poll()
    assert isinstance(outcomes[0], UpstreamUnavailable)
    assert fake.abandoned == ["n"]
    assert fake.loads == [("n", "a"), ("n", "a")]
    fake.finish_load()
    assert node_of(got) == "n"


class Simulation(FakeFleet):
    """A fleet that a random sequence of events happens to; `check` states what must hold after each of them."""

    def __init__(self, random: Random, *, prompt: bool) -> None:
        self.random = random
        self.prompt = prompt
        """Effects report at once."""
        self.loading: set[ModelOnNode] = set()
        self.unloading: set[ModelOnNode] = set()
        self.cancelled: set[ModelOnNode] = set()
        """Loads that were ordered to end: they fail."""
        self.waiting: dict[PendingRequest, list[Lease | CortexError]] = {}
        self.leases: list[Lease] = []
        catalogue = Catalogue(models=(ModelSpec(id="b", ttl_s=60), ModelSpec(id="c", pinned_on=("m",))))
        super().__init__({name: dict(SIZES) for name in NODES}, catalogue=catalogue)

    # Effects

    def load(self, node: str, request: LoadRequest, others: tuple[MemberPlan, ...]) -> None:
        target = ModelOnNode(node, request.model_id)
        assert target not in self.loading, "ordered twice"
        used = sum(SIZES[model] for model in self.ready[node])
        loading_bytes = sum(SIZES[other.model] for other in self.loading if other.node == node)
        assert used + loading_bytes + SIZES[target.model] <= self.total_bytes, "ordered beyond the memory of the device"
        self.loading.add(target)
        if self.prompt:
            self.end_load(target)

    def unload(self, node: str, request: UnloadRequest, cause: Cause, others: tuple[str, ...]) -> None:
        target = ModelOnNode(node, request.model_id)
        assert target not in self.unloading, "ordered twice"
        self.unloading.add(target)
        self.cancelled |= {target} & self.loading
        if self.prompt:
            self.end_unload(target)

    def abandon(self, node: str) -> None:
        self.loading = {target for target in self.loading if target.node != node}
        self.unloading = {target for target in self.unloading if target.node != node}
        self.cancelled = {target for target in self.cancelled if target.node != node}

    # What may happen

    def end_load(self, target: ModelOnNode) -> None:
        self.loading.discard(target)
        outcome = self.random.choice(["ready", "ready", "ready", "failed", "out of memory"])
        if target in self.cancelled:
            self.cancelled.discard(target)
            outcome = "cancelled"
        if outcome == "ready":
            self.ready[target.node][target.model] = self.now
            self.dispatcher.load_ended(target, self.status(*target))
        else:
            errors = {"failed": LoadFailed, "cancelled": UnloadedWhileLoading, "out of memory": InsufficientCapacity}
            self.dispatcher.load_ended(target, errors[outcome](outcome))

    def end_unload(self, target: ModelOnNode) -> None:
        self.unloading.discard(target)
        if self.random.random() < 0.8:
            self.ready[target.node].pop(target.model, None)
            self.poll(target.node)
            self.dispatcher.unload_ended(target, None)
        else:
            self.dispatcher.unload_ended(target, UpstreamUnavailable("stuck"))

    def request(self) -> None:
        got: list[Lease | CortexError] = []

        def deliver(result: Lease | CortexError) -> None:
            got.append(result)
            self.waiting.pop(pending, None)
            if isinstance(result, Lease):
                self.leases.append(result)

        origins: list[Origin] = ["request", "request", "background"]
        origin = self.random.choice(origins)
        pending = PendingRequest(self.random.choice(list(SIZES)), bytes, deliver, self.now, origin=origin)
        self.waiting[pending] = got
        self.dispatcher.request_lease(pending)

    def cancel(self) -> None:
        pending = self.random.choice(list(self.waiting))
        del self.waiting[pending]
        self.dispatcher.cancel(pending)

    def release(self) -> None:
        self.dispatcher.release(self.leases.pop(self.random.randrange(len(self.leases))))

    def lose(self) -> None:
        """A node lost a model and says so to a request."""
        lease = self.random.choice(self.leases)
        self.ready[lease.node].pop(lease.model, None)
        self.dispatcher.model_not_found(lease)

    def operate(self) -> None:
        order = self.random.choice(["load", "unload", "pin", "unpin"])
        try:
            getattr(self.operator, order)(self.random.choice(list(SIZES)), self.random.choice([None, *NODES]))
        except CortexError:
            pass  # it cannot be done now

    def step(self) -> None:
        node = self.random.choice(NODES)
        actions: list[Callable[[], object]] = [
            self.request,
            self.request,
            lambda: self.poll(node),
            lambda: self.dispatcher.missed(node, "timeout"),
            lambda: self.dispatcher.request_failed(node, "reset"),
            self.dispatcher.tick,
            self.operate,
            lambda: self.dispatcher.drain(node, drained=self.random.random() < 0.3),
            lambda: self.dispatcher.cancel_load(ModelOnNode(node, self.random.choice(list(SIZES)))),
            lambda: self.dispatcher.reconfigure(self.settings(*NODES, endpoint=f"http://{self.random.randrange(2)}")),
        ]
        actions += [self.cancel] * bool(self.waiting)
        actions += [self.release, self.release, self.lose] * bool(self.leases)
        actions += [lambda: self.end_load(min(self.loading))] * 3 * bool(self.loading)
        actions += [lambda: self.end_unload(min(self.unloading))] * 3 * bool(self.unloading)
        self.random.choice(actions)()
        self.now += self.random.choice([0.0, 0.1, 5.0, 40.0])
        self.check()

    def check(self) -> None:
        assert self.dispatcher.in_flight == Counter(ModelOnNode(lease.node, lease.model) for lease in self.leases)
        assert self.dispatcher.queue_depths == Counter(pending.model for pending in self.waiting)
        assert all(got == [] for got in self.waiting.values())
        for target in self.unloading:
            assert not self.dispatcher.is_ready(target.model, target.node)
        for target in self.loading:
            fleet_node = self.dispatcher.fleet.node(target.node)
            assert fleet_node is not None
            reserved = {reservation.model_id for reservation in fleet_node.reservations}
            assert target.model in reserved or self.dispatcher.is_ready(target.model, target.node)

        self.check_derived()

    def check_derived(self) -> None:
        """What was derived step by step is what would be derived from everything at once."""
        state, leases = self.dispatcher._fleet_state, self.dispatcher._leases
        assert [node.name for node in state.fleet.nodes] == list(state)
        for node in state.fleet.nodes:
            assert _facts(node) == _facts(state._overlaid(state.reported(node.name), self.now))
        assert state.fleet.index == FleetIndex.of(state.fleet.nodes)
        assert state.fleet.measured == measurements(state.fleet)
        assert self.dispatcher.fleet == state.fleet.with_in_flight(leases.in_flight)
        for model in SIZES:
            assert leases._ready.of(model) == ReadyReplicas(state).of(model)

    def settle(self) -> None:
        """Let everything end: no request may be left behind."""
        for node in NODES:
            self.dispatcher.drain(node, drained=False)
        for _ in range(20):
            self.poll()
            while self.leases:
                self.release()
            for target in sorted(self.loading):
                self.end_load(target)
            for target in sorted(self.unloading):
                self.end_unload(target)
            self.check()
            self.now += self.max_wait_s / 10
            self.dispatcher.tick()


def _facts(node: Node) -> object:
    """A node apart from when its overlay was made."""
    models = {name: (held.state, round(held.state_since, 6), held.pinned) for name, held in node.residencies.items()}
    return msgspec.structs.replace(node, residencies={}), models


@given(st.integers(0, 2**48), st.booleans())
def test_any_sequence_of_events_leaves_a_consistent_state(seed: int, prompt: bool) -> None:
    simulation = Simulation(Random(seed), prompt=prompt)
    for _ in range(60):
        simulation.step()
    simulation.settle()
    assert simulation.waiting == {}
    assert simulation.dispatcher.queue_depths == {}
    while simulation.leases:
        simulation.release()
    assert simulation.dispatcher.in_flight == {}
