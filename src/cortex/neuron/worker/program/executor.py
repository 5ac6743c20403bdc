"""The engine thread of a worker: the only thread that touches the device, for as long as the process lives.

It executes commands in order and steps every model that has work, in turn. A load runs on this thread too. It lets the
loaded models run from time to time. Requests and cancellations that arrive during a load are executed then; other
commands wait.

Grammars of requests are compiled on threads of their own, because a large one takes seconds.
"""

from __future__ import annotations

import gc
import logging
import queue
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.host_pages.store import ChosenBlocks
from cortex.neuron.engine.memory.host import usable_cores
from cortex.neuron.engine.request import EngineStats, StepOutput
from cortex.neuron.worker import protocol
from cortex.neuron.worker.faults import FaultKind, explain, raise_device_fault
from cortex.neuron.worker.program.device_model import DeviceModel
from cortex.neuron.worker.program.device_models import DeviceModels, EngineThread, resolve_loader
from cortex.neuron.worker.protocol import Activity, Command, Compiled, DeviceAddress, Event, Submit

log = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.25
SHARED_FOR_S = 2.0
"""After two models had work, each takes short steps for this long, because the other's next request is likely."""
HOST_CHECK_S = 5.0
"""Interval of reading the host's free memory while it holds pages."""
PREPARE_AFTER_S = 0.2
"""Idle time before models prepare, longer than the delay of a request that waited for its model's load."""

Work = Command | protocol.FollowStep | protocol.Compiled
"""Commands of the daemon, of the leader of a divided model, or of the grammar compiler."""
_DURING_LOADS = (
    protocol.Submit
    | protocol.Compiled
    | protocol.Cancel
    | protocol.QueryMemory
    | protocol.FindBlocks
    | protocol.ExpectBlocks
    | protocol.SaveBlocks
    | protocol.CountPages
    | protocol.ForgetBlocks
    | protocol.FollowStep
)
"""Commands that do not wait for the end of a load."""

_GRAMMAR_THREADS = 2


def _uses_torch() -> bool:
    """Whether the engine uses torch, which the fork server has then imported."""
    return "torch" in sys.modules


def _limit_threads(device: DeviceAddress) -> None:
    """The cores that this process may use, less the shares of the other CPU devices. Applies to the calling thread."""
    if _uses_torch():
        sys.modules["torch"].set_num_threads(max(1, usable_cores() // device.num_host_shares))


class Executor:
    """Owned by the engine thread, except `inbox`, `cancel_load` and `report`, which any thread may use."""

    def __init__(self, device: DeviceAddress, engine: str, emit: Callable[[Event], None]) -> None:
        """`engine` names the load function as `module:attribute`; `run` imports it, which takes seconds."""
        self.inbox: queue.SimpleQueue[list[Work]] = queue.SimpleQueue()
        self.activity: Activity = "start"
        self.progress = 0
        self._device = device
        self._engine = engine
        self._emit = emit
        self._commands: deque[Work] = deque()
        self._stats: dict[int, EngineStats] = {}
        self._stats_at_s = 0.0
        self._host_checked_at_s = 0.0
        self._shared_at_s = float("-inf")
        """When two models had work last."""
        self._has_stepped = False
        """Whether a model of requests has stepped since there was no work."""
        self._is_exiting = False
        self._fallbacks: dict[str, str] = {}
        """The last report."""
        self._grammars = GrammarCompiler(lambda compiled: self.inbox.put([compiled]))
        thread = EngineThread(
            self._progressed,
            self._serve_during_load,
            self._follow_others,
            lambda handle, plan: self.inbox.put([protocol.FollowStep(handle, plan)]),
            self._model_removed,
        )
        self._models = DeviceModels(device, emit, thread)

    def cancel_load(self, handle: int) -> None:
        """Called by the reader thread, so that a running load notices."""
        self._models.cancelled_loads.add(handle)

    def report(self) -> protocol.Report:
        """The heartbeat. Called by the writer thread; reads only values that are replaced as a whole."""
        return protocol.Report(self.activity, self.progress, self._stats)

    def run(self) -> None:
        """Runs until `Exit`. Raises DeviceFault."""
        self._models.load_engine = resolve_loader(self._engine)
        _limit_threads(self._device)
        if _uses_torch():
            from cortex.neuron.private_api.report import probe_cheap

            probe_cheap("cpu" if self._device.kind == "cpu" else "cuda")
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
            if self._has_stepped:
                # Time for the writer to wake and send the last outputs: statistics hold the interpreter for longer.
                time.sleep(0)
                self._has_stepped = False
            self._publish_stats()
            self._commands.extend(self._await_commands())
        while True:
            try:
                self._commands.extend(self.inbox.get_nowait())
            except queue.Empty:
                return

    def _await_commands(self) -> list[Work]:
        """The next commands. Until one arrives, models prepare, one piece at a time."""
        idle_s = PREPARE_AFTER_S
        while unprepared := [model for model in self._models.values() if not model.is_prepared]:
            try:
                return self.inbox.get(timeout=idle_s)
            except queue.Empty:
                self._prepare(unprepared[0])
                idle_s = 0.0
        while self._models.kv_host_bytes:  # the host may run short of memory meanwhile
            try:
                return self.inbox.get(timeout=HOST_CHECK_S)
            except queue.Empty:
                self._models.yield_host_memory()
                self._models.report_host_pages()
        return self.inbox.get()

    def _prepare(self, model: DeviceModel) -> None:
        self.activity = "step"
        try:
            model.is_prepared = not model.engine.prepare()
        except Exception as error:
            raise_device_fault(error, "prepare")
            log.error("preparing model %d failed: %s", model.handle, explain(error), exc_info=error)
            self._models.free_memory_of(error)
            model.is_prepared = True
        self._models.report_host_pages()
        self.progress += 1
        self.activity = "idle"

    def _execute(self, command: Work) -> None:
        match command:
            case protocol.FollowStep():
                if (model := self._models.get(command.handle)) is not None:
                    self.activity = "step"
                    model.follow(command.plan)
            case protocol.Submit():
                self._submit(command)
            case protocol.Compiled():
                self._compiled(command)
            case protocol.Cancel():
                if self._grammars.take(command.handle, command.request_id) is not None:
                    self._emit_cancelled(command.handle, command.request_id)
                elif (model := self._models.get(command.handle)) is not None:
                    model.engine.cancel(command.request_id)
            case protocol.Load():
                self.activity = "load"
                self._models.load(command)
            case protocol.Unload():
                self.activity = "unload"
                self._models.unload(command.handle)
            case protocol.Sleep():
                self.activity = "load"
                self._sleep(command.handle)
            case protocol.Wake():
                self.activity = "load"
                self._models.wake(command.handle)
            case protocol.LimitHostPages():
                self._models.limit_host_pages(command.num_bytes)
            case protocol.FindBlocks():
                self._models.find_blocks(command.model, command.files)
            case protocol.ExpectBlocks():
                self._models.expect_blocks(command.transfer, has_ended=command.has_ended)
            case protocol.SaveBlocks():
                is_complete = self._models.save_blocks(command.model, command.digests)
                self._emit(protocol.BlocksSaved(command.query, is_complete))
            case protocol.CountPages():
                num_pages = self._models.count_pages(command.model, command.digests)
                self._emit(protocol.PagesCounted(command.query, num_pages))
            case protocol.ForgetBlocks():
                self._models.forget_blocks(ChosenBlocks(command.model_id, command.tenants))
                self._emit(protocol.BlocksForgotten(command.query))
            case protocol.QueryMemory():
                self._emit(protocol.Memory(command.query, self._models.measure()))
            case protocol.MeasureLimits():
                self.activity = "load"
                self._emit(self._models.measure_limits(command.query))
            case protocol.Exit():
                self._is_exiting = True
                self.activity = "unload"
                self._models.save_all(command.save_s)
            case protocol.CancelLoad():
                # The reader thread has set the flag; the load has ended before this command's turn.
                self._models.cancelled_loads.discard(command.handle)
        self.progress += 1

    def _submit(self, command: protocol.Submit) -> None:
        model = self._models.get(command.handle)
        if model is None:
            self._fail_unloaded(command)
        elif command.request.grammar is not None:
            self._grammars.begin(command, model.engine.compile)
        else:
            model.accept(command.whole())

    def _compiled(self, command: protocol.Compiled) -> None:
        submit = self._grammars.take(command.handle, command.request_id)
        if submit is None:
            return  # the request has ended meanwhile
        if command.problem is not None:
            self._emit(protocol.RequestFailed(command.handle, command.request_id, FaultKind.REQUEST, command.problem))
        elif (model := self._models.get(command.handle)) is not None:
            model.accept(submit.whole())
        else:
            self._fail_unloaded(submit)

    def _fail_unloaded(self, command: protocol.Submit) -> None:
        message = "the model was unloaded before the request began; try again"
        self._emit(protocol.RequestFailed(command.handle, command.request.id, FaultKind.REQUEST, message))

    def _emit_cancelled(self, handle: int, request_id: str) -> None:
        self._emit(protocol.Outputs(handle, (StepOutput(request_id, finish="cancelled"),)))

    def _step_all(self) -> None:
        now_s = time.monotonic()
        working = [model for model in self._models.values() if model.engine.has_work]
        if len(working) > 1:
            self._shared_at_s = now_s
        for model in working:
            if model.engine.has_work:
                model.engine.shares_device = now_s - self._shared_at_s < SHARED_FOR_S
                self.activity = "step"
                self._step(model)
        if now_s - self._host_checked_at_s >= HOST_CHECK_S:
            self._host_checked_at_s = now_s
            self._models.yield_host_memory()
        if time.monotonic() - self._stats_at_s >= STATS_INTERVAL_S:
            self._publish_stats()

    def _step(self, model: DeviceModel) -> None:
        self._has_stepped = True
        if model.step():
            self.progress += 1
        if model.broken is not None:
            self._models.close(model)
            self._emit(protocol.ModelBroken(model.handle, model.broken))

    def _serve_during_load(self) -> None:
        """Executes pending requests and steps the loaded models once; other commands wait."""
        self._receive(wait=False)
        postponed: deque[Work] = deque()
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, _DURING_LOADS):
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
            if isinstance(command, protocol.FollowStep):
                self._execute(command)
            else:
                self._commands.append(command)

    def _sleep(self, handle: int) -> None:
        for submit in self._grammars.take_all(handle):
            self._emit_cancelled(handle, submit.request.id)
        if (model := self._models.get(handle)) is not None:
            model.cancel_all()
        while (model := self._models.get(handle)) is not None and model.engine.has_work:
            self._step(model)  # until it is idle, or broken
        self._models.sleep(handle)

    def _model_removed(self, handle: int) -> None:
        for submit in self._grammars.take_all(handle):
            self._fail_unloaded(submit)
        self._stats = {other: stats for other, stats in self._stats.items() if other != handle}

    def _progressed(self) -> None:
        self.progress += 1

    def _report_fallbacks(self) -> None:
        """Reports unusable library interfaces, if they have changed."""
        if _uses_torch():
            from cortex.neuron.private_api.report import problems

            if (found := problems()) != self._fallbacks:
                self._fallbacks = found
                self._emit(protocol.FallbacksUsed(found))

    def _publish_stats(self) -> None:
        self._report_fallbacks()
        self._stats = {handle: model.engine.stats() for handle, model in self._models.items()}
        self._models.report_host_pages()
        self._stats_at_s = time.monotonic()


class GrammarCompiler:
    """Owned by the engine thread. The library compiles without the interpreter's lock."""

    def __init__(self, deliver: Callable[[Compiled], None]) -> None:
        """`deliver` is called on another thread when a grammar is compiled."""
        self._deliver = deliver
        self._waiting: dict[tuple[int, str], Submit] = {}
        """Requests by model and id."""
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, submit: Submit, compile: Callable[[str, bytes], None]) -> None:
        """Compile the grammar of a request; `Compiled` follows. `compile` raises RequestError."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_GRAMMAR_THREADS, "grammar")
        self._waiting[submit.handle, submit.request.id] = submit
        self._threads.submit(self._compile, submit, compile)

    def take(self, handle: int, request_id: str) -> Submit | None:
        """Removes and returns a waiting request; None if it did not wait."""
        return self._waiting.pop((handle, request_id), None)

    def take_all(self, handle: int) -> list[Submit]:
        """Removes and returns the waiting requests of a model."""
        return [self._waiting.pop(key) for key in list(self._waiting) if key[0] == handle]

    def _compile(self, submit: Submit, compile: Callable[[str, bytes], None]) -> None:
        handle, request_id, grammar = submit.handle, submit.request.id, submit.request.grammar
        if (handle, request_id) not in self._waiting or grammar is None:
            return  # cancelled
        problem: str | None = None
        try:
            compile(grammar, submit.request.tenant)
        except RequestError as error:
            problem = str(error)
        except Exception as error:
            log.exception("compiling a grammar failed")
            problem = explain(error)
        self._deliver(Compiled(handle, request_id, problem))
