"""The engine thread of a worker: the only thread that touches the device, for as long as the process lives.

It executes commands in order and steps every model that has work, in turn. A load runs on this thread too. Each
progress call of the load is a safe point at which the loaded models run for up to as long as the load did since the
previous one. Requests and cancellations that arrive during a load are executed there; other commands wait.
"""

from __future__ import annotations

import gc
import importlib
import logging
import queue
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cortex.neuron.engine.errors import DamagedError, EngineError, LoadCancelled, LoadError, NoRoomError
from cortex.neuron.engine.memory.cores import usable_cores
from cortex.neuron.engine.request import EngineStats, StepOutput
from cortex.neuron.worker import memory
from cortex.neuron.worker.faults import FaultKind, chain, explain, raise_device_fault
from cortex.neuron.worker.grammar_compiler import GrammarCompiler
from cortex.neuron.worker.loaded_model import LoadedModel
from cortex.neuron.worker.protocol import (
    Activity,
    Cancel,
    CancelLoad,
    Command,
    Compiled,
    DeviceAddress,
    Event,
    Exit,
    FollowStep,
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
from cortex.neuron.worker.step_link import FollowerLink, LeaderLink

if TYPE_CHECKING:
    from cortex.neuron.engine.engine import Engine  # imports torch, which `resolve_loader` does at run time

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
PROGRESS_INTERVAL_S = 0.05
PREPARE_AFTER_S = 0.2
"""Idle time before models prepare: a request that waited for its model to load arrives sooner than that."""

EngineLoader = Callable[..., "Engine"]
"""`load_engine`: (spec, device, progress, cancelled) -> engine; a rank of a divided model also gets its link."""


def resolve_loader(name: str) -> EngineLoader:
    """Imports `module:attribute`."""
    module_name, _, attributes = name.partition(":")
    target: Any = importlib.import_module(module_name)
    for attribute in attributes.split("."):
        target = getattr(target, attribute)
    loader: EngineLoader = target
    return loader


def _limit_threads(device: DeviceAddress) -> None:
    """The cores that this process may use, less the shares of the other CPU devices. Applies to the calling thread."""
    torch = sys.modules.get("torch")  # imported by the fork server, if the engine uses it
    if torch is not None:
        torch.set_num_threads(max(1, usable_cores() // device.num_host_shares))


class Executor:
    """Owned by the engine thread, except `inbox`, `cancel_load` and `report`, which any thread may use."""

    def __init__(self, device: DeviceAddress, engine: str, emit: Callable[[Event], None]) -> None:
        """`engine` names the load function as `module:attribute`; `run` imports it, which takes seconds."""
        self.inbox: queue.SimpleQueue[list[Command | FollowStep | Compiled]] = queue.SimpleQueue()
        self.activity: Activity = "start"
        self.progress = 0
        self._device = device
        self._engine = engine
        self._emit = emit
        self._models: dict[int, LoadedModel] = {}
        self._commands: deque[Command | FollowStep | Compiled] = deque()
        self._cancelled_loads: set[int] = set()
        self._stats: dict[int, EngineStats] = {}
        self._stats_at_s = 0.0
        self._is_exiting = False
        self._grammars = GrammarCompiler(lambda compiled: self.inbox.put([compiled]))

    def cancel_load(self, handle: int) -> None:
        """Called by the reader thread, so that a running load sees it."""
        self._cancelled_loads.add(handle)

    def report(self) -> Report:
        """The heartbeat. Called by the writer thread; reads only values that are replaced as a whole."""
        return Report(self.activity, self.progress, self._stats)

    def run(self) -> None:
        """Runs until `Exit`. Raises DeviceFault."""
        self._load_engine = resolve_loader(self._engine)
        _limit_threads(self._device)
        # Imported objects live as long as the process: no collection needs to visit them.
        gc.collect()
        gc.freeze()
        while not self._is_exiting:
            self.activity = "idle"
            self._receive(wait=not self._commands and not self._has_work())
            while self._commands and not self._is_exiting:
                self._execute(self._commands.popleft())
            self._step_all()

    def _has_work(self) -> bool:
        return any(model.engine.has_work for model in self._models.values())

    def _receive(self, *, wait: bool) -> None:
        if wait:
            self._publish_stats()
            self._commands.extend(self._await_commands())
        while True:
            try:
                self._commands.extend(self.inbox.get_nowait())
            except queue.Empty:
                return

    def _await_commands(self) -> list[Command | FollowStep | Compiled]:
        """The next commands. While there are none, the models prepare themselves, one piece at a time."""
        idle_s = PREPARE_AFTER_S
        while unprepared := [model for model in self._models.values() if not model.is_prepared]:
            try:
                return self.inbox.get(timeout=idle_s)
            except queue.Empty:
                self._prepare(unprepared[0])
                idle_s = 0.0
        return self.inbox.get()

    def _prepare(self, model: LoadedModel) -> None:
        self.activity = "step"
        try:
            model.is_prepared = not model.engine.prepare()
        except Exception as error:
            raise_device_fault(error, "prepare")
            log.error("preparing model %d failed: %s", model.handle, explain(error), exc_info=error)
            self._free_memory_of(error)
            model.is_prepared = True
        self.progress += 1
        self.activity = "idle"

    def _execute(self, command: Command | FollowStep | Compiled) -> None:
        match command:
            case FollowStep():
                if (model := self._models.get(command.handle)) is not None:
                    self.activity = "step"
                    model.follow(command.plan)
            case Submit():
                self._submit(command)
            case Compiled():
                self._compiled(command)
            case Cancel():
                if self._grammars.take(command.handle, command.request_id) is not None:
                    self._emit_cancelled(command.handle, command.request_id)
                elif (model := self._models.get(command.handle)) is not None:
                    model.engine.cancel(command.request_id)
            case Load():
                self._load(command)
            case Unload():
                self._unload(command.handle)
            case Sleep():
                self._sleep(command.handle)
            case Wake():
                self._wake(command.handle)
            case QueryMemory():
                self._emit(Memory(command.query, self._measure()))
            case Exit():
                self._is_exiting = True
            case CancelLoad():
                # The reader thread has set the flag; the load has ended before this command's turn.
                self._cancelled_loads.discard(command.handle)
        self.progress += 1

    def _submit(self, command: Submit) -> None:
        model = self._models.get(command.handle)
        if model is None:
            self._fail_unloaded(command)
        elif command.request.grammar is not None:
            self._grammars.begin(command, model.engine.compile)
        else:
            model.submit(command.request)

    def _compiled(self, command: Compiled) -> None:
        submit = self._grammars.take(command.handle, command.request_id)
        if submit is None:
            return  # the request has ended meanwhile
        if command.problem is not None:
            self._emit(RequestFailed(command.handle, command.request_id, FaultKind.REQUEST, command.problem))
        elif (model := self._models.get(command.handle)) is not None:
            model.submit(submit.request)
        else:
            self._fail_unloaded(submit)

    def _fail_unloaded(self, command: Submit) -> None:
        message = "the model was unloaded before the request began; try again"
        self._emit(RequestFailed(command.handle, command.request.id, FaultKind.REQUEST, message))

    def _emit_cancelled(self, handle: int, request_id: str) -> None:
        self._emit(Outputs(handle, (StepOutput(request_id, finish="cancelled"),)))

    def _step_all(self) -> None:
        for model in list(self._models.values()):
            if model.engine.has_work:
                self.activity = "step"
                self._step(model)
        if time.monotonic() - self._stats_at_s >= STATS_INTERVAL_S:
            self._publish_stats()

    def _step(self, model: LoadedModel) -> None:
        if model.step():
            self.progress += 1
        if model.broken is not None:
            self._close(model)
            self._emit(ModelBroken(model.handle, model.broken))

    def _publish_stats(self) -> None:
        self._stats = {handle: model.engine.stats() for handle, model in self._models.items()}
        self._stats_at_s = time.monotonic()

    # Models

    def _load(self, command: Load) -> None:
        handle = command.handle
        self.activity = "load"
        before = self._measure()
        try:
            model = self._loaded(command)
        except (LoadCancelled, LoadError) as error:
            kind = FaultKind.OUT_OF_MEMORY if isinstance(error, NoRoomError) else FaultKind.REQUEST
            self._load_failed(handle, kind, str(error), error)
        except Exception as error:
            kind = raise_device_fault(error, "load")
            log.error("loading %s failed: %s", command.spec.path, explain(error), exc_info=error)
            self._load_failed(handle, kind, explain(error), error)
        else:
            self._models[handle] = model
            self._emit(Loaded(handle, model.engine.info, before, self._measure()))
        finally:
            self._cancelled_loads.discard(handle)

    def _loaded(self, command: Load) -> LoadedModel:
        """Loads a model, or one rank of it with its link to the others."""
        handle, rank = command.handle, command.spec.rank
        turns, cancelled = _LoadTurns(self, handle), lambda: handle in self._cancelled_loads
        arguments = (command.spec, self._device.torch_device, turns, cancelled)
        if rank is None:
            return LoadedModel(handle, self._load_engine(*arguments), self._device, self._emit)
        link: LeaderLink | FollowerLink
        if rank.rank:
            link = FollowerLink(rank, lambda plan: self.inbox.put([FollowStep(handle, plan)]), self._follow_others)
        else:
            link = LeaderLink(rank, self._follow_others)
        try:
            engine = self._load_engine(*arguments, link)
            if isinstance(link, FollowerLink):
                self._open(link, engine)
            return LoadedModel(handle, engine, self._device, self._emit, link)
        except BaseException:
            link.close()
            raise

    def _open(self, link: FollowerLink, engine: Engine) -> None:
        try:
            link.open()
        except OSError as error:
            engine.close()
            raise LoadCancelled(f"the leader of the model ended its load: {error}") from error

    def _load_failed(self, handle: int, kind: FaultKind, message: str, error: Exception) -> None:
        self._free_memory_of(error)
        self._emit(ModelLoadFailed(handle, kind, message, cancelled=isinstance(error, LoadCancelled)))

    def load_progressed(self, progress: LoadProgress | None) -> None:
        """The load is alive. `progress` is reported to the daemon if there is any."""
        self.progress += 1
        if progress is not None:
            self._emit(progress)

    def serve_during_load(self) -> None:
        """Executes pending requests and steps the loaded models once; other commands wait."""
        self._receive(wait=False)
        postponed: deque[Command | FollowStep | Compiled] = deque()
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, Submit | Compiled | Cancel | QueryMemory | FollowStep):
                self._execute(command)
            else:
                postponed.append(command)
        self._commands = postponed
        self._step_all()
        self.activity = "load"

    def _follow_others(self) -> None:
        """Runs the announced steps that wait here. Other commands wait: a step of ours is about to begin."""
        self._receive(wait=False)
        pending, self._commands = self._commands, deque()
        for command in pending:
            if isinstance(command, FollowStep):
                self._execute(command)
            else:
                self._commands.append(command)

    def _unload(self, handle: int) -> None:
        self.activity = "unload"
        before = self._measure()
        if (model := self._models.get(handle)) is not None:
            model.fail_all("the model was unloaded during the request; try again")
            self._close(model)
            del model
        memory.give_back(self._device)
        self._emit(Unloaded(handle, before, self._measure()))

    def _sleep(self, handle: int) -> None:
        self.activity = "load"
        before = self._measure()
        for submit in self._grammars.take_all(handle):
            self._emit_cancelled(handle, submit.request.id)
        if (model := self._models.get(handle)) is not None:
            model.cancel_all()
        while (model := self._models.get(handle)) is not None and model.engine.has_work:
            self._step(model)  # until it is idle, or broken
        if model is None:
            self._emit(SleepFailed(handle, "the model is not loaded any more"))
            return
        try:
            host_bytes = model.engine.sleep()
        except Exception as error:  # noqa: BLE001 - classified: a model that cannot sleep is still awake
            raise_device_fault(error, "sleep")
            message = explain(error)
            self._free_memory_of(error)
            self._emit(SleepFailed(handle, message))
        else:
            memory.give_back(self._device)
            self._emit(Slept(handle, host_bytes, before, self._measure()))

    def _wake(self, handle: int) -> None:
        self.activity = "load"
        before = self._measure()
        model = self._models.get(handle)
        if model is None:
            self._emit(WakeFailed(handle, FaultKind.REQUEST, "the model is not loaded", damaged=True))
            return
        try:
            model.engine.wake(_LoadTurns(self, handle))
        except Exception as error:
            is_damaged = isinstance(error, DamagedError)
            kind = FaultKind.OUT_OF_MEMORY if isinstance(error, LoadError) else raise_device_fault(error, "wake")
            message = str(error) if isinstance(error, EngineError) else explain(error)
            log.error("waking model %d failed: %s", handle, message, exc_info=error)
            if is_damaged:
                self._close(model)
            self._free_memory_of(error)
            self._emit(WakeFailed(handle, kind, message, is_damaged))
        else:
            model.is_prepared = False
            self._emit(Woken(handle, before, self._measure()))

    def _close(self, model: LoadedModel) -> None:
        for submit in self._grammars.take_all(model.handle):
            self._fail_unloaded(submit)
        self._models.pop(model.handle, None)
        self._stats = {handle: stats for handle, stats in self._stats.items() if handle != model.handle}
        try:
            model.close()
        except Exception as error:
            raise_device_fault(error, "close")
            log.error("closing model %d failed: %s", model.handle, explain(error), exc_info=error)

    def _measure(self) -> MemoryReading:
        return memory.measure(self._device)

    def _free_memory_of(self, error: Exception) -> None:
        """Frees what a failure holds: the frames of its traceback keep half-loaded weights alive."""
        for link in chain(error):
            link.__traceback__ = None
        memory.give_back(self._device)


class _LoadTurns:
    """The progress callback of one load: reports to the daemon, and lets the loaded models serve."""

    def __init__(self, executor: Executor, handle: int) -> None:
        self._executor = executor
        self._handle = handle
        self._stage: str | None = None
        self._reported_at_s = 0.0
        self._resumed_at_s = time.monotonic()
        self._served_s = 0.0

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        is_due = now_s - self._reported_at_s >= PROGRESS_INTERVAL_S
        progress = None
        if stage != self._stage or done_bytes >= total_bytes or is_due:
            self._stage, self._reported_at_s = stage, now_s
            progress = LoadProgress(self._handle, stage, done_bytes, total_bytes)
        self._executor.load_progressed(progress)
        if now_s - self._resumed_at_s >= self._served_s:
            self._executor.serve_during_load()
            self._resumed_at_s = time.monotonic()
            self._served_s = self._resumed_at_s - now_s
