"""The host of one model, or of one rank of it, in the worker of one device. Runs on the daemon's loop."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from cortex.ipc.channel import Unsendable
from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, LoadSpec, StepOutput
from cortex.neuron.worker import protocol
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.memory import Reclaimed
from cortex.neuron.worker.model_host import Damaged, LoadRejected, ModelSink, Resident, SleepRejected
from cortex.neuron.worker.process import WorkerLost
from cortex.neuron.worker.supervisor import WorkerSupervisor

log = logging.getLogger(__name__)

RECLAIM_INTERVAL_S = 0.05


class DeviceHost:
    """A `ModelHost`. Cancelling its load returns when nothing of it is left."""

    def __init__(self, supervisor: WorkerSupervisor, spec: LoadSpec) -> None:
        self.resident: Resident | None = None
        self._supervisor = supervisor
        self._spec = spec
        self._sink: ModelSink
        """Set when the load begins."""
        self._handle = 0
        """The model's handle in the worker; 0 without one."""
        self._live: set[str] = set()
        """Ids of the requests in it."""
        self._lost_in_load: str | None = None
        """Why it was lost after its weights were loaded but before `load` continued."""

    @property
    def device_indices(self) -> tuple[int, ...]:
        return (self._supervisor.device.index,)

    @property
    def replica_devices(self) -> tuple[tuple[int, ...], ...]:
        return (self.device_indices,)

    @property
    def freed_at_s(self) -> float:
        return self._supervisor.freed_at_s

    async def load(self, sink: ModelSink) -> Resident:
        self._sink = sink
        self._handle, reply = await self._supervisor.start_load(self, self._spec)
        try:
            loaded = await asyncio.shield(reply)
        except asyncio.CancelledError:
            await self._cancel_load(reply)
            raise
        if isinstance(loaded, protocol.ModelLoadFailed):
            raise LoadRejected(loaded.kind, loaded.message, cancelled=loaded.cancelled)
        if self._lost_in_load is not None:
            raise WorkerLost(self._lost_in_load)
        assert isinstance(loaded, protocol.Loaded)
        self.resident = self._resident_of(loaded)
        return self.resident

    def _resident_of(self, loaded: protocol.Loaded) -> Resident:
        grown_bytes = max(0, loaded.after.process_bytes - loaded.before.process_bytes)
        return Resident(loaded.info, self._measured_bytes(loaded.info, grown_bytes), grown_bytes)

    def _measured_bytes(self, info: EngineInfo, process_bytes: int) -> int:
        """Its size on the device. On a CPU the process also holds the weights in host memory."""
        host_bytes = info.host_weight_bytes if self._supervisor.device.kind == "cpu" else 0
        return max(process_bytes - host_bytes, info.weight_bytes + info.kv_bytes)

    async def _cancel_load(self, reply: asyncio.Future[protocol.Reply]) -> None:
        timeout_s = self._supervisor.timeouts.unload_s
        self._supervisor.send(protocol.CancelLoad(self._handle))
        await asyncio.wait({reply}, timeout=timeout_s)
        if not reply.done():
            self.kill(f"a cancelled load did not stop within {timeout_s:.0f} s")
            await asyncio.wait({reply})
        if reply.exception() is None and isinstance(loaded := reply.result(), protocol.Loaded):
            self.resident = self._resident_of(loaded)
            await self.unload()  # it finished just before

    async def unload(self) -> Reclaimed:
        """Waits, with a timeout, until the memory is free. If it does not come back and the worker has no other models,
        the worker is replaced."""
        if (resident := self.resident) is None:
            return Reclaimed(0, 0)
        whole = Reclaimed(resident.process_bytes, resident.process_bytes)
        try:
            unloaded = await self._supervisor.call(protocol.Unload(self._handle))
            assert isinstance(unloaded, protocol.Unloaded)
            reclaimed = await self._await_memory(resident.process_bytes, unloaded)
        except WorkerLost:
            return whole
        finally:
            self.resident = None
        if not reclaimed.is_complete:
            name = self._supervisor.device.thread_name
            if await self._supervisor.recycle():
                log.info("%s: after an unload %s; its worker was replaced", name, reclaimed)
                return whole
            log.warning("%s: after an unload %s", name, reclaimed)
        return reclaimed

    async def sleep(self) -> Resident:
        """Waits, with a timeout, until the device memory is free; SleepRejected also when it does not come back."""
        resident, slept = await self._asked(protocol.Sleep(self._handle))
        if not isinstance(slept, protocol.Slept):
            assert isinstance(slept, protocol.SleepFailed)
            raise SleepRejected(slept.message)
        # On a CPU the weights stay in the memory that is measured.
        kept_bytes = slept.host_bytes if self._supervisor.device.kind == "cpu" else 0
        reclaimed = await self._await_memory(max(0, resident.process_bytes - kept_bytes), slept)
        if not reclaimed.is_complete:
            raise SleepRejected(f"the model was put to sleep, but only {reclaimed}")
        left_bytes = max(0, resident.process_bytes - reclaimed.freed_bytes)
        self.resident = replace(resident, process_bytes=left_bytes, host_bytes=slept.host_bytes)
        return self.resident

    async def wake(self) -> Resident:
        resident, woken = await self._asked(protocol.Wake(self._handle))
        if not isinstance(woken, protocol.Woken):
            assert isinstance(woken, protocol.WakeFailed)
            if not woken.damaged:
                raise LoadRejected(woken.kind, woken.message)
            self.resident = None
            raise Damaged(woken.message)
        process_bytes = resident.process_bytes + max(0, woken.after.process_bytes - woken.before.process_bytes)
        measured_bytes = self._measured_bytes(resident.info, process_bytes)
        self.resident = replace(resident, measured_bytes=measured_bytes, process_bytes=process_bytes, host_bytes=0)
        return self.resident

    async def _asked(self, command: protocol.Sleep | protocol.Wake) -> tuple[Resident, protocol.Reply]:
        """Raises WorkerLost, also when the worker is lost right after its reply."""
        reply = await self._supervisor.call(command)
        if self.resident is None:
            raise WorkerLost("the worker that held the model has ended")
        return self.resident, reply

    async def _await_memory(self, expected_bytes: int, freed: protocol.Unloaded | protocol.Slept) -> Reclaimed:
        """Raises WorkerLost."""
        supervisor, now_s = self._supervisor, asyncio.get_running_loop().time
        # The driver of a GPU may free memory later. The allocators of a CPU free no more.
        deadline_s = now_s() + (supervisor.timeouts.reclaim_s if supervisor.device.kind == "cuda" else 0)
        memory = freed.after
        while True:
            freed_bytes = max(0, freed.before.process_bytes - memory.process_bytes)
            reclaimed = Reclaimed(expected_bytes, freed_bytes, supervisor.has_others(self._handle))
            if reclaimed.is_complete or now_s() >= deadline_s:
                return reclaimed
            await asyncio.sleep(RECLAIM_INTERVAL_S)
            memory = await supervisor.memory()

    def submit(self, request: EngineRequest) -> None:
        if self.resident is not None:
            try:
                self._supervisor.send(protocol.Submit.of(self._handle, request))
            except Unsendable as error:
                self._sink.on_request_failed(request.id, FaultKind.REQUEST, str(error))
            else:
                self._live.add(request.id)

    def cancel(self, request_id: str) -> None:
        if self.resident is not None and request_id in self._live:
            self._supervisor.send(protocol.Cancel(self._handle, request_id))

    def kill(self, reason: str) -> None:
        self._supervisor.kill_worker(reason)

    def stop_reloads(self) -> None:
        """Does nothing: the owner of a lost model decides about it."""

    # WorkerModel: what the worker reports

    @property
    def has_requests(self) -> bool:
        return bool(self._live)

    def on_stats(self, stats: EngineStats) -> None:
        self._sink.on_stats(stats)

    def on_event(self, event: protocol.ModelEvent) -> None:
        match event:
            case protocol.Outputs():
                self._live.difference_update(o.request_id for o in event.outputs if o.finish is not None)
                try:
                    self._sink.on_outputs(event.outputs)
                except Exception:
                    log.exception("outputs cannot be delivered; %d requests fail", len(event.outputs))
                    self._fail(event.outputs)
            case protocol.RequestFailed():
                self._live.discard(event.request_id)
                self._sink.on_request_failed(event.request_id, event.kind, event.message)
            case protocol.LoadProgress():
                self._sink.on_progress(event.stage, event.done_bytes, event.total_bytes)
            case protocol.ModelBroken():
                self.on_lost(event.message)

    def _fail(self, outputs: tuple[StepOutput, ...]) -> None:
        """Ends the requests of these outputs, which would otherwise wait forever."""
        for output in outputs:
            self.cancel(output.request_id)
            message = "its output could not be delivered; see the log of the node"
            self._sink.on_request_failed(output.request_id, FaultKind.BUG, message)

    def on_lost(self, reason: str) -> None:
        if self.resident is None:
            self._lost_in_load = reason
        else:
            self.resident = None
            self._sink.on_lost(reason)
