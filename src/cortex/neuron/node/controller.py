"""The controller of one model on this node: feeds its lifecycle, carries out the effects, notifies waiting callers.

`ensure_ready`, `ensure_asleep` and `ensure_gone` are idempotent and join what is in progress. Inputs are handled one
at a time, in order, on the loop. A load, a wake or an unload runs as one task, which ends by posting an input.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

from msgspec.structs import replace

from cortex.formats.units import gib
from cortex.neuron.node import lifecycle
from cortex.neuron.node.instance import Instance, ModelCallbacks
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.lifecycle import Lifecycle, transition
from cortex.neuron.node.loading.device_allocator import MemoryElsewhere
from cortex.neuron.node.loading.loader import ModelLoader
from cortex.neuron.node.loading.progress import LoadProgressTracker
from cortex.neuron.node.memory.ceilings import ModelHolding
from cortex.neuron.node.memory.host_budget import HostBudget
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.model_host import Damaged, SleepRejected
from cortex.neuron.worker.process import WorkerLost
from cortex.wire.errors import CortexError, LoadFailed, Overloaded, Recovering, ShuttingDown, UnloadedWhileLoading
from cortex.wire.node.protocol import ModelState
from cortex.wire.words import about

log = logging.getLogger(__name__)

_PROGRESS_EVENT_S = 0.25
"""Progress within a stage is published at most this often."""

Waiters = set[asyncio.Future[None]]


class ModelController:
    """Owns one model's state. Belongs to the daemon's loop."""

    def __init__(
        self,
        model: KnownModel,
        loader: ModelLoader,
        host_budget: HostBudget,
        on_changed: Callable[[str], None],
        policy: BackoffPolicy,
    ) -> None:
        self.model_id = model.id
        self.model = model
        """The options of the latest or the next load."""
        self.num_orders = 0
        """How often somebody has set the options of a load; a reload has those of the one before."""
        self.life = Lifecycle(since_s=time.monotonic())
        self.instance: Instance | None = None
        """The loaded or sleeping model; None while nothing of it is in memory."""
        self.progress: LoadProgressTracker | None = None
        self._loader = loader
        self._host_budget = host_budget
        self._on_changed = on_changed
        self._policy = policy
        self._inputs: deque[lifecycle.Input] = deque()
        self._handling = False
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        """The load, wake or unload in progress, or the latest one."""
        self._drain_deadline_s = 0.0
        """On the loop's clock."""
        self._drain_timeout: asyncio.Timeout | None = None
        self.leaving: ModelHolding | None = None
        """Device memory that the model holds while it is being unloaded."""
        self.falls_asleep = False
        """Whether the unload in progress should end in sleep."""
        self._ready_waiters: Waiters = set()
        self._asleep_waiters: Waiters = set()
        self._gone_waiters: Waiters = set()
        self._progress_published_s = 0.0
        self.load_s: float | None = None
        """Duration of the latest load or wake, without download and waiting."""
        self._load_began_s = 0.0

    # For callers

    def set_options(self, model: KnownModel) -> None:
        """Set the options of the next load, unless one is in progress or ordered. A sleeping model wakes where it is
        unless `model` excludes its device; then it is unloaded first."""
        held = set() if self.instance is None else set(self.instance.host.device_indices)
        if model.devices and not held <= set(model.devices):
            self.unload_sleeping()
        if self.life.state in (ModelState.COLD, ModelState.FAILED) or self._is_leaving:
            self.model = model
            self.num_orders += 1

    def want_ready(self, model: KnownModel) -> None:
        """Starts to load `model`. Joins a load in progress or done, whatever its options, because the node has already
        rejected another quantisation."""
        self.set_options(model)
        self._post(lifecycle.EnsureReady())

    async def ensure_ready(self, model: KnownModel) -> None:
        """Returns when the model is ready; raises why it is not. Cancelling this call does not stop the load."""
        self.set_options(model)
        await self._wait(self._ready_waiters, lifecycle.EnsureReady())

    def reload(self) -> None:
        """Loads a ready model without requests again, with all the memory that it can have now. Callers wait for it."""
        if self.model.min_context_tokens is not None:
            self.model = replace(self.model, min_context_tokens=1)  # with less it still serves
        self._post(lifecycle.EnsureGone())
        self._post(lifecycle.EnsureReady())

    async def ensure_asleep(self, drain_s: float) -> None:
        """Returns when the model's device memory is free. Its weights stay in host memory if there is room."""
        await self._wait(self._asleep_waiters, lifecycle.EnsureAsleep(drain_s))

    def unload_sleeping(self) -> bool:
        """Starts to unload a model that is asleep or falling asleep. False if it is in neither state, or wanted
        again."""
        if self.life.state is ModelState.ASLEEP:
            self._post(lifecycle.EnsureGone())
        elif self._is_leaving:
            self._post(lifecycle.EnsureGone(math.inf))  # its drain goes on
        else:
            return False
        return True

    async def unload_if_asleep(self) -> None:
        if self.life.state is ModelState.ASLEEP:
            await self.ensure_gone(0.0)

    async def ensure_gone(self, drain_s: float) -> None:
        """Returns when nothing of the model is in memory."""
        await self._wait(self._gone_waiters, lifecycle.EnsureGone(drain_s))

    def serving_instance(self) -> Instance:
        """Where requests go. Raises a retryable error while the model is not ready, or why its load failed."""
        state = self.life.state
        if state is ModelState.READY and self.instance is not None:
            return self.instance
        if state is ModelState.RECOVERING:
            message = f"the process of {self.model_id} has ended and is being started again; try again"
            raise Recovering(message, retry_after_s=self._retry_after_s())
        if self.life.error is not None:
            raise self.life.error.with_traceback(None)
        if state in (ModelState.COLD, ModelState.ASLEEP):
            absent = "asleep" if state is ModelState.ASLEEP else "not loaded"
            raise Overloaded(f"{self.model_id} is {absent}; load it with POST /models/load", retry_after_s=1)
        # It was ready when the request arrived. A gateway waits for its next load.
        raise Recovering(f"{self.model_id} is {state.value}; try again", retry_after_s=self._retry_after_s())

    def close(self) -> None:
        """The node shuts down: cancels what is in progress, starts nothing new and releases every waiting caller."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
        _reject(self._ready_waiters, ShuttingDown("the node is shutting down"))
        _release(self._asleep_waiters)
        _release(self._gone_waiters)

    async def closed(self) -> None:
        """Returns when nothing is in progress. The workers must have ended before."""
        if self._task is not None:
            await asyncio.wait({self._task})

    @property
    def _is_leaving(self) -> bool:
        return self.life.state is ModelState.UNLOADING and self.life.wanted == "gone"

    def _retry_after_s(self) -> float:
        eta_s = self.progress.snapshot().eta_s if self.progress is not None else None
        return max(1.0, eta_s if eta_s is not None else 2.0)

    async def _wait(self, waiters: Waiters, wish: lifecycle.Input) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.add(waiter)
        try:
            self._post(wish)
            await waiter
        finally:
            waiters.discard(waiter)

    # The only place where the lifecycle changes

    def _post(self, happened: lifecycle.Input) -> None:
        self._inputs.append(happened)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inputs:
                self._handle(self._inputs.popleft())
        finally:
            self._handling = False

    def _handle(self, happened: lifecycle.Input) -> None:
        before = self.life.state
        self.life, effects = transition(self.life, happened, time.monotonic(), self._policy)
        after = self.life.state
        if after is not before:
            reason = f": {self.life.reason.removeprefix(f'{self.model_id}: ')}" if self.life.reason else ""
            level = logging.WARNING if reason else logging.INFO
            log.log(level, "%s: %s → %s%s", self.model_id, before.value, after.value, reason)
            if after is ModelState.READY:
                self.load_s = round(time.monotonic() - self._load_began_s, 3)
            if after not in (ModelState.DOWNLOADING, ModelState.LOADING, ModelState.RECOVERING):
                self.progress = None
        for effect in effects:
            self._carry_out(effect)
        if after is not before:
            self._host_budget.settle()
            self._on_changed(self.model_id)

    def _carry_out(self, effect: lifecycle.Effect) -> None:
        match effect:
            case lifecycle.StartLoad(attempt, delay_s):
                self._start(attempt, "load", partial(self._load, attempt, delay_s))
            case lifecycle.StartWake(attempt):
                self._start(attempt, "wake", self._wake)
            case lifecycle.StopLoad():
                if self._task is not None:
                    self._task.cancel()
            case lifecycle.StartUnload(attempt, drain_s, to_sleep):
                self.falls_asleep = to_sleep
                self._drain_deadline_s = asyncio.get_running_loop().time() + drain_s
                self._task = asyncio.create_task(self._unload(attempt), name=f"unload {self.model_id}")
            case lifecycle.UnloadInstead():
                self.falls_asleep = False
            case lifecycle.ShortenDrain(drain_s):
                self._drain_deadline_s = min(self._drain_deadline_s, asyncio.get_running_loop().time() + drain_s)
                if self._drain_timeout is not None and not self._drain_timeout.expired():
                    self._drain_timeout.reschedule(self._drain_deadline_s)
            case lifecycle.NotifyReady():
                _release(self._ready_waiters)
            case lifecycle.NotifyFailed(error):
                _reject(self._ready_waiters, error)
            case lifecycle.NotifyAsleep():
                _release(self._asleep_waiters)
            case lifecycle.NotifyGone():
                _release(self._asleep_waiters)
                _release(self._gone_waiters)

    # Load and wake

    def _start(self, attempt: int, verb: str, work: Callable[[], Awaitable[Instance]]) -> None:
        if self._closing:
            return
        self._load_began_s = time.monotonic()
        self.progress = LoadProgressTracker.begin(self._load_began_s)
        self._task = asyncio.create_task(self._run(attempt, work), name=f"{verb} {self.model_id}")
        self._task.add_done_callback(partial(self._post_if_cancelled, attempt))

    async def _run(self, attempt: int, work: Callable[[], Awaitable[Instance]]) -> None:
        error: CortexError | None = None
        worker_lost = has_room_elsewhere = False
        try:
            instance = await work()
            if instance.lost_reason is not None:  # after its weights were loaded, and before the rest was ready
                raise WorkerLost(instance.lost_reason)
            self.instance = instance
        except CortexError as failed:
            # The error stays with the state of the model, and its frames would keep the read files in memory.
            failed.__cause__ = failed.__context__ = None
            error = failed.with_traceback(None)
            has_room_elsewhere = isinstance(failed, MemoryElsewhere)
        except (WorkerLost, Damaged) as lost:
            self.instance = None
            error, worker_lost = LoadFailed(about(self.model_id, lost)), True
        except Exception as unexpected:
            log.exception("%s: unexpected error in a load", self.model_id)
            error = LoadFailed(f"{self.model_id}: {type(unexpected).__name__}: {unexpected}; see the node's log")
        restarts = self._loader.restarts(self.model)
        self._post(lifecycle.LoadEnded(attempt, error, worker_lost, has_room_elsewhere, restarts))

    def _post_if_cancelled(self, attempt: int, task: asyncio.Task[None]) -> None:
        # A task may be cancelled before its first line runs, so this cannot be an `except` in it.
        if task.cancelled():
            self._post(lifecycle.LoadEnded(attempt, UnloadedWhileLoading(f"{self.model_id}: the load was cancelled")))

    async def _load(self, attempt: int, delay_s: float) -> Instance:
        await asyncio.sleep(delay_s)
        self._load_began_s = time.monotonic()
        callbacks = ModelCallbacks(
            on_progress=partial(self._progressed, attempt),
            on_files_ready=partial(self._files_ready, attempt),
            on_wait=self._waits,
            on_lost=self._lost,
            on_produced=lambda: self._post(lifecycle.ProducedTokens()),
        )
        return await self._loader.load(self.model, callbacks)

    async def _wake(self) -> Instance:
        instance = self.instance
        if instance is None:
            raise WorkerLost("the worker that held its weights is gone")
        await self._loader.wake(self.model, instance, self._waits)
        return instance

    def _progressed(self, attempt: int, stage: str, done_bytes: int, total_bytes: int) -> None:
        if stage == "download":
            self._post(lifecycle.DownloadStarted(attempt))
        now_s = time.monotonic()
        before = self.progress or LoadProgressTracker.begin(now_s)
        self.progress = before.advanced(stage, done_bytes, total_bytes, now_s)
        if self.progress.stage != before.stage or now_s - self._progress_published_s >= _PROGRESS_EVENT_S:
            self._progress_published_s = now_s
            self._on_changed(self.model_id)

    def _files_ready(self, attempt: int) -> None:
        self._load_began_s = time.monotonic()
        self._post(lifecycle.FilesReady(attempt))

    def _waits(self, reason: str | None) -> None:
        if reason is None:
            self._load_began_s = time.monotonic()
        if self.progress is not None and reason != self.progress.waits_for:
            self.progress = self.progress.waiting(reason, time.monotonic())
            self._on_changed(self.model_id)

    def _lost(self, reason: str) -> None:
        self.instance = None
        if not self._closing:  # a closing node ends its workers itself
            self._post(lifecycle.ModelLost(reason, self._loader.restarts(self.model)))

    # Unload and sleep

    async def _unload(self, attempt: int) -> None:
        instance = self.instance
        is_asleep = False
        try:
            if instance is not None:
                indices, resident = instance.host.device_indices, instance.host.resident
                if resident is not None:
                    self.leaving = ModelHolding(self.model_id, indices, resident.device_bytes(len(indices)))
                message = f"{self.model_id} is being unloaded; try again to have it loaded"
                instance.close_admission(Overloaded(message, retry_after_s=2))
                await self._drain(instance)
                is_asleep = self.falls_asleep and await self._put_to_sleep(instance)
                if not is_asleep:
                    self.instance = None
                    reclaimed = await instance.unload()
                    log.info("%s: unloaded, %s", self.model_id, reclaimed)
        finally:
            self.leaving = None
            self._post(lifecycle.UnloadEnded(attempt, is_asleep))

    async def _put_to_sleep(self, instance: Instance) -> bool:
        """Returns whether the model is asleep and may stay so; otherwise it must be unloaded."""
        need_bytes = instance.resident.info.weight_bytes
        async with self._host_budget.for_sleep(need_bytes) as has_room:
            if not has_room:
                log.info("%s: no room in host memory to sleep, %s needed", self.model_id, gib(need_bytes))
                return False
            try:
                await instance.sleep()
            except (SleepRejected, WorkerLost) as error:
                log.warning("%s: cannot be put to sleep: %s", self.model_id, error)
                return False
        log.info("%s: asleep, %s in host memory", self.model_id, gib(instance.resident.host_bytes))
        return self.falls_asleep and self.instance is instance  # an unload or a loss may have come meanwhile

    async def _drain(self, instance: Instance) -> None:
        """Returns when no request is left or at the deadline, which `ShortenDrain` may move forward."""
        try:
            async with asyncio.timeout_at(self._drain_deadline_s) as self._drain_timeout:
                await instance.drained()
        except TimeoutError:
            pass
        finally:
            self._drain_timeout = None


def _release(waiters: Waiters) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _reject(waiters: Waiters, error: CortexError) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(error.with_traceback(None))
