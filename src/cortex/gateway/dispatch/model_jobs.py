"""Running loads, unloads and worker replacements: each is ordered once and followed to its end.

A load may have to wait until its victims are unloaded. The jobs are kept in the fleet state, where decisions see them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple, Protocol

import msgspec

from cortex.fleet.demand import Demand
from cortex.fleet.devices import ON_DEVICE, Ceilings
from cortex.fleet.placement.decision import Decision
from cortex.fleet.placement.eviction import is_freed_by_sleep
from cortex.fleet.sleeping import WakeRules
from cortex.fleet.topology import ModelOnNode, Node
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.dispatch.fleet_state import FleetState, LoadFailure, LoadJob
from cortex.wire.error_encoding import from_code
from cortex.wire.errors import (
    CortexError,
    InsufficientCapacity,
    LoadFailed,
    UnloadedWhileLoading,
    UpstreamUnavailable,
)
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import Health, ModelState, ModelStatus

Cause = Literal["evicted", "ttl", "operator"]


class MemberPlan(NamedTuple):
    """Where another member of a group is to be started."""

    node: str
    devices: tuple[int, ...]


Watched = Literal["load", "unload"]
Watcher = Callable[[CortexError | None], None]
"""Called once, when the load or unload that it watches ends."""


class Effects(Protocol):
    """The orders to nodes. Each call returns at once; the outcome comes back as an event of the dispatcher.

    `others`: the other members of the group that runs the model, in the order of their ranks."""

    def load(self, node: str, request: LoadRequest, others: tuple[MemberPlan, ...]) -> None:
        """Ends in `load_ended`, after a fresh poll of all its nodes."""

    def unload(self, node: str, request: UnloadRequest, cause: Cause, others: tuple[str, ...]) -> None:
        """Ends in `unload_ended`, after a fresh poll of all its nodes. With `sleep` in the request the model may be
        asleep then."""

    def forget(self, node: str, model: str) -> None:
        """Unload and delist a model known only from load requests. Ends in `observed`."""

    def inspect(self, node: str, requests: tuple[LoadRequest, ...]) -> None:
        """List models and read their files, without a load. Ends in `source_inspected` for each, and in
        `sources_inspected`."""

    def recycle(self, node: str, devices: tuple[int, ...]) -> None:
        """Replace the workers of these devices, which hold no model. Ends in `recycle_ended`."""

    def abandon(self, node: str) -> None:
        """Stop waiting for the node's loads and unloads. They end in no event."""

    def poll_now(self, node: str) -> None:
        """Ends in `observed` or `missed`."""

    def suspend(self, node: str) -> None:
        """Suspend an idle node. Ends in `suspend_ended`."""

    def wake(self, node: str, rules: WakeRules) -> None:
        """Wake a suspended node. Ends in `wake_failed` if that fails; otherwise polls show the result."""

    def mark_down(self, node: str, *, is_down: bool) -> None:
        """Requests at a node that is down fail unless it still sends something; they may then be sent elsewhere."""


class ModelJobs:
    """Owned by the dispatcher; every method runs inside one of its events."""

    def __init__(
        self,
        fleet_state: FleetState,
        effects: Effects,
        event_log: EventLog,
        demand: Demand,
        clock: Callable[[], float],
    ) -> None:
        self._fleet_state = fleet_state
        self._effects = effects
        self._event_log = event_log
        self._demand = demand
        self._clock = clock
        self._watchers: dict[tuple[ModelOnNode, Watched], list[Watcher]] = {}
        self._last_loads: dict[ModelOnNode, tuple[float, float]] = {}
        """When the latest successful load of each model began and ended; forgotten with its unload."""
        self._contexts: dict[ModelOnNode, int | None] = {}
        """The contexts of models that this gateway has loaded, as they were last recorded."""
        self._cancelled: set[ModelOnNode] = set()
        """Loads that the operator cancelled and the node has not ended yet."""
        self._recycling: set[str] = set()
        """Nodes that were ordered to replace workers."""
        self._recycled: dict[str, set[int]] = {}
        """Devices with a new worker, on nodes where others still have the old one."""

    def start(self, decision: Decision, *, again: bool = False) -> None:
        """Carry out a decision to load or wake, victims first. Does nothing when the load is under way already.
        `again`: the model is loaded there, and is unloaded first."""
        if decision.chosen is None:
            return
        target = ModelOnNode(decision.chosen.node, decision.model_id)
        if target in self._fleet_state.loads:
            return
        self._fleet_state.failures.pop(target, None)
        victims = (*decision.evictions, *([target] if again else ()))
        job = LoadJob(
            target,
            decision.chosen.reservation(target.model),
            sum(place.need_bytes or 0 for place in (decision.chosen, *decision.parts)),
            self._clock(),
            decision.origin,
            min_context_tokens=decision.chosen.min_context_tokens,
            max_bytes=decision.max_bytes,
            victims=frozenset(victims),
            wakes=decision.action == "wake",
            parts=tuple((part.node, part.reservation(target.model)) for part in decision.parts),
        )
        self._fleet_state.loads[target] = job
        self._demand.load_began(target, for_requests=decision.origin in ("request", "background"))
        for victim in victims:
            holder = self._fleet_state.fleet.node(victim.node)
            # A model that puts weights into host memory needs the room that a sleeping one would take there.
            frees = holder is not None and is_freed_by_sleep(holder) and decision.chosen.split is None
            is_again = victim == target
            seen = holder.residencies[target.model].status.context_tokens if is_again and holder is not None else None
            sleep = frees and not is_again
            self.unload(victim, cause="evicted", for_model=target.model, sleep=sleep, seen_context_tokens=seen)
        if not job.victims:
            self._load(job)

    def unload(
        self,
        target: ModelOnNode,
        *,
        cause: Cause,
        for_model: str | None = None,
        force: bool = False,
        sleep: bool = False,
        seen_context_tokens: int | None = None,
    ) -> None:
        """Order an unload, unless one is under way. `sleep`: the node may keep the weights in host memory.
        `seen_context_tokens`: as in the order."""
        if target in self._fleet_state.unloads:
            return
        node, model = target
        self._fleet_state.unloads[target] = self._clock()
        self._event_log.happened("unload_started", node=node, model=model, cause=cause, for_model=for_model)
        others = tuple(holder.name for holder, _ in self._fleet_state.fleet.members(node, model))
        request = UnloadRequest(model_id=model, force=force, sleep=sleep, seen_context_tokens=seen_context_tokens)
        self._effects.unload(node, request, cause, others)

    def cancel_load(self, target: ModelOnNode) -> None:
        """End a load, before it begins or on its node; also one that another gateway ordered."""
        job = self._fleet_state.loads.get(target)
        if job is None:
            if self._fleet_state.is_starting(target):
                self.unload(target, cause="operator", force=True)
            else:
                self.notify(target, "load", None)
        elif job.victims:  # they are being unloaded already; the load itself has not begun
            del self._fleet_state.loads[target]
            self._event_log.settled(target.model)
            self._event_log.happened("load_cancelled", node=target.node, model=target.model)
            self.notify(target, "load", UnloadedWhileLoading(f"The load of {target.model} was cancelled."))
        else:
            self._cancelled.add(target)
            self.unload(target, cause="operator", force=True)

    def take_cancelled(self, target: ModelOnNode, result: ModelStatus | CortexError) -> bool:
        """Whether the load that just ended was cancelled, here or elsewhere."""
        is_cancelled = target in self._cancelled or isinstance(result, UnloadedWhileLoading)
        self._cancelled.discard(target)
        return is_cancelled

    def load_ended(
        self, target: ModelOnNode, result: ModelStatus | CortexError, *, is_cancelled: bool
    ) -> LoadJob | None:
        """Record how a load ended; returns its job, so that a failed one may be tried again."""
        node, model = target
        job = self._fleet_state.loads.pop(target, None)
        self._event_log.settled(model)
        if isinstance(result, ModelStatus):
            self._demand.load_ended(target, self._clock())
            self._fleet_state.update_model(node, result, self._clock())
            self._fleet_state.count_load(node)
            if job is not None:
                self._last_loads[target] = (job.begun_at, self._clock())
            self._fleet_state.failures.pop(target, None)
            self._fleet_state.shortfalls.pop(target, None)
            self._loaded(target, result)
        else:
            self._demand.gone(target)
            kind, why = ("load_cancelled", {}) if is_cancelled else ("load_failed", {"why": result.message})
            self._event_log.happened(kind, node=node, model=model, **why)
        return job

    def load_seconds(self, target: ModelOnNode, since: float) -> float:
        """How much of the time since `since` the latest load there took, with the unloads that it waited for."""
        job = self._fleet_state.loads.get(target)  # a poll may show the model ready before its load has ended here
        begun_at, ended_at = (job.begun_at, self._clock()) if job else self._last_loads.get(target, (0.0, 0.0))
        return max(0.0, ended_at - max(begun_at, since))

    def give_up(self, target: ModelOnNode, error: CortexError) -> None:
        """Block the load there until `retry_failed_after_s` has passed or the missing memory is available."""
        self._fleet_state.loads.pop(target, None)
        self._fleet_state.shortfalls.pop(target, None)
        have_bytes = 0 if isinstance(error, InsufficientCapacity) else None
        failure = LoadFailure(self._clock(), error.message, error.code, have_bytes=have_bytes)
        self._fleet_state.failures[target] = failure
        self.notify(target, "load", error)

    def unload_ended(self, target: ModelOnNode, error: CortexError | None, *, was_reloaded: bool = False) -> None:
        """Record how an unload ended; loads that waited for it begin, or fail with it. `was_reloaded`: the model was to
        be loaded again, for which another gateway was first."""
        if was_reloaded:
            self._reload_unneeded(target)
            return
        node, model = target
        self._fleet_state.unloads.pop(target, None)
        self._event_log.settled(model)
        if error is None:
            self._demand.gone(target)
            self._last_loads.pop(target, None)
            self._contexts.pop(target, None)
            self._fleet_state.failures.pop(target, None)
            self._fleet_state.shortfalls.pop(target, None)
            self._fleet_state.forget_ready(target, ModelState.COLD, self._clock())
            is_asleep = self._fleet_state.is_asleep(target)
            self._event_log.happened("model_asleep" if is_asleep else "model_unloaded", node=node, model=model)
        else:
            self._event_log.happened("unload_failed", node=node, model=model, why=error.message)
        for job in list(self._fleet_state.loads.values()):
            if target not in job.victims:
                continue
            if error is not None:
                reason = f"{model} could not be unloaded to make room: {error.message}"
                self.give_up(job.target, LoadFailed(reason))
                continue
            job = replace(job, victims=job.victims - {target})
            self._fleet_state.loads[job.target] = job
            if not job.victims:
                self._load(job)
        self.notify(target, "unload", error)
        if error is None and target not in self._fleet_state.loads:  # otherwise the load reports its own end
            self.notify(target, "load", LoadFailed(f"{model} was unloaded on {node}, by an operator or to make room."))

    def _reload_unneeded(self, target: ModelOnNode) -> None:
        self._fleet_state.unloads.pop(target, None)
        if self._fleet_state.loads.pop(target, None) is not None:
            self._demand.reload_unneeded(target.model)
            self._demand.load_ended(target, self._clock())
            self._event_log.happened("load_cancelled", node=target.node, model=target.model, why="it has more context")
        self._event_log.settled(target.model)
        self.notify(target, "load", None)

    def recycle(self, node: Node) -> None:
        """Order new workers for the devices of `node` that hold no model and still have their old one."""
        # A model that is asleep holds no device memory, but its worker holds its weights.
        in_worker = ON_DEVICE | {ModelState.ASLEEP}
        occupied = {
            index for held in node.residencies.values() if held.state in in_worker for index in held.status.devices
        }
        occupied |= {index for member in node.members for index in member.devices}
        old = {device.index for device in node.devices} - self._recycled.get(node.name, set())
        devices = tuple(sorted(old - occupied))
        if devices and node.name not in self._recycling:
            self._recycling.add(node.name)
            self._effects.recycle(node.name, devices)

    def recycle_ended(self, node: str, result: tuple[int, ...] | CortexError) -> None:
        """Record which workers are new. Loads count from zero once all are, or when the node cannot replace them."""
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
        self._fleet_state.reset_loads(node)

    def abandon(self, node: str, why: str) -> None:
        """Drop everything that is under way on `node`; its watchers get an error: the node, then `why`."""
        self._effects.abandon(node)
        self._recycling.discard(node)
        self._cancelled = {target for target in self._cancelled if target.node != node}
        for jobs in (self._fleet_state.loads, self._fleet_state.unloads):
            for target in [target for target in jobs if target.node == node]:
                del jobs[target]
        for job in [job for job in self._fleet_state.loads.values() if node in {victim.node for victim in job.victims}]:
            # The unload that this load waits for cannot end. The dispatcher decides again whether to retry.
            del self._fleet_state.loads[job.target]
            self.notify(job.target, "load", UpstreamUnavailable(f"Node {node} {why}."))
        for target, kind in [watched for watched in self._watchers if watched[0].node == node]:
            self.notify(target, kind, UpstreamUnavailable(f"Node {node} {why}."))

    def watch(self, target: ModelOnNode, kind: Watched, watcher: Watcher) -> None:
        """Call `watcher` when the load or the unload at `target` ends. An unload also ends the loads that it makes
        impossible: their watchers get LoadFailed."""
        self._watchers.setdefault((target, kind), []).append(watcher)

    def notify(self, target: ModelOnNode, kind: Watched, error: CortexError | None) -> None:
        """A load or an unload ended at `target`."""
        for watcher in self._watchers.pop((target, kind), ()):
            watcher(error)

    def _loaded(self, target: ModelOnNode, status: ModelStatus) -> None:
        """Record that the model is ready, with this context."""
        self._contexts[target] = status.context_tokens
        why = {} if status.context_shortage is None else {"why": status.context_shortage}
        node, model = target
        num_bytes, tokens = status.measured_bytes, status.context_tokens
        self._event_log.happened("model_loaded", node=node, model=model, bytes=num_bytes, context_tokens=tokens, **why)

    def observed(self, node: str, health: Health) -> None:
        """Record reloads for other contexts that this gateway has not ordered, and notify the watchers of loads that
        another one ordered: those end in a poll."""
        for status in health.models:
            target = ModelOnNode(node, status.id)
            tokens = status.context_tokens
            if status.state is ModelState.READY and self._contexts.get(target, tokens) != tokens:
                self._loaded(target, status)
        for status in health.models if self._watchers else ():
            target = ModelOnNode(node, status.id)
            is_watched = (target, "load") in self._watchers
            if not is_watched or target in self._fleet_state.loads or target in self._fleet_state.unloads:
                continue
            if status.state is ModelState.READY:
                self.notify(target, "load", None)
            elif status.state in (ModelState.COLD, ModelState.FAILED):
                reason = status.reason or f"{status.id} is {status.state} on {node}."
                self.notify(target, "load", from_code(status.reason_code or LoadFailed.code, reason))

    def _load(self, job: LoadJob) -> None:
        node, model = job.target
        spec = self._fleet_state.settings.catalogue.spec(model)
        leader = self._fleet_state.fleet.node(node) or Node(name=node)
        # Equal parts: the smallest ceiling decides. A node respects its own, also when a model grows later.
        limits = job.max_bytes if job.parts or leader.ceilings != Ceilings() else ()
        self._event_log.happened("load_started", node=node, model=model)
        self._effects.load(
            node,
            msgspec.structs.replace(
                spec.load_request,
                min_context_tokens=job.min_context_tokens,
                devices=job.reservation.devices,
                tensor_parallel=1 if spec.pipeline_parallel > 1 else max(1, len(job.reservation.devices)),
                max_bytes=min((each for each in limits if each is not None), default=None),
                wake_only=job.wakes and bool(job.parts),
            ),
            tuple(MemberPlan(name, reservation.devices) for name, reservation in job.parts),
        )
