"""One device as the daemon sees it: loads models onto it and sends requests to them.

The supervisor spawns the device's worker on first use and replaces it when it is lost. A lost worker takes its models
with it: each `ModelSink` is notified once, and its owner decides whether to load the model again. Everything here runs
on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from dataclasses import dataclass, field, replace
from typing import Literal

from cortex.ipc.channel import Unsendable
from cortex.neuron.engine.request import EngineRequest, LoadSpec
from cortex.neuron.worker import protocol
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import Damaged, LoadRejected, ModelSink, Resident, SleepRejected
from cortex.neuron.worker.process import WorkerLost, WorkerProcess, WorkerTimeouts
from cortex.neuron.worker.protocol import Command, DeviceAddress, Event, MemoryReading, Reply
from cortex.wire.words import os_error_in_words

log = logging.getLogger(__name__)

RECLAIM_INTERVAL_S = 0.05

WorkerState = Literal["none", "starting", "running", "faulted"]


@dataclass(slots=True)
class _Model:
    sink: ModelSink
    is_loaded: bool = False
    live: set[str] = field(default_factory=set)
    """Ids of the requests in it."""


class WorkerSupervisor:
    def __init__(
        self, device: DeviceAddress, worker_factory: WorkerFactory, *, timeouts: WorkerTimeouts | None = None
    ) -> None:
        self.device = device
        self.state: WorkerState = "none"
        self.freed_at_s = -math.inf
        """When memory was last freed here, on the loop's clock; readings of the device may lag behind."""
        self._timeouts = timeouts or WorkerTimeouts()
        self._worker_factory = worker_factory
        self._worker: WorkerProcess | None = None
        self._spawning = asyncio.Lock()
        self._models: dict[int, _Model] = {}
        self._numbers = itertools.count(1)
        """Handles and query numbers, never reused."""

    @property
    def process_id(self) -> int | None:
        return self._worker.process_id if self._worker is not None else None

    @property
    def replica_devices(self) -> tuple[tuple[int, ...], ...]:
        return (self.device_indices,)

    @property
    def device_indices(self) -> tuple[int, ...]:
        return (self.device.index,)

    @property
    def has_models(self) -> bool:
        return bool(self._models)

    # Models

    async def load(self, spec: LoadSpec, sink: ModelSink) -> Resident:
        """Loads a model. Cancelling this call cancels the load, and returns when nothing of it is left.

        Raises LoadRejected (nothing is left) or WorkerLost.
        """
        worker = await self._ensure_worker()
        handle = next(self._numbers)
        try:
            reply = worker.call(handle, protocol.Load(handle, spec))
        except Unsendable as error:
            raise LoadRejected(FaultKind.REQUEST, f"the load cannot be sent to the engine: {error}") from error
        self._models[handle] = _Model(sink)
        try:
            loaded = await asyncio.shield(reply)
        except asyncio.CancelledError:
            await self._cancel_load(worker, handle, reply)
            raise
        if not isinstance(loaded, protocol.Loaded):
            assert isinstance(loaded, protocol.ModelLoadFailed)
            raise LoadRejected(loaded.kind, loaded.message, cancelled=loaded.cancelled)
        return _resident(loaded)

    async def _cancel_load(self, worker: WorkerProcess, handle: int, reply: asyncio.Future[Reply]) -> None:
        worker.send(protocol.CancelLoad(handle))
        await asyncio.wait({reply}, timeout=self._timeouts.unload_s)
        if not reply.done():
            worker.kill(f"a cancelled load did not stop within {self._timeouts.unload_s:.0f} s")
            await asyncio.wait({reply})
        if reply.exception() is None and isinstance(loaded := reply.result(), protocol.Loaded):
            await self.unload(_resident(loaded))  # it finished just before

    async def unload(self, resident: Resident) -> Reclaimed:
        """Frees a model and waits, with a timeout, until its memory is free. Never fails: if the memory does not come
        back and the worker has no other models, the worker is replaced."""
        try:
            unloaded = await self._call(resident.handle, protocol.Unload(resident.handle))
            assert isinstance(unloaded, protocol.Unloaded)
            reclaimed = await self._await_memory(resident, resident.process_bytes, unloaded)
        except WorkerLost:
            return Reclaimed(resident.process_bytes, resident.process_bytes)
        if not reclaimed.is_complete:
            if await self.recycle():
                log.info("%s: after an unload %s; its worker was replaced", self.device.thread_name, reclaimed)
                return Reclaimed(resident.process_bytes, resident.process_bytes)
            log.warning("%s: after an unload %s", self.device.thread_name, reclaimed)
        return reclaimed

    async def sleep(self, resident: Resident) -> Resident:
        """Moves a model to host memory and waits, with a timeout, until its device memory is free. Returns its new
        sizes.

        Raises SleepRejected, also when the memory does not come back, or WorkerLost.
        """
        slept = await self._call(resident.handle, protocol.Sleep(resident.handle))
        if not isinstance(slept, protocol.Slept):
            assert isinstance(slept, protocol.SleepFailed)
            raise SleepRejected(slept.message)
        # On a CPU the weights stay in the memory that is measured.
        kept_bytes = slept.host_bytes if self.device.kind == "cpu" else 0
        reclaimed = await self._await_memory(resident, max(0, resident.process_bytes - kept_bytes), slept)
        if not reclaimed.is_complete:
            raise SleepRejected(f"the model was put to sleep, but only {reclaimed}")
        left_bytes = max(0, resident.process_bytes - reclaimed.freed_bytes)
        return replace(resident, process_bytes=left_bytes, host_bytes=slept.host_bytes)

    async def wake(self, resident: Resident) -> Resident:
        """Makes a sleeping model serve again. Returns its new sizes.

        Raises LoadRejected (it is still asleep), Damaged (it was closed) or WorkerLost.
        """
        woken = await self._call(resident.handle, protocol.Wake(resident.handle))
        if not isinstance(woken, protocol.Woken):
            assert isinstance(woken, protocol.WakeFailed)
            raise Damaged(woken.message) if woken.damaged else LoadRejected(woken.kind, woken.message)
        process_bytes = resident.process_bytes + max(0, woken.after.process_bytes - woken.before.process_bytes)
        measured_bytes = max(process_bytes, resident.info.weight_bytes + resident.info.kv_bytes)
        return replace(resident, measured_bytes=measured_bytes, process_bytes=process_bytes, host_bytes=0)

    async def memory(self) -> MemoryReading:
        """The worker's view of the device's memory, measured between two steps. Raises WorkerLost."""
        query = next(self._numbers)
        reply = await self._call(query, protocol.QueryMemory(query))
        assert isinstance(reply, protocol.Memory)
        return reply.memory

    async def _await_memory(
        self, resident: Resident, expected_bytes: int, freed: protocol.Unloaded | protocol.Slept
    ) -> Reclaimed:
        # The driver of a GPU may free memory later. The allocators of a CPU have freed what they will.
        deadline_s = _now_s() + (self._timeouts.reclaim_s if self.device.kind == "cuda" else 0)
        memory = freed.after
        while True:
            freed_bytes = max(0, freed.before.process_bytes - memory.process_bytes)
            shares_worker = bool(self._models.keys() - {resident.handle})
            reclaimed = Reclaimed(expected_bytes, freed_bytes, shares_worker)
            if reclaimed.is_complete or _now_s() >= deadline_s:
                return reclaimed
            await asyncio.sleep(RECLAIM_INTERVAL_S)
            memory = await self.memory()

    async def _call(
        self, number: int, command: protocol.Unload | protocol.Sleep | protocol.Wake | protocol.QueryMemory
    ) -> Reply:
        """Sends `command` and waits for its reply. Raises WorkerLost, also when the model was lost before."""
        is_lost = not isinstance(command, protocol.QueryMemory) and number not in self._models
        if self._worker is None or is_lost:
            raise WorkerLost("the worker that held the model has ended" if is_lost else "the device has no worker")
        return await self._worker.call(number, command)

    # Requests

    def submit(self, resident: Resident, request: EngineRequest) -> None:
        """Sends a request to a model; its outputs, or its failure, go to the model's sink."""
        if (model := self._models.get(resident.handle)) is not None:
            try:
                self._send(protocol.Submit(resident.handle, request))
            except Unsendable as error:
                model.sink.on_request_failed(request.id, FaultKind.REQUEST, str(error))
            else:
                model.live.add(request.id)

    def cancel(self, resident: Resident, request_id: str) -> None:
        """Cancels a request; its final output follows. Unknown ids are ignored."""
        if (model := self._models.get(resident.handle)) is not None and request_id in model.live:
            self._send(protocol.Cancel(resident.handle, request_id))

    def stop_reloads(self) -> None:
        """Does nothing: the owner of a lost model decides about it."""

    def _send(self, command: Command) -> None:
        if self._worker is not None:
            self._worker.send(command)

    # The worker

    def kill_worker(self, reason: str) -> None:
        """Kills the worker, with all models in it; their sinks are notified when it has ended."""
        if self._worker is not None:
            self._worker.kill(reason)

    async def recycle(self) -> bool:
        """Replaces a worker without models, which frees all its memory. False when it has models."""
        async with self._spawning:  # a load that starts now waits for the new worker
            if self._models:
                return False
            await self.close()
            return True

    async def close(self) -> None:
        """Ends the worker and everything in it; returns when the process has exited."""
        if self._worker is not None:
            await self._worker.stop(self._timeouts.exit_s)

    async def _ensure_worker(self) -> WorkerProcess:
        async with self._spawning:
            if self._worker is None:
                self.state = "starting"
                worker = WorkerProcess(
                    self.device,
                    self._timeouts,
                    on_event=self._on_event,
                    on_lost=self._on_worker_lost,
                    has_live_requests=self._has_live_requests,
                )
                try:
                    await worker.spawn(self._worker_factory)
                except OSError as error:
                    self.state = "faulted"
                    raise WorkerLost(f"the worker cannot be started: {os_error_in_words(error)}") from error
                self._worker = worker
            return self._worker

    def _has_live_requests(self) -> bool:
        return any(model.live for model in self._models.values())

    def _on_event(self, event: Event) -> None:
        match event:
            case protocol.Hello():
                self.state = "running"
            case protocol.Report():
                for handle, stats in event.stats.items():
                    if (model := self._models.get(handle)) is not None:
                        model.sink.on_stats(stats)
            case protocol.Loaded():
                self._models[event.handle].is_loaded = True
            case protocol.ModelLoadFailed() | protocol.WakeFailed(damaged=True):
                self._models.pop(event.handle, None)
            case protocol.Unloaded():
                self._models.pop(event.handle, None)
                self.freed_at_s = _now_s()
            case protocol.Slept():
                self.freed_at_s = _now_s()
            case protocol.Outputs() | protocol.RequestFailed() | protocol.LoadProgress() | protocol.ModelBroken():
                if (model := self._models.get(event.handle)) is not None:
                    self._on_model_event(model, event)

    def _on_model_event(
        self,
        model: _Model,
        event: protocol.Outputs | protocol.RequestFailed | protocol.LoadProgress | protocol.ModelBroken,
    ) -> None:
        match event:
            case protocol.Outputs():
                model.live.difference_update(o.request_id for o in event.outputs if o.finish is not None)
                model.sink.on_outputs(event.outputs)
            case protocol.RequestFailed():
                model.live.discard(event.request_id)
                model.sink.on_request_failed(event.request_id, event.kind, event.message)
            case protocol.LoadProgress():
                model.sink.on_progress(event.stage, event.done_bytes, event.total_bytes)
            case protocol.ModelBroken():
                del self._models[event.handle]
                model.sink.on_lost(event.message)

    def _on_worker_lost(self, reason: str) -> None:
        """Notifies every loaded model, once. Pending calls raise WorkerLost on their own."""
        self._worker = None
        self.freed_at_s = _now_s()
        models, self._models = self._models, {}
        self.state = "faulted" if models else "none"
        for model in models.values():
            if model.is_loaded:
                model.sink.on_lost(reason)


def _resident(loaded: protocol.Loaded) -> Resident:
    grown_bytes = max(0, loaded.after.process_bytes - loaded.before.process_bytes)
    return Resident(
        handle=loaded.handle,
        info=loaded.info,
        measured_bytes=max(grown_bytes, loaded.info.weight_bytes + loaded.info.kv_bytes),
        process_bytes=grown_bytes,
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
