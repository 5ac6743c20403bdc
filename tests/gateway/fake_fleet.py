"""A dispatcher over nodes that are plain dictionaries: no sockets, no tasks, no clock but the test's."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from cortex.fleet.catalogue import Catalogue
from cortex.fleet.demand import SOMEBODY
from cortex.fleet.devices import MemoryReservation
from cortex.fleet.placement.decision import Origin
from cortex.fleet.rules import EvictionRules
from cortex.fleet.sleeping import WakeRules
from cortex.fleet.topology import ModelOnNode
from cortex.gateway.config import NeuronSection
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.fleet_state import DispatchSettings
from cortex.gateway.dispatch.leases import Lease, PendingRequest
from cortex.gateway.dispatch.model_jobs import Cause, MemberPlan
from cortex.gateway.dispatch.operator.commands import OperatorCommands
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import CortexError
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.contexts import ContextSizes
from cortex.wire.node.host_splits import HostSplits
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import (
    Device,
    DeviceHealth,
    DeviceKind,
    Discovery,
    Health,
    HostHealth,
    HostKV,
    ModelLoad,
    ModelState,
    ModelStatus,
)

GB = 1 << 30


@dataclass
class FakeFleet:
    """The dispatcher's effects are recorded; a test decides when and how each of them ends."""

    sizes: dict[str, dict[str, int]]
    catalogue: Catalogue = field(default_factory=Catalogue)
    rules: EvictionRules = field(default_factory=lambda: EvictionRules(min_residency_s=0))
    total_bytes: int = 24 * GB
    max_wait_s: float = 600.0
    now: float = 1000.0
    num_devices: int = 1
    """Every node has as many; models are on the first."""
    device_kind: DeviceKind = "cuda"
    spans: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The nodes of models that span several; `sizes` has the part of each node, at the first."""
    wakes: dict[str, WakeRules] = field(default_factory=dict)
    """How nodes that may sleep are woken."""

    sources: dict[str, str] = field(default_factory=dict)
    """The files of each model, as nodes report them."""

    def __post_init__(self) -> None:
        self.loads: list[tuple[str, str]] = []
        self.load_requests: list[LoadRequest] = []
        self.unloads: list[tuple[str, str, str]] = []
        self.unload_requests: list[UnloadRequest] = []
        self.sleeps: list[bool] = []
        """For each of `unloads`: whether the model may sleep."""
        self.asleep: dict[tuple[str, str], float] = {}
        """Since when."""
        self.failed: set[tuple[str, str]] = set()
        self.recycled: list[tuple[str, tuple[int, ...]]] = []
        self.abandoned: list[str] = []
        self.polls: list[str] = []
        self.down: set[str] = set()
        self.suspended: list[str] = []
        self.woken: list[str] = []
        self.forgotten: list[tuple[str, str]] = []
        self.inspections: list[tuple[str, str]] = []
        self.inspect_requests: list[LoadRequest] = []
        self.ready: dict[str, dict[str, float]] = {name: {} for name in self.sizes}
        self.running: dict[tuple[str, str], int] = {}
        self.benches: dict[tuple[str, str], BenchResult] = {}
        self.kept: dict[tuple[str, str], HostKV] = {}
        self.leaving: set[tuple[str, str]] = set()
        self.uptime_s = 1.0
        """Of every node."""
        self.ceiling_bytes: int | None = None
        """The ceiling of every node."""
        self.foreign_bytes = 0
        """What other programs hold of every device."""
        self.failure_code: str | None = None
        """The error code of the models in `failed`."""
        self.load_s: float | None = None
        """What loads take, as nodes report it."""
        self.contexts: dict[str, ContextSizes] = {}
        self.splits: dict[str, HostSplits] = {}
        """How models can be divided between device and host."""
        self.host: HostHealth | None = None
        """The memory of every host."""
        self.context_tokens: dict[str, int] = {}
        """The contexts of models that are ready."""
        self.max_prompt_tokens: dict[str, int] = {}
        """Node → its longest prompt."""
        self.kv_tokens: int | None = None
        """That fit in the KV cache of every ready model."""
        self.event_log = EventLog()
        self.dispatcher = Dispatcher(self, self.event_log, lambda: self.now, self.settings(*self.sizes))
        self.operator = OperatorCommands(self.dispatcher, self.event_log)

    def settings(self, *names: str, endpoint: str = "http://x") -> DispatchSettings:
        neurons = tuple(NeuronSection(name=name, endpoint=endpoint, wake=self.wakes.get(name)) for name in names)
        return DispatchSettings(self.catalogue, self.rules, neurons, self.max_wait_s, max_waiting=100, missed_polls=3)

    # Effects
    def load(self, node: str, request: LoadRequest, others: tuple[MemberPlan, ...]) -> None:
        self.loads.append((node, request.model_id))
        self.load_requests.append(request)

    def unload(self, node: str, request: UnloadRequest, cause: Cause, others: tuple[str, ...]) -> None:
        self.unloads.append((node, request.model_id, cause))
        self.unload_requests.append(request)
        self.sleeps.append(request.sleep)

    def recycle(self, node: str, devices: tuple[int, ...]) -> None:
        self.recycled.append((node, devices))

    def inspect(self, node: str, requests: tuple[LoadRequest, ...]) -> None:
        self.inspections += [(node, request.model_id) for request in requests]
        self.inspect_requests += requests

    def forget(self, node: str, model: str) -> None:
        self.forgotten.append((node, model))

    def abandon(self, node: str) -> None:
        self.abandoned.append(node)

    def poll_now(self, node: str) -> None:
        self.polls.append(node)

    def suspend(self, node: str) -> None:
        self.suspended.append(node)

    def wake(self, node: str, rules: WakeRules) -> None:
        self.woken.append(node)

    def mark_down(self, node: str, *, is_down: bool) -> None:
        (self.down.add if is_down else self.down.discard)(node)

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
                kv_host=self.kept.get((node, model)),
            )
        since = self.ready[node].get(model)
        absent = ModelState.FAILED if (node, model) in self.failed else ModelState.COLD
        return ModelStatus(
            id=model,
            state=ModelState.UNLOADING
            if (node, model) in self.leaving
            else absent
            if since is None
            else ModelState.READY,
            devices=() if since is None else (0,),
            estimate_bytes=self.sizes[node][model] * (1 if since is not None else len(self.spans.get(model, "1")))
            or None,
            least_bytes=self.contexts[model].sizes[0].num_bytes if model in self.contexts else None,
            contexts=self.contexts.get(model),
            host_splits=self.splits.get(model),
            source=self.sources.get(model),
            context_tokens=self.context_tokens.get(model),
            max_prompt_tokens=self.max_prompt_tokens.get(node),
            measured_bytes=None if since is None else self.sizes[node][model],
            state_age_s=0.0 if since is None else self.now - since,
            idle_s=0.0 if since is None else self.now - since,
            load_s=None if since is None else self.load_s,
            nodes=self.spans.get(model, ()) if since is not None else (),
            harness="vllm" if model in self.spans else "torch",
            load=ModelLoad(running=self.running.get((node, model), 0)),
            reason_code=self.failure_code if (node, model) in self.failed else None,
            bench=self.benches.get((node, model)),
            kv_tokens=None if since is None else self.kv_tokens,
            kv_host=self.kept.get((node, model)),
        )

    def poll(self, *nodes: str) -> None:
        for node in nodes or self.sizes:
            members = tuple(
                msgspec.structs.replace(self.status(leader, model), rank=1)
                for model, (leader, *others) in self.spans.items()
                if node in others and model in self.ready[leader]
            )
            used = sum(self.sizes[node][model] for model in self.ready[node])
            if self.device_kind == "cpu":
                used += sum(self.sizes[node][model] for holder, model in self.asleep if holder == node)
            used += sum(member.measured_bytes or 0 for member in members)
            health = Health(
                status="ok",
                uptime_s=self.uptime_s,
                devices=tuple(
                    DeviceHealth(
                        index=index,
                        total_bytes=self.total_bytes,
                        free_bytes=self.total_bytes - taken - self.foreign_bytes,
                    )
                    for index, taken in enumerate((used, *([0] * (self.num_devices - 1))))
                ),
                models=(*(self.status(node, model) for model in self.sizes[node]), *members),
                ceiling_bytes=self.ceiling_bytes,
                host=self.host,
            )
            devices = tuple(
                Device(index=index, kind=self.device_kind, name="card", total_bytes=self.total_bytes)
                for index in range(self.num_devices)
            )
            discovery = Discovery(
                host=node,
                os="",
                version="",
                devices=devices,
                max_devices_per_model=self.num_devices,
                harnesses=("torch", "vllm"),
                dialects=tuple(DIALECTS),
                group_harnesses=("vllm",),
            )
            self.dispatcher.observed(node, discovery, health)

    def finish_load(self) -> None:
        node, model = self.loads[-1]
        self.asleep.pop((node, model), None)
        self.ready[node][model] = self.now
        self.dispatcher.load_ended(ModelOnNode(node, model), self.status(node, model))

    def finish_unload(self, *, asleep: bool = False) -> None:
        node, model, _ = self.unloads[-1]
        self.ready[node].pop(model, None)
        self.asleep.pop((node, model), None)
        if asleep:
            self.asleep[node, model] = self.now
        self.poll(node)
        self.dispatcher.unload_ended(ModelOnNode(node, model), None)

    def reservations(self, name: str) -> tuple[MemoryReservation, ...]:
        """Memory of a node that is reserved for loads."""
        node = self.dispatcher.fleet.node(name)
        assert node is not None
        return tuple(node.reservations)

    def ask(self, name: str, client: str = SOMEBODY) -> list[Lease | CortexError]:
        """A request; what it got, once it did, is in the list."""
        got: list[Lease | CortexError] = []
        resolution = self.dispatcher.resolve(name)
        origin: Origin = "background" if resolution.background else "request"
        pending = PendingRequest(resolution.model_id, bytes, got.append, self.now, origin=origin, client=client)
        self.dispatcher.request_lease(pending)
        return got


def lease_of(got: list[Lease | CortexError]) -> Lease:
    (lease,) = got
    assert isinstance(lease, Lease), lease
    return lease


def node_of(got: list[Lease | CortexError]) -> str:
    return lease_of(got).node
