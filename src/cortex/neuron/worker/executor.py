"""The engine thread of a worker: the only one that touches the device, for as long as the process lives.

It runs jobs in the order they came and steps every model that has work, in turn. A load runs on this
same thread. So that it does not silence the models already serving here, each progress call of the load
is a safe point where they get a turn, up to as much time as the load had since the last one. Loads and
unloads that arrive meanwhile wait their turn; submits and cancels do not.
"""

from __future__ import annotations

import gc
import logging
import queue
import time
from collections import deque
from dataclasses import dataclass, field

from cortex.neuron.engine.errors import DamagedError, EngineError, LoadCancelled, LoadError, NoRoomError, StepBlamed
from cortex.neuron.engine.request import EngineStats, StepOutput
from cortex.neuron.worker import memory_probe
from cortex.neuron.worker.address import DeviceAddress
from cortex.neuron.worker.faults import FaultKind, chain, choose_victims, classify, explain
from cortex.neuron.worker.harness import LoadedEngine, resolve_loader
from cortex.neuron.worker.load_turns import LoadTurns
from cortex.neuron.worker.outbox import Outbox
from cortex.neuron.worker.protocol import (
    Activity,
    Cancel,
    CancelLoad,
    Command,
    Exit,
    Load,
    Loaded,
    LoadProgress,
    Memory,
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

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps of one model that may fail in a row before it is given up and must be loaded anew."""
STATS_INTERVAL_S = 0.25
PREPARE_AFTER_S = 0.2
"""Silence after which models get to prepare themselves: a request that waited for its model to load comes sooner."""


class DeviceFault(Exception):
    """The device context is poisoned; the process must end."""


@dataclass(slots=True)
class _Resident:
    """A loaded model and the requests that are in it."""

    handle: int
    engine: LoadedEngine
    live: dict[str, bool] = field(default_factory=dict)
    """Request id → whether it has produced anything, oldest first."""
    failing: dict[str, tuple[FaultKind, str]] = field(default_factory=dict)
    """Requests that were cancelled because a step failed, and what to say when their end comes."""
    failed_steps: int = 0
    prepared: bool = False
    """Its engine has nothing left to build for steps to come."""


class Executor:
    """Owned by the engine thread, but for `cancel_load`, `activity`, `progress` and `report`."""

    def __init__(self, device: DeviceAddress, engine: str, outbox: Outbox) -> None:
        """`engine` names the load function as `module:attribute`; it is imported by `run`, which takes seconds."""
        self.inbox: queue.SimpleQueue[list[Command]] = queue.SimpleQueue()
        self.activity: Activity = "start"
        self.progress = 0
        self._device = device
        self._engine = engine
        self._outbox = outbox
        self._residents: dict[int, _Resident] = {}
        self._jobs: deque[Command] = deque()
        self._cancelled_loads: set[int] = set()
        self._stats: dict[int, EngineStats] = {}
        self._stats_at_s = 0.0
        self._exiting = False

    def cancel_load(self, handle: int) -> None:
        """Called by the reader thread, so that a load in progress sees it."""
        self._cancelled_loads.add(handle)

    def report(self) -> Report:
        """The heartbeat; called by the writer thread, reads only values that are replaced whole."""
        return Report(self.activity, self.progress, self._stats)

    def run(self) -> None:
        """Until `Exit`, or until a DeviceFault leaves it."""
        self._load_engine = resolve_loader(self._engine)
        # What the imports made lives as long as the process: collections need not look at it, neither in the
        # middle of a step nor after an unload.
        gc.collect()
        gc.freeze()
        while not self._exiting:
            self.activity = "idle"
            self._receive(wait=not self._jobs and not self._has_work())
            while self._jobs and not self._exiting:
                self._execute(self._jobs.popleft())
            self._step_all()

    def _has_work(self) -> bool:
        return any(resident.engine.has_work for resident in self._residents.values())

    def _receive(self, *, wait: bool) -> None:
        if wait:
            self._publish_stats()
            self._jobs.extend(self._await_jobs())
        while True:
            try:
                self._jobs.extend(self.inbox.get_nowait())
            except queue.Empty:
                return

    def _await_jobs(self) -> list[Command]:
        """The next commands. After some silence the models prepare themselves, one piece at a time, until they come."""
        patience_s = PREPARE_AFTER_S
        while unprepared := [resident for resident in self._residents.values() if not resident.prepared]:
            try:
                return self.inbox.get(timeout=patience_s)
            except queue.Empty:
                self._prepare(unprepared[0])
                patience_s = 0.0
        return self.inbox.get()

    def _prepare(self, resident: _Resident) -> None:
        self.activity = "step"
        try:
            resident.prepared = not resident.engine.prepare()
        except Exception as error:
            self._judge(error, "prepare")
            log.error("preparing model %d failed: %s", resident.handle, explain(error), exc_info=error)
            self._let_go(error)
            resident.prepared = True
        self.progress += 1
        self.activity = "idle"

    def _execute(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Cancel():
                if (resident := self._residents.get(command.handle)) is not None:
                    resident.engine.cancel(command.request_id)
            case Load():
                self._load(command)
            case Unload():
                self._unload(command.handle)
            case Sleep():
                self._sleep(command.handle)
            case Wake():
                self._wake(command.handle)
            case QueryMemory():
                self._outbox.put(Memory(command.query, memory_probe.measure(self._device)))
            case Exit():
                self._exiting = True
            case CancelLoad():
                # The reader thread has set the flag already; by the time this turn comes, the load has ended.
                self._cancelled_loads.discard(command.handle)
        self.progress += 1

    # Requests

    def _submit(self, command: Submit) -> None:
        request_id = command.request.id
        resident = self._residents.get(command.handle)
        if resident is None:
            self._fail(command.handle, request_id, FaultKind.REQUEST, "the model was unloaded before the request began")
            return
        try:
            resident.engine.submit(command.request)
        except Exception as error:  # noqa: BLE001 - classified: nothing but a device fault may end more than this request
            kind = self._judge(error, "submit")
            message = str(error) if kind is FaultKind.REQUEST else explain(error)
            self._fail(command.handle, request_id, kind, message)
        else:
            resident.live[request_id] = False

    def _step_all(self) -> None:
        for resident in list(self._residents.values()):
            if resident.engine.has_work:
                self.activity = "step"
                self._step(resident)
        if time.monotonic() - self._stats_at_s >= STATS_INTERVAL_S:
            self._publish_stats()

    def _step(self, resident: _Resident) -> None:
        try:
            outputs = resident.engine.step()
        except Exception as error:  # noqa: BLE001 - classified: the worker must outlive whatever a model does
            self._step_failed(resident, error)
            return
        resident.failed_steps = 0
        self.progress += 1
        spoken = [output for output in outputs if not self._ended_by_fault(resident, output)]
        for output in spoken:
            if output.finish is not None:
                resident.live.pop(output.request_id, None)
            elif output.tokens and output.request_id in resident.live:
                resident.live[output.request_id] = True
        if spoken:
            self._outbox.put(Outputs(resident.handle, tuple(spoken)))

    def _ended_by_fault(self, resident: _Resident, output: StepOutput) -> bool:
        """Whether `output` belongs to a request that a failed step took down; its end is told as a failure."""
        if output.request_id not in resident.failing:
            return False
        if output.finish is not None:
            kind, message = resident.failing.pop(output.request_id)
            resident.live.pop(output.request_id, None)
            self._fail(resident.handle, output.request_id, kind, message)
        return True

    def _step_failed(self, resident: _Resident, error: Exception) -> None:
        kind = self._judge(error, "step")
        message = explain(error)
        log.error("a step of model %d failed (%s): %s", resident.handle, kind, message, exc_info=error)
        blamed = error.request_id if isinstance(error, StepBlamed) else None
        live = {name: produced for name, produced in resident.live.items() if name not in resident.failing}
        if kind is not FaultKind.OUT_OF_MEMORY and blamed is None and self._isolates(resident):
            victims = []
        else:
            victims = choose_victims(kind, live, blamed)
        for request_id in victims:
            resident.failing[request_id] = (kind, message)
            resident.engine.cancel(request_id)
        if kind is FaultKind.OUT_OF_MEMORY:
            memory_probe.give_back(self._device)
        if victims and blamed is not None:
            resident.failed_steps = 0  # the request was at fault, the model is well
        elif kind is not FaultKind.OUT_OF_MEMORY or not victims:
            # Running out of memory may take several requests in a row before the rest fits.
            resident.failed_steps += 1
        if resident.failed_steps >= MAX_FAILED_STEPS:
            self._give_up(resident, message)

    def _isolates(self, resident: _Resident) -> bool:
        """Whether the engine goes on with one request at a time, to find the one at fault; not if the model is."""
        try:
            return resident.engine.isolate()
        except Exception as error:
            self._judge(error, "self-test")
            log.error("the self-test of model %d failed as well: %s", resident.handle, explain(error), exc_info=error)
            return False

    def _give_up(self, resident: _Resident, message: str) -> None:
        for request_id, (kind, reason) in resident.failing.items():
            self._fail(resident.handle, request_id, kind, reason)
        resident.live.clear()
        self._close(resident)
        self._outbox.put(ModelBroken(resident.handle, message))

    def _fail(self, handle: int, request_id: str, kind: FaultKind, message: str) -> None:
        self._outbox.put(RequestFailed(handle, request_id, kind, message))

    # Models

    def _load(self, command: Load) -> None:
        handle = command.handle
        self.activity = "load"
        before = memory_probe.measure(self._device)
        try:
            engine = self._load_engine(
                command.spec,
                self._device.torch_device,
                LoadTurns(self, handle),
                lambda: handle in self._cancelled_loads,
            )
        except LoadCancelled as error:
            self._load_failed(handle, FaultKind.REQUEST, str(error), error, cancelled=True)
        except NoRoomError as error:
            self._load_failed(handle, FaultKind.OUT_OF_MEMORY, str(error), error)
        except LoadError as error:
            self._load_failed(handle, FaultKind.REQUEST, str(error), error)
        except Exception as error:
            kind = self._judge(error, "load")
            log.error("loading %s failed: %s", command.spec.path, explain(error), exc_info=error)
            self._load_failed(handle, kind, explain(error), error)
        else:
            self._residents[handle] = _Resident(handle, engine)
            self._outbox.put(Loaded(handle, engine.info, before, memory_probe.measure(self._device)))
        finally:
            self._cancelled_loads.discard(handle)

    def _load_failed(
        self, handle: int, kind: FaultKind, message: str, error: Exception, *, cancelled: bool = False
    ) -> None:
        self._let_go(error)
        self._outbox.put(ModelLoadFailed(handle, kind, message, cancelled))

    def _let_go(self, error: Exception) -> None:
        """Nothing that failed may keep memory: the frames of its traceback hold half-loaded weights."""
        for link in chain(error):
            link.__traceback__ = None
        memory_probe.give_back(self._device)

    def load_progressed(self, handle: int, stage: str, done_bytes: int, total_bytes: int, *, tell: bool) -> None:
        self.progress += 1
        if tell:
            self._outbox.put(LoadProgress(handle, stage, done_bytes, total_bytes))

    def serve_during_load(self) -> None:
        """One turn for the models that serve; only requests are taken from the queue of jobs."""
        self._receive(wait=False)
        postponed: deque[Command] = deque()
        while self._jobs:
            command = self._jobs.popleft()
            if isinstance(command, Submit | Cancel | QueryMemory):
                self._execute(command)
            else:
                postponed.append(command)
        self._jobs = postponed
        self._step_all()
        self.activity = "load"

    def _unload(self, handle: int) -> None:
        self.activity = "unload"
        before = memory_probe.measure(self._device)
        if (resident := self._residents.get(handle)) is not None:
            for request_id in resident.live:
                self._fail(handle, request_id, FaultKind.REQUEST, "the model was unloaded while it answered")
            self._close(resident)
            del resident
        memory_probe.give_back(self._device)
        self._outbox.put(Unloaded(handle, before, memory_probe.measure(self._device)))

    def _sleep(self, handle: int) -> None:
        self.activity = "load"
        before = memory_probe.measure(self._device)
        self._end_requests(handle)
        resident = self._residents.get(handle)
        if resident is None:
            self._outbox.put(SleepFailed(handle, "the model is not loaded any more"))
            return
        try:
            host_bytes = resident.engine.sleep()
        except Exception as error:  # noqa: BLE001 - classified: a model that cannot sleep is awake as before
            self._judge(error, "sleep")
            message = explain(error)
            self._let_go(error)
            self._outbox.put(SleepFailed(handle, message))
        else:
            memory_probe.give_back(self._device)
            self._outbox.put(Slept(handle, host_bytes, before, memory_probe.measure(self._device)))

    def _end_requests(self, handle: int) -> None:
        """Cancels what is still in the model, and steps until it is idle, or given up."""
        if (resident := self._residents.get(handle)) is not None:
            for request_id in list(resident.live):
                resident.engine.cancel(request_id)
        while (resident := self._residents.get(handle)) is not None and resident.engine.has_work:
            self._step(resident)

    def _wake(self, handle: int) -> None:
        self.activity = "load"
        before = memory_probe.measure(self._device)
        resident = self._residents.get(handle)
        if resident is None:
            self._outbox.put(WakeFailed(handle, FaultKind.REQUEST, "the model is not loaded", damaged=True))
            return
        try:
            resident.engine.wake(LoadTurns(self, handle))
        except Exception as error:
            is_damaged = isinstance(error, DamagedError)
            kind = FaultKind.OUT_OF_MEMORY if isinstance(error, LoadError) else self._judge(error, "wake")
            message = str(error) if isinstance(error, EngineError) else explain(error)
            log.error("waking model %d failed: %s", handle, message, exc_info=error)
            if is_damaged:
                self._close(resident)
            self._let_go(error)
            self._outbox.put(WakeFailed(handle, kind, message, is_damaged))
        else:
            resident.prepared = False
            self._outbox.put(Woken(handle, before, memory_probe.measure(self._device)))

    def _close(self, resident: _Resident) -> None:
        self._residents.pop(resident.handle, None)
        self._stats = {handle: stats for handle, stats in self._stats.items() if handle != resident.handle}
        try:
            resident.engine.close()
        except Exception as error:
            self._judge(error, "close")
            log.error("closing model %d failed: %s", resident.handle, explain(error), exc_info=error)

    def _publish_stats(self) -> None:
        self._stats = {handle: resident.engine.stats() for handle, resident in self._residents.items()}
        self._stats_at_s = time.monotonic()

    def _judge(self, error: Exception, where: str) -> FaultKind:
        """The kind of fault `error` is; raises DeviceFault where nothing on this device can go on."""
        kind = classify(error)
        if kind is FaultKind.DEVICE:
            raise DeviceFault(f"device fault in {where}: {explain(error)}") from error
        return kind
