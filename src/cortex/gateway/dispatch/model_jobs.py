"""Loads, unloads and new workers under way: ordered once, followed to their end, with whoever wants to hear of it.

A load may have to wait for its victims to be gone. Whatever ends is drawn into the picture; what follows from it for
those who wait is the dispatcher's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from cortex.fleet.decision import Decision
from cortex.fleet.queueing import ModelOnNode
from cortex.fleet.topology import ON_DEVICE, Node
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.fleet_state import FleetState, LoadFailure, LoadJob
from cortex.wire.errors import CortexError, LoadFailed, UpstreamUnavailable
from cortex.wire.node import Health, LoadRequest, ModelState, ModelStatus, UnloadRequest

Watcher = Callable[[CortexError | None], None]
"""Hears once how a load or unload at a seat ended."""


class Effects(Protocol):
    """What is ordered of the world. Each call returns at once; its outcome comes back as an event of the dispatcher."""

    def load(self, node: str, request: LoadRequest) -> None:
        """Ends in `load_ended`."""

    def unload(self, node: str, request: UnloadRequest, cause: str) -> None:
        """`cause` is `evicted`, `ttl` or `operator`. Ends in `unload_ended`, after a fresh poll of the node: with
        `sleep` in the request the model may sleep there then."""

    def recycle(self, node: str, devices: tuple[int, ...]) -> None:
        """Replace the workers of these devices, which hold no model. Ends in `recycle_ended`."""

    def abandon(self, node: str) -> None:
        """The node is down: stop waiting for its loads and unloads. They end in no event."""

    def look(self, node: str) -> None:
        """Poll the node now; ends in `observed` or `missed`."""


class ModelJobs:
    """Owned by the dispatcher; its jobs live in the picture, where decisions see them."""

    def __init__(
        self, fleet_state: FleetState, effects: Effects, event_log: EventLog, clock: Callable[[], float]
    ) -> None:
        self._fleet_state = fleet_state
        self._effects = effects
        self._event_log = event_log
        self._clock = clock
        self._watchers: dict[ModelOnNode, list[Watcher]] = {}
        self._recycling: set[str] = set()
        """Nodes that have been told to replace workers."""
        self._recycled: dict[str, set[int]] = {}
        """Devices with a new worker, on nodes where others still have the old one."""

    def begin(self, decision: Decision) -> None:
        """Carry out a decision to load or wake: victims first. Does nothing when it is under way already."""
        node, model = decision.node, decision.model_id
        if node is None or (node, model) in self._fleet_state.loads:
            return
        job = LoadJob(
            node,
            model,
            decision.devices,
            decision.need_bytes or 0,
            decision.takes_bytes or 0,
            self._clock(),
            victims=frozenset(decision.victims),
        )
        self._fleet_state.loads[node, model] = job
        for victim in decision.victims:
            self.unload(node, victim, cause="evicted", for_model=model, sleep=True)
        if not job.victims:
            self._load(job)

    def unload(
        self,
        node: str,
        model: str,
        *,
        cause: str,
        for_model: str | None = None,
        force: bool = False,
        sleep: bool = False,
    ) -> None:
        """Order an unload, unless one is under way. `sleep`: the node may keep the weights in host memory."""
        if (node, model) in self._fleet_state.unloads:
            return
        self._fleet_state.unloads[node, model] = self._clock()
        self._event_log.happened("unload_started", node=node, model=model, cause=cause, for_model=for_model)
        self._effects.unload(node, UnloadRequest(model_id=model, force=force, sleep=sleep), cause)

    def load_ended(self, node: str, model: str, result: ModelStatus | CortexError) -> LoadJob | None:
        """Note how a load ended; the job it was, so that a failed one may be tried again."""
        job = self._fleet_state.loads.pop((node, model), None)
        self._event_log.settled(model)
        if isinstance(result, ModelStatus):
            self._fleet_state.put(node, result, self._clock())
            self._fleet_state.count_load(node)
            self._fleet_state.failures.pop((node, model), None)
            self._fleet_state.shortfalls.pop((node, model), None)
            self._event_log.happened("model_loaded", node=node, model=model, bytes=result.measured_bytes)
        else:
            self._event_log.happened("load_failed", node=node, model=model, why=result.message)
        return job

    def give_up(self, node: str, model: str, error: CortexError) -> None:
        """The load will not be tried again there for a while."""
        self._fleet_state.loads.pop((node, model), None)
        self._fleet_state.shortfalls.pop((node, model), None)
        self._fleet_state.failures[node, model] = LoadFailure(self._clock(), error.message)
        self.tell((node, model), error)

    def unload_ended(self, node: str, model: str, error: CortexError | None) -> None:
        """Note how an unload ended; loads that waited for it begin, or fail with it."""
        self._fleet_state.unloads.pop((node, model), None)
        self._event_log.settled(model)
        if error is None:
            self._fleet_state.forget_ready(node, model, self._clock())
            is_asleep = self._fleet_state.is_asleep(node, model)
            self._event_log.happened("model_asleep" if is_asleep else "model_unloaded", node=node, model=model)
        else:
            self._event_log.happened("unload_failed", node=node, model=model, why=error.message)
        for job in [job for job in self._fleet_state.loads.values() if job.node == node and model in job.victims]:
            if error is None:
                self._victim_gone(job, model)
            else:
                reason = f"{model} could not be unloaded to make room: {error.message}"
                self.give_up(node, job.model, LoadFailed(reason))
        self.tell((node, model), error)

    def recycle(self, node: Node) -> None:
        """Order new workers for the devices of `node` that hold no model and still have their old one."""
        # A sleeper holds no device memory, but its weights are its worker's.
        in_worker = ON_DEVICE | {ModelState.ASLEEP}
        occupied = {
            index for held in node.residencies.values() if held.state in in_worker for index in held.status.devices
        }
        old = {device.index for device in node.devices} - self._recycled.get(node.name, set())
        devices = tuple(sorted(old - occupied))
        if devices and node.name not in self._recycling:
            self._recycling.add(node.name)
            self._effects.recycle(node.name, devices)

    def recycle_ended(self, node: str, result: tuple[int, ...] | CortexError) -> None:
        """Note which workers are new. With the last of them, or a node that cannot do it, loads count from zero."""
        self._recycling.discard(node)
        reported = self._fleet_state.fleet.node(node)
        if reported is None:
            return
        if isinstance(result, tuple):
            recycled = self._recycled.setdefault(node, set())
            recycled.update(result)
            if result:
                self._event_log.happened("workers_recycled", node=node, devices=result)
            if not recycled.issuperset(device.index for device in reported.devices):
                return
        else:
            self._event_log.happened("recycle_failed", node=node, why=result.message)
        self._recycled.pop(node, None)
        self._fleet_state.forget_loads(node)

    def abandon(self, node: str, why: str) -> None:
        """The node is down, and with it everything that was under way there."""
        self._effects.abandon(node)
        self._recycling.discard(node)
        for key in [key for key in self._fleet_state.loads if key[0] == node]:
            del self._fleet_state.loads[key]
        for key in [key for key in self._fleet_state.unloads if key[0] == node]:
            del self._fleet_state.unloads[key]
        for key in [key for key in self._watchers if key[0] == node]:
            self.tell(key, UpstreamUnavailable(f"Node {node} went down: {why}"))

    def watch(self, key: ModelOnNode, watcher: Watcher) -> None:
        """Call `watcher` when what is under way at `key` has ended."""
        self._watchers.setdefault(key, []).append(watcher)

    def tell(self, key: ModelOnNode, error: CortexError | None) -> None:
        """Something ended at `key`: those who watch it hear how."""
        for watcher in self._watchers.pop(key, ()):
            watcher(error)

    def notice(self, node: str, health: Health) -> None:
        """Loads that somebody else ordered end in a poll."""
        for status in health.models:
            key = (node, status.id)
            if key not in self._watchers or key in self._fleet_state.loads or key in self._fleet_state.unloads:
                continue
            if status.state is ModelState.READY:
                self.tell(key, None)
            elif status.state in (ModelState.COLD, ModelState.FAILED):
                self.tell(key, LoadFailed(status.reason or f"{status.id} is {status.state} on {node}."))

    def _victim_gone(self, job: LoadJob, victim: str) -> None:
        left = replace(job, victims=job.victims - {victim})
        self._fleet_state.loads[job.node, job.model] = left
        if not left.victims:
            self._load(left)

    def _load(self, job: LoadJob) -> None:
        spec = self._fleet_state.catalogue.spec(job.model)
        self._event_log.happened("load_started", node=job.node, model=job.model)
        self._effects.load(
            job.node,
            LoadRequest(
                model_id=spec.id,
                source=spec.source,
                harness=spec.harness,
                quant=spec.quant,
                devices=job.devices,
                tensor_parallel=max(1, len(job.devices)),
                context_tokens=spec.context,
            ),
        )
