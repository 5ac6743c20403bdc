"""One device seen from the daemon: models are loaded here and requests sent, whatever happens to the worker.

Spawns the worker on first use, watches its progress, replaces it when it faults. A lost worker takes its
models with it: each is told once through its `ModelSink` and decides for itself whether to come back.
Everything here runs on the daemon's loop and never waits for the device except where it is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from cortex.ipc.channel import Unsendable
from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, LoadSpec, StepOutput
from cortex.neuron.worker.address import DeviceAddress
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.process import WorkerProcess
from cortex.neuron.worker.protocol import (
    Cancel,
    CancelLoad,
    Command,
    Event,
    Hello,
    Load,
    Loaded,
    LoadProgress,
    Memory,
    MemoryReading,
    ModelBroken,
    ModelLoadFailed,
    Outputs,
    QueryMemory,
    Report,
    RequestFailed,
    Sleep,
    SleepFailed,
    Slept,
    Submit,
    Unload,
    Unloaded,
    Wake,
    WakeFailed,
    Woken,
)
from cortex.neuron.worker.reclaim import Reclaimed, is_reclaimed
from cortex.neuron.worker.watchdog import Patience, ProgressWatch

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
RECLAIM_INTERVAL_S = 0.05

T = TypeVar("T")
Answer = Unloaded | Slept | SleepFailed | Woken | WakeFailed
WorkerState = Literal["none", "starting", "running", "faulted"]


class WorkerLost(Exception):
    """The worker ended before it answered; the message says how."""


class LoadRejected(Exception):
    """The worker could not load the model; the message is the engine's own."""

    def __init__(self, kind: FaultKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class SleepRejected(Exception):
    """The model is not asleep, or its sleep is worth nothing; the message says why. It can only be unloaded."""


class Damaged(Exception):
    """The model did not survive its sleep; nothing of it is left in the worker, which is well."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in a worker's memory. Opaque but for its facts."""

    handle: int
    info: EngineInfo
    measured_bytes: int
    """What it takes awake: the allocator's own count, never less than the engine's."""
    process_bytes: int
    """What the worker holds for it of the memory that is counted; what must come back when it is unloaded."""
    host_bytes: int = 0
    """Its weights in host memory while it sleeps; 0 awake."""


class ModelSink(Protocol):
    """Who is told about a model in a worker. Called on the loop; must not raise, must not block."""

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None: ...
    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None: ...
    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None: ...
    def on_stats(self, stats: EngineStats) -> None: ...
    def on_lost(self, reason: str) -> None: ...


@dataclass(slots=True)
class _Model:
    sink: ModelSink
    loading: asyncio.Future[Resident]
    live: set[str]


class WorkerSupervisor:
    def __init__(
        self, device: DeviceAddress, worker_factory: WorkerFactory, *, patience: Patience | None = None
    ) -> None:
        self.device = device
        self.state: WorkerState = "none"
        self.freed_at_s = -math.inf
        """When memory was last given back here, on the loop's clock; readings may lag behind it."""
        self._patience = patience or Patience()
        self._worker_factory = worker_factory
        self._worker: WorkerProcess | None = None
        self._spawning = asyncio.Lock()
        self._models: dict[int, _Model] = {}
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        """By handle: one order about a model is under way at a time."""
        self._queries: dict[int, asyncio.Future[MemoryReading]] = {}
        self._numbers = itertools.count(1)
        self._watch = ProgressWatch.begin(0.0)
        self._watchdog: asyncio.Task[None] | None = None

    @property
    def process_id(self) -> int | None:
        return self._worker.process_id if self._worker is not None else None

    @property
    def has_models(self) -> bool:
        return bool(self._models)

    # Models

    async def load(self, spec: LoadSpec, sink: ModelSink) -> Resident:
        """Loads a model. Cancelling this call calls the load off and returns when nothing of it is left.

        Raises LoadRejected (the engine said no; nothing is left) or WorkerLost (the device faulted).
        """
        worker = await self._ensure_worker()
        handle = next(self._numbers)
        loading: asyncio.Future[Resident] = asyncio.get_running_loop().create_future()
        try:
            worker.send(Load(handle, spec))
        except Unsendable as error:
            raise LoadRejected(FaultKind.REQUEST, str(error)) from error
        self._models[handle] = _Model(sink, loading, set())
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            await self._call_off(worker, handle, loading)
            raise

    async def _call_off(self, worker: WorkerProcess, handle: int, loading: asyncio.Future[Resident]) -> None:
        worker.send(CancelLoad(handle))
        await asyncio.wait({loading}, timeout=self._patience.unload_s)
        if not loading.done():
            worker.kill(f"a cancelled load did not stop within {self._patience.unload_s:.0f} s")
            await asyncio.wait({loading})
        if loading.exception() is None:  # it had just finished
            await self.unload(loading.result())

    async def unload(self, resident: Resident) -> Reclaimed:
        """Frees a model and waits, within bounds, until its memory is back. Never fails: where the worker
        does not give the memory back and serves nothing else, the worker is replaced."""
        try:
            unloaded = await self._answer_to(Unload(resident.handle))
            assert isinstance(unloaded, Unloaded)
            reclaimed = await self._await_memory(resident, resident.process_bytes, unloaded)
        except WorkerLost:
            return Reclaimed(resident.process_bytes, resident.process_bytes)
        if not reclaimed.is_complete:
            log.warning("%s: after an unload %s", self.device.thread_name, reclaimed)
            if not self._models:
                await self.recycle()
        return reclaimed

    async def sleep(self, resident: Resident) -> Resident:
        """Parks a model in host memory and waits, within bounds, until its device memory is back; as it is then.

        Raises SleepRejected, also where the memory does not come back, or WorkerLost.
        """
        answer = await self._answer_to(Sleep(resident.handle))
        if not isinstance(answer, Slept):
            assert isinstance(answer, SleepFailed)
            raise SleepRejected(answer.message)
        # On a CPU the weights stay in the very memory that is counted.
        stays_bytes = answer.host_bytes if self.device.kind == "cpu" else 0
        reclaimed = await self._await_memory(resident, max(0, resident.process_bytes - stays_bytes), answer)
        if not reclaimed.is_complete:
            raise SleepRejected(f"it was put to sleep, but only {reclaimed}")
        left_bytes = max(0, resident.process_bytes - reclaimed.freed_bytes)
        return replace(resident, process_bytes=left_bytes, host_bytes=answer.host_bytes)

    async def wake(self, resident: Resident) -> Resident:
        """Brings a sleeping model back to answering; as it is then.

        Raises LoadRejected (it sleeps as before), Damaged (nothing of it is left) or WorkerLost.
        """
        answer = await self._answer_to(Wake(resident.handle))
        if not isinstance(answer, Woken):
            assert isinstance(answer, WakeFailed)
            raise Damaged(answer.message) if answer.damaged else LoadRejected(answer.kind, answer.message)
        process_bytes = resident.process_bytes + max(0, answer.after.process_bytes - answer.before.process_bytes)
        measured_bytes = max(process_bytes, resident.info.weight_bytes + resident.info.kv_bytes)
        return replace(resident, measured_bytes=measured_bytes, process_bytes=process_bytes, host_bytes=0)

    async def _answer_to(self, order: Unload | Sleep | Wake) -> Answer:
        """Sends an order about a model that is in the worker. Raises WorkerLost, also when it is not any more."""
        if self._worker is None or order.handle not in self._models:
            raise WorkerLost("the worker that held the model is gone")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[order.handle] = answer
        self._worker.send(order)
        return await answer

    async def _await_memory(self, resident: Resident, expected_bytes: int, answer: Unloaded | Slept) -> Reclaimed:
        deadline_s = _now_s() + self._patience.reclaim_s
        memory = answer.after
        while True:
            freed_bytes = answer.before.process_bytes - memory.process_bytes
            others = bool(self._models.keys() - {resident.handle})
            if is_reclaimed(expected_bytes, freed_bytes) or others or _now_s() >= deadline_s:
                # With other models at work in the same process its size says nothing about this one any more.
                return Reclaimed(expected_bytes, freed_bytes, others_at_work=others)
            await asyncio.sleep(RECLAIM_INTERVAL_S)
            memory = await self.memory()

    async def memory(self) -> MemoryReading:
        """The worker's view of the device, taken between two steps. Raises WorkerLost."""
        if self._worker is None:
            raise WorkerLost("no worker runs on this device")
        query = next(self._numbers)
        answer: asyncio.Future[MemoryReading] = asyncio.get_running_loop().create_future()
        self._queries[query] = answer
        self._worker.send(QueryMemory(query))
        try:
            return await answer
        finally:
            self._queries.pop(query, None)

    # Requests

    def submit(self, resident: Resident, request: EngineRequest) -> None:
        """Hands a request over. What becomes of it reaches the model's sink; a lost worker does too."""
        if (model := self._models.get(resident.handle)) is not None:
            try:
                self._send(Submit(resident.handle, request))
            except Unsendable as error:
                model.sink.on_request_failed(request.id, FaultKind.REQUEST, str(error))
            else:
                model.live.add(request.id)

    def cancel(self, resident: Resident, request_id: str) -> None:
        """Asks for the end of a request; its final output follows. Unknown ids are ignored."""
        if (model := self._models.get(resident.handle)) is not None and request_id in model.live:
            self._send(Cancel(resident.handle, request_id))

    # The worker

    async def recycle(self) -> bool:
        """Replaces an idle worker, which gives the device everything back. False while models are in it."""
        async with self._spawning:  # a load that comes now waits for the new worker, not for the leaving one
            if self._models:
                return False
            if self._worker is not None:
                await self._worker.stop(self._patience.exit_s)
            return True

    async def close(self) -> None:
        """Ends the worker and whatever is in it; returns when the process is gone."""
        if self._worker is not None:
            await self._worker.stop(self._patience.exit_s)
        if self._watchdog is not None:
            self._watchdog.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watchdog

    def kill(self, reason: str) -> None:
        """Ends the worker at once; its models are told `reason`."""
        if self._worker is not None:
            self._worker.kill(reason)

    def _send(self, command: Command) -> None:
        if self._worker is not None:
            self._worker.send(command)

    async def _ensure_worker(self) -> WorkerProcess:
        async with self._spawning:
            if self._worker is None:
                self.state = "starting"
                try:
                    self._worker = await WorkerProcess.spawn(
                        self.device, self._worker_factory, on_event=self._received, on_lost=self._lost
                    )
                except OSError as error:
                    self.state = "faulted"
                    raise WorkerLost(f"the worker cannot be started: {error}") from error
                self._watch = ProgressWatch.begin(_now_s())
                if self._watchdog is None:
                    self._watchdog = asyncio.create_task(self._keep_watch())
            return self._worker

    def _received(self, event: Event) -> None:
        match event:
            case Outputs():
                self._outputs(event)
            case Report():
                self._watch = self._watch.reported(event.activity, event.progress, _now_s())
                for handle, stats in event.stats.items():
                    if (model := self._models.get(handle)) is not None:
                        model.sink.on_stats(stats)
            case RequestFailed():
                if (model := self._models.get(event.handle)) is not None:
                    model.live.discard(event.request_id)
                    model.sink.on_request_failed(event.request_id, event.kind, event.message)
            case LoadProgress():
                if (model := self._models.get(event.handle)) is not None:
                    model.sink.on_progress(event.stage, event.done_bytes, event.total_bytes)
            case Loaded():
                self._models[event.handle].loading.set_result(_resident(event))
            case ModelLoadFailed():
                refusal = LoadRejected(event.kind, event.message)
                _fail(self._models.pop(event.handle).loading, refusal)
            case Unloaded() | Slept() | SleepFailed() | Woken() | WakeFailed():
                self._answered(event)
            case Memory():
                if (query := self._queries.get(event.query)) is not None and not query.done():
                    query.set_result(event.memory)
            case ModelBroken():
                if (model := self._models.pop(event.handle, None)) is not None:
                    model.sink.on_lost(event.message)
            case Hello():
                self.state = "running"

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, Unloaded | Slept):
            self.freed_at_s = _now_s()
        if isinstance(answer, Unloaded) or (isinstance(answer, WakeFailed) and answer.damaged):
            self._models.pop(answer.handle, None)
        if (awaited := self._answers.pop(answer.handle, None)) is not None and not awaited.done():
            awaited.set_result(answer)

    def _outputs(self, event: Outputs) -> None:
        model = self._models.get(event.handle)
        if model is None:
            return
        for output in event.outputs:
            if output.finish is not None:
                model.live.discard(output.request_id)
        model.sink.on_outputs(event.outputs)

    def _lost(self, reason: str) -> None:
        """The process is gone: everything that waited for it is told, once."""
        self._worker = None
        self.freed_at_s = _now_s()
        models, self._models = self._models, {}
        answers, self._answers = self._answers, {}
        queries, self._queries = self._queries, {}
        self.state = "faulted" if models else "none"
        for answer in answers.values():
            _fail(answer, WorkerLost(reason))
        for query in queries.values():
            _fail(query, WorkerLost(reason))
        for model in models.values():
            if model.loading.done():
                model.sink.on_lost(reason)
            else:
                _fail(model.loading, WorkerLost(reason))

    async def _keep_watch(self) -> None:
        limits_s = (self._patience.start_s, self._patience.step_s, self._patience.load_s, self._patience.unload_s)
        interval_s = min(WATCH_INTERVAL_S, min(limits_s) / 4)
        while True:
            await asyncio.sleep(interval_s)
            if not self._has_pending_work():
                self._watch = self._watch.at_rest(_now_s())
            elif (verdict := self._watch.verdict(_now_s(), self._patience)) is not None and self._worker is not None:
                log.error("%s: %s; the worker is replaced", self.device.thread_name, verdict)
                self._worker.kill(verdict)
                self._watch = self._watch.at_rest(_now_s())

    def _has_pending_work(self) -> bool:
        return (
            bool(self._answers)
            or bool(self._queries)
            or any(model.live or not model.loading.done() for model in self._models.values())
        )


def _resident(event: Loaded) -> Resident:
    grown_bytes = max(0, event.after.process_bytes - event.before.process_bytes)
    return Resident(
        handle=event.handle,
        info=event.info,
        measured_bytes=max(grown_bytes, event.info.weight_bytes + event.info.kv_bytes),
        process_bytes=grown_bytes,
    )


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # read once, so that an answer nobody waits for any more makes no noise


def _now_s() -> float:
    return asyncio.get_running_loop().time()
