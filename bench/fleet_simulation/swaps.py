"""Clients that need several models in turn, on one device that holds one model at a time: what their swaps cost.

The real dispatcher decides, over a simulated node and on simulated time. Compared are the rules in force, the same
without residency (`min_residency_s = 0`), and a fixed residency of 20 s that asks neither who uses a model nor what its
load costs.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle

import msgspec

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.demand import SOMEBODY
from cortex.fleet.rules import EvictionRules
from cortex.fleet.sleeping import WakeRules
from cortex.fleet.topology import ModelOnNode
from cortex.gateway.config import NeuronSection
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.fleet_state import DispatchSettings
from cortex.gateway.dispatch.leases import Lease, PendingRequest
from cortex.gateway.dispatch.model_jobs import Cause, MemberPlan
from cortex.wire.errors import CortexError
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import Device, DeviceHealth, Discovery, Health, ModelLoad, ModelState, ModelStatus

GIB = 1 << 30
NODE = "node"
POLL_S = 1.0
ROUND_TRIP_S = 0.003
RESPONSE_S = 1.0


@dataclass
class Client:
    """Asks for one model after the other, each time when the response before has ended and a moment has passed."""

    name: str
    models: Iterator[str]
    num_requests: int
    pause_s: float = 0.05


@dataclass(frozen=True)
class Policy:
    name: str
    rules: EvictionRules = field(default_factory=EvictionRules)
    knows_clients: bool = True
    """Whether the gateway knows who asks, and what loads cost."""


POLICIES = (
    Policy("in force"),
    Policy("residency 0", EvictionRules(min_residency_s=0)),
    Policy("fixed 20 s", knows_clients=False),
)


class Simulation:
    """A node with one device, and the effects of the dispatcher over it."""

    def __init__(self, policy: Policy, load_s: float, seed: int = 1) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.policy, self.load_s = policy, load_s
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self.ready: tuple[str, float] | None = None
        """The model on the device, and since when it is ready."""
        self.loading: str | None = None
        self.running = 0
        self.last_used = 0.0
        self.waits_s: list[float] = []
        self.num_loads = 0
        self.num_open = 0
        models = tuple(ModelSpec(id=name, vram_mb=20 * 1024) for name in "abc")
        settings = DispatchSettings(
            Catalogue(models=models),
            policy.rules,
            (NeuronSection(name=NODE, endpoint="http://simulated"),),
            max_wait_s=3600.0,
            max_waiting=1000,
            missed_polls=3,
        )
        self.dispatcher = Dispatcher(self, EventLog(), lambda: self.now, settings)
        self.observe()

    def at(self, after_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self.now + after_s, next(self._number), happens))

    def run(self, clients: list[Client]) -> float:
        """Returns how long it took."""
        self.num_open = len(clients)
        for client in clients:
            self.at(self.random.random(), partial(self._ask, client))
        self._poll()
        while self.num_open:
            self.now, _, happens = heapq.heappop(self._later)
            happens()
        return self.now

    # --- clients

    def _ask(self, client: Client) -> None:
        if client.num_requests == 0:
            self.num_open -= 1
            return
        client.num_requests -= 1
        began = self.now

        def deliver(result: Lease | CortexError) -> None:
            if isinstance(result, CortexError):
                raise SystemExit(f"{client.name}: {result.message}")
            self.waits_s.append(self.now - began)
            self.running += 1
            self.at(RESPONSE_S, lambda: self._responded(client, result))

        who = client.name if self.policy.knows_clients else SOMEBODY
        self.dispatcher.request_lease(PendingRequest(next(client.models), bytes, deliver, self.now, client=who))

    def _responded(self, client: Client, lease: Lease) -> None:
        self.running -= 1
        self.last_used = self.now
        self.dispatcher.release(lease)
        self.at(client.pause_s, lambda: self._ask(client))

    # --- the node

    def _poll(self) -> None:
        self.observe()
        self.dispatcher.tick()
        self.at(POLL_S, self._poll)

    def observe(self) -> None:
        device = Device(index=0, kind="cuda", name="card", total_bytes=24 * GIB)
        free_bytes = (4 if self.ready or self.loading else 24) * GIB
        health = Health(
            status="ok",
            uptime_s=self.now,
            devices=(DeviceHealth(index=0, total_bytes=24 * GIB, free_bytes=free_bytes),),
            models=tuple(map(self.status, "abc")),
        )
        discovery = Discovery(host=NODE, os="linux", version="0", devices=(device,), can_sleep=False)
        self.dispatcher.observed(NODE, discovery, health)

    def status(self, model: str) -> ModelStatus:
        cold = ModelStatus(id=model, state=ModelState.COLD, estimate_bytes=20 * GIB)
        if self.loading == model:
            return msgspec.structs.replace(cold, state=ModelState.LOADING, devices=(0,))
        if self.ready is None or self.ready[0] != model:
            return cold
        return msgspec.structs.replace(
            cold,
            state=ModelState.READY,
            devices=(0,),
            measured_bytes=20 * GIB,
            load=ModelLoad(running=self.running),
            state_age_s=self.now - self.ready[1],
            idle_s=0.0 if self.running else self.now - max(self.last_used, self.ready[1]),
            load_s=self.load_s if self.policy.knows_clients else None,
        )

    # --- the dispatcher's orders

    def load(self, node: str, request: LoadRequest, _others: tuple[MemberPlan, ...]) -> None:
        self.num_loads += 1
        self.loading = request.model_id
        self.at(self.load_s, lambda: self._loaded(ModelOnNode(node, request.model_id)))

    def _loaded(self, target: ModelOnNode) -> None:
        self.loading, self.ready = None, (target.model, self.now)
        self.observe()
        self.dispatcher.load_ended(target, self.status(target.model))

    def unload(self, node: str, request: UnloadRequest, _cause: Cause, _others: tuple[str, ...]) -> None:
        self.at(ROUND_TRIP_S, lambda: self._unloaded(ModelOnNode(node, request.model_id)))

    def _unloaded(self, target: ModelOnNode) -> None:
        self.ready = None
        self.observe()
        self.dispatcher.unload_ended(target, None)

    def poll_now(self, _node: str) -> None:
        self.at(ROUND_TRIP_S, self.observe)

    def forget(self, node: str, model: str) -> None: ...

    def inspect(self, node: str, requests: tuple[LoadRequest, ...]) -> None: ...

    def recycle(self, node: str, devices: tuple[int, ...]) -> None:
        self.at(ROUND_TRIP_S, lambda: self.dispatcher.recycle_ended(node, devices))

    def abandon(self, node: str) -> None: ...

    def mark_down(self, node: str, *, is_down: bool) -> None: ...

    def suspend(self, node: str) -> None: ...

    def wake(self, node: str, rules: WakeRules) -> None: ...


def pipeline() -> list[Client]:
    return [Client("one", cycle("abac"), 60)]


def two_clients() -> list[Client]:
    return [Client("one", cycle("a"), 60), Client("two", cycle("b"), 60)]


def two_agents_of_one_key() -> list[Client]:
    return [Client("one", cycle("a"), 60), Client("one", cycle("b"), 60)]


def pipelines() -> list[Client]:
    return [Client(name, cycle("abac"), 20, pause_s=0.5) for name in ("one", "two", "three")]


SCENARIOS = {
    "one client, A-B-A-C": pipeline,
    "two clients, A and B": two_clients,
    "two agents of one key, A and B": two_agents_of_one_key,
    "three clients, each A-B-A-C": pipelines,
}


def compare(loads_s: tuple[float, ...] = (0.4, 5.0, 60.0)) -> None:
    """Prints one line for each scenario, cost of a load and policy."""
    header = f"{'requests':>8} {'swaps':>6} {'longest wait':>13} {'took':>8} {'work lost':>10}"
    print(f"{'scenario':32} {'load':>6}  {'policy':12} {header}")
    for name, scenario in SCENARIOS.items():
        for load_s in loads_s:
            for policy in POLICIES:
                simulation = Simulation(policy, load_s)
                took_s = simulation.run(scenario())
                lost = simulation.num_loads * load_s / took_s
                counts = f"{len(simulation.waits_s):8d} {simulation.num_loads:6d}"
                times = f"{max(simulation.waits_s):12.1f}s {took_s:7.0f}s {lost:10.0%}"
                print(f"{name:32} {load_s:5.1f}s  {policy.name:12} {counts} {times}")
