"""Loads, unloads and new workers under way: ordered once, followed to their end, with whoever wants to hear of it.

A load may have to wait for its victims to be gone. Whatever ends is drawn into the picture; what follows from it for
those who wait is the dispatcher's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from cortex.fleet.decision import Decision
from cortex.fleet.queueing import Seat
from cortex.fleet.topology import ON_DEVICE, Node
from cortex.gateway.journal import Journal
from cortex.gateway.picture import LoadFailure, LoadJob, Picture
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
        `park` in the request the model may sleep there then."""

    def recycle(self, node: str, devices: tuple[int, ...]) -> None:
        """Replace the workers of these devices, which hold no model. Ends in `recycle_ended`."""

    def abandon(self, node: str) -> None:
        """The node is down: stop waiting for its loads and unloads. They end in no event."""

    def look(self, node: str) -> None:
        """Poll the node now; ends in `observed` or `missed`."""


class Orders:
    """Owned by the dispatcher; its jobs live in the picture, where decisions see them."""

    def __init__(self, picture: Picture, effects: Effects, journal: Journal, clock: Callable[[], float]) -> None:
        self._picture = picture
        self._effects = effects
        self._journal = journal
        self._clock = clock
        self._watchers: dict[Seat, list[Watcher]] = {}
        self._recycling: set[str] = set()
        """Nodes that have been told to replace workers."""
        self._recycled: dict[str, set[int]] = {}
        """Devices with a new worker, on nodes where others still have the old one."""

    def begin(self, decision: Decision) -> None:
        """Carry out a decision to load or wake: victims first. Does nothing when it is under way already."""
        node, model = decision.node, decision.model_id
        if node is None or (node, model) in self._picture.loads:
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
        self._picture.loads[node, model] = job
        for victim in decision.victims:
            self.unload(node, victim, cause="evicted", for_model=model, park=True)
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
        park: bool = False,
    ) -> None:
        """Order an unload, unless one is under way. `park`: the node may keep the weights in host memory."""
        if (node, model) in self._picture.unloads:
            return
        self._picture.unloads[node, model] = self._clock()
        self._journal.happened("unload_started", node=node, model=model, cause=cause, for_model=for_model)
        self._effects.unload(node, UnloadRequest(model_id=model, force=force, park=park), cause)

    def load_ended(self, node: str, model: str, result: ModelStatus | CortexError) -> LoadJob | None:
        """Note how a load ended; the job it was, so that a failed one may be tried again."""
        job = self._picture.loads.pop((node, model), None)
        self._journal.settled(model)
        if isinstance(result, ModelStatus):
            self._picture.put(node, result, self._clock())
            self._picture.count_load(node)
            self._picture.failures.pop((node, model), None)
            self._picture.shortfalls.pop((node, model), None)
            self._journal.happened("model_loaded", node=node, model=model, bytes=result.measured_bytes)
        else:
            self._journal.happened("load_failed", node=node, model=model, why=result.message)
        return job

    def give_up(self, node: str, model: str, error: CortexError) -> None:
        """The load will not be tried again there for a while."""
        self._picture.loads.pop((node, model), None)
        self._picture.shortfalls.pop((node, model), None)
        self._picture.failures[node, model] = LoadFailure(self._clock(), error.message)
        self.tell((node, model), error)

    def unload_ended(self, node: str, model: str, error: CortexError | None) -> None:
        """Note how an unload ended; loads that waited for it begin, or fail with it."""
        self._picture.unloads.pop((node, model), None)
        self._journal.settled(model)
        if error is None:
            self._picture.forget_ready(node, model, self._clock())
            is_asleep = self._picture.is_asleep(node, model)
            self._journal.happened("model_parked" if is_asleep else "model_unloaded", node=node, model=model)
        else:
            self._journal.happened("unload_failed", node=node, model=model, why=error.message)
        for job in [job for job in self._picture.loads.values() if job.node == node and model in job.victims]:
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
        reported = self._picture.fleet.node(node)
        if reported is None:
            return
        if isinstance(result, tuple):
            recycled = self._recycled.setdefault(node, set())
            recycled.update(result)
            if result:
                self._journal.happened("workers_recycled", node=node, devices=result)
            if not recycled.issuperset(device.index for device in reported.devices):
                return
        else:
            self._journal.happened("recycle_failed", node=node, why=result.message)
        self._recycled.pop(node, None)
        self._picture.forget_loads(node)

    def abandon(self, node: str, why: str) -> None:
        """The node is down, and with it everything that was under way there."""
        self._effects.abandon(node)
        self._recycling.discard(node)
        for seat in [seat for seat in self._picture.loads if seat[0] == node]:
            del self._picture.loads[seat]
        for seat in [seat for seat in self._picture.unloads if seat[0] == node]:
            del self._picture.unloads[seat]
        for seat in [seat for seat in self._watchers if seat[0] == node]:
            self.tell(seat, UpstreamUnavailable(f"Node {node} went down: {why}"))

    def watch(self, seat: Seat, watcher: Watcher) -> None:
        """Call `watcher` when what is under way at `seat` has ended."""
        self._watchers.setdefault(seat, []).append(watcher)

    def tell(self, seat: Seat, error: CortexError | None) -> None:
        """Something ended at `seat`: those who watch it hear how."""
        for watcher in self._watchers.pop(seat, ()):
            watcher(error)

    def notice(self, node: str, health: Health) -> None:
        """Loads that somebody else ordered end in a poll."""
        for status in health.models:
            seat = (node, status.id)
            if seat not in self._watchers or seat in self._picture.loads or seat in self._picture.unloads:
                continue
            if status.state is ModelState.READY:
                self.tell(seat, None)
            elif status.state in (ModelState.COLD, ModelState.FAILED):
                self.tell(seat, LoadFailed(status.reason or f"{status.id} is {status.state} on {node}."))

    def _victim_gone(self, job: LoadJob, victim: str) -> None:
        left = replace(job, victims=job.victims - {victim})
        self._picture.loads[job.node, job.model] = left
        if not left.victims:
            self._load(left)

    def _load(self, job: LoadJob) -> None:
        spec = self._picture.catalogue.spec(job.model)
        self._journal.happened("load_started", node=job.node, model=job.model)
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
