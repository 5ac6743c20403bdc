"""Nodes of a simulated fleet: dictionaries with models of given sizes, and the real dispatcher over them."""

from __future__ import annotations

import random
from collections import deque

from cortex.fleet.catalogue import Catalogue, ModelSpec
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
DEVICE_BYTES = 80 * GIB
MODELS_PER_NODE = 20
READY_PER_NODE = 2
MAX_WAIT_S = 120.0


class SimulatedFleet:
    """The effects of the dispatcher: orders are kept until `settle` or the caller ends them. Time is `now`."""

    def __init__(self, num_nodes: int, num_models: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 10_000.0
        self.names = [f"node-{index:03d}" for index in range(num_nodes)]
        self.models = [f"model-{index:04d}" for index in range(num_models)]
        self.sizes = {model: self.random.randint(20, 38) * GIB for model in self.models}
        self.listed: dict[str, list[str]] = {
            name: self.random.sample(self.models, min(MODELS_PER_NODE, num_models)) for name in self.names
        }
        self.ready: dict[str, dict[str, float]] = {name: {} for name in self.names}
        """Since when each model is ready."""
        self.last_used: dict[tuple[str, str], float] = {}
        self.orders: deque[tuple[str, ModelOnNode]] = deque()
        self.num_loads = self.num_evictions = 0
        self.is_up = dict.fromkeys(self.names, True)
        for name in self.names:
            for model in self.listed[name][:READY_PER_NODE]:
                self.ready[name][model] = self.now - 1000.0
                self.last_used[name, model] = self.now - self.random.uniform(0, 900)
        self.discovery = Discovery(
            host="simulated",
            os="linux",
            version="0",
            devices=(Device(index=0, kind="cuda", name="card", total_bytes=DEVICE_BYTES),),
            harnesses=("torch",),
            dialects=("openai_chat",),
        )
        settings = DispatchSettings(
            Catalogue(models=tuple(ModelSpec(id=model, ttl_s=3600) for model in self.models)),
            EvictionRules(),
            tuple(NeuronSection(name=name, endpoint="http://simulated") for name in self.names),
            max_wait_s=MAX_WAIT_S,
            max_waiting=100_000,
            missed_polls=3,
        )
        self.dispatcher = Dispatcher(self, EventLog(), lambda: self.now, settings)
        for name in self.names:
            self.dispatcher.observed(name, *self.report(name))

    # --- the dispatcher's orders

    def load(self, node: str, request: LoadRequest, _others: tuple[MemberPlan, ...]) -> None:
        self.num_loads += 1
        self.orders.append(("load", ModelOnNode(node, request.model_id)))

    def unload(self, node: str, request: UnloadRequest, cause: Cause, _others: tuple[str, ...]) -> None:
        self.num_evictions += cause == "evicted"
        self.orders.append(("unload", ModelOnNode(node, request.model_id)))

    def forget(self, node: str, model: str) -> None: ...

    def inspect(self, node: str, requests: tuple[LoadRequest, ...]) -> None: ...

    def recycle(self, node: str, _devices: tuple[int, ...]) -> None:
        self.orders.append(("recycle", ModelOnNode(node, "")))

    def abandon(self, node: str) -> None:
        self.orders = deque(order for order in self.orders if order[1].node != node)

    def poll_now(self, node: str) -> None: ...

    def mark_down(self, node: str, *, is_down: bool) -> None: ...

    def suspend(self, node: str) -> None: ...

    def wake(self, node: str, rules: WakeRules) -> None: ...

    # --- the nodes

    def report(self, node: str) -> tuple[Discovery, Health]:
        ready = self.ready[node]
        models = []
        for model in dict.fromkeys((*self.listed[node], *ready)):
            since = ready.get(model)
            is_ready = since is not None
            models.append(
                ModelStatus(
                    id=model,
                    state=ModelState.READY if is_ready else ModelState.COLD,
                    devices=(0,) if is_ready else (),
                    family="simulated",
                    estimate_bytes=self.sizes[model],
                    measured_bytes=self.sizes[model] if is_ready else None,
                    context_tokens=32_768,
                    load=ModelLoad(),
                    state_age_s=0.0 if since is None else self.now - since,
                    idle_s=self.now - self.last_used.get((node, model), self.now) if is_ready else 0.0,
                )
            )
        free_bytes = DEVICE_BYTES - sum(self.sizes[model] for model in ready)
        device = DeviceHealth(index=0, total_bytes=DEVICE_BYTES, free_bytes=free_bytes)
        return self.discovery, Health(status="ok", uptime_s=self.now, devices=(device,), models=tuple(models))

    def end(self, order: tuple[str, ModelOnNode]) -> None:
        """An order was carried out: the node reports, and the dispatcher learns that it ended."""
        kind, target = order
        if kind == "recycle":
            self.dispatcher.recycle_ended(target.node, (0,))
            return
        if kind == "load":
            self.ready[target.node][target.model] = self.now
            self.last_used[target] = self.now
        else:
            self.ready[target.node].pop(target.model, None)
        discovery, health = self.report(target.node)
        self.dispatcher.observed(target.node, discovery, health)
        if kind == "unload":
            self.dispatcher.unload_ended(target, None)
        else:
            self.dispatcher.load_ended(target, next(each for each in health.models if each.id == target.model))

    def settle(self) -> None:
        """End all orders, and those that follow from them."""
        while self.orders:
            self.end(self.orders.popleft())

    # --- requests

    def ready_models(self) -> list[str]:
        return sorted({model for held in self.ready.values() for model in held})

    def cold_models(self) -> list[str]:
        ready = {model for held in self.ready.values() for model in held}
        return [model for model in self.models if model not in ready]

    def warm(self, name: str) -> None:
        """One request for a ready model, which ends at once."""
        model = self.dispatcher.resolve(name).model_id
        lease = self.dispatcher.lease_now(model, lambda: b"a prompt", frozenset())
        if lease is not None:
            self.dispatcher.release(lease)

    def request(self, name: str) -> None:
        """One request that may have to wait; its lease ends when it is delivered."""

        def deliver(result: Lease | CortexError) -> None:
            if isinstance(result, Lease):
                self.dispatcher.release(result)

        model = self.dispatcher.resolve(name).model_id
        self.dispatcher.request_lease(PendingRequest(model, lambda: b"a prompt", deliver, self.now))
