"""The one owner of a model on this node: feeds its lifecycle, carries out the effects, tells who waits.

`ensure_ready`, `ensure_asleep` and `ensure_gone` are idempotent and join what is under way. Inputs are handled one at a
time, in order, on the loop; long work runs in one task, which reports back as an input.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from cortex.neuron.node.instance import Instance
from cortex.neuron.node.lifecycle import Lifecycle, transition
from cortex.neuron.node.lifecycle_events import (
    AbortLoad,
    Effect,
    EnsureAsleep,
    EnsureGone,
    EnsureReady,
    FellAsleep,
    Input,
    LoadingFailed,
    LoadSucceeded,
    ModelLost,
    NotifyAsleep,
    NotifyFailed,
    NotifyGone,
    NotifyReady,
    ShortenDrain,
    StartLoad,
    StartUnload,
    StartWake,
    UnloadFinished,
    UnloadInstead,
    WakingFailed,
)
from cortex.neuron.node.loading.library import KnownModel
from cortex.neuron.node.loading.observer import Loader, Reports
from cortex.neuron.node.loading.progress import LoadProgressTracker
from cortex.neuron.node.parking import Parking
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.supervisor import Damaged, SleepRejected, WorkerLost
from cortex.wire.errors import CortexError, LoadFailed, Overloaded, Recovering, ShuttingDown
from cortex.wire.node import ModelState

log = logging.getLogger(__name__)

_ABSENT = {ModelState.COLD: "not loaded", ModelState.ASLEEP: "asleep"}
_PROGRESS_EVENT_S = 0.25
"""Listeners hear of a load's progress at most this often."""


class ModelController:
    """Belongs to the daemon's loop."""

    def __init__(
        self,
        model: KnownModel,
        loader: Loader,
        parking: Parking,
        on_changed: Callable[[str], None],
        policy: BackoffPolicy,
    ) -> None:
        self.model_id = model.id
        self.model = model
        """How it is loaded, or was last, or will be next."""
        self.life = Lifecycle(since_s=time.monotonic())
        self.instance: Instance | None = None
        """What serves, or sleeps; None while nothing of the model is in memory."""
        self.progress: LoadProgressTracker | None = None
        self.last_error: CortexError | None = None
        """Why the latest bring-up failed, as it was raised."""
        self._loader = loader
        self._parking = parking
        self._on_changed = on_changed
        self._policy = policy
        self._inputs: deque[Input] = deque()
        self._handling = False
        self._abandoned = False
        self._work: asyncio.Task[None] | None = None
        self._drain_deadline_s = 0.0
        self._drain_hurried = asyncio.Event()
        self._parks = False
        """Whether the take-down under way is to end in sleep."""
        self._ready_waiters: set[asyncio.Future[None]] = set()
        self._asleep_waiters: set[asyncio.Future[None]] = set()
        self._gone_waiters: set[asyncio.Future[None]] = set()
        self._progress_told_s = 0.0

    # Wishes

    def want_ready(self, model: KnownModel) -> None:
        """Starts bringing the model up as `model` says; joins a load that is done or under way, however asked."""
        self._prepare(model)
        self._post(EnsureReady())

    async def ensure_ready(self, model: KnownModel) -> None:
        """Returns when the model is ready. Raises what kept it from it. Leaving early does not stop the load."""
        self._prepare(model)
        await self._wait(self._ready_waiters, EnsureReady())

    async def ensure_asleep(self, drain_s: float) -> None:
        """Returns when none of the model's device memory is taken any more; its weights stay in host memory if there
        is room for them."""
        await self._wait(self._asleep_waiters, EnsureAsleep(drain_s))

    async def dismiss(self) -> None:
        """Unloads the model if it sleeps; one that somebody wants is left alone."""
        if self.life.state is ModelState.ASLEEP:
            await self.ensure_gone(0.0)

    async def ensure_gone(self, drain_s: float) -> None:
        """Returns when nothing of the model is in memory any more."""
        await self._wait(self._gone_waiters, EnsureGone(drain_s))

    def serving(self) -> Instance:
        """The instance to send a request to. Raises a retryable error while there is none, LoadFailed when failed."""
        state = self.life.state
        if state is ModelState.READY and self.instance is not None:
            return self.instance
        if state is ModelState.RECOVERING:
            message = f"{self.model_id} lost its device and is coming back by itself; try again"
            raise Recovering(message, retry_after_s=self._retry_after_s())
        if state is ModelState.FAILED:
            raise self.last_error or LoadFailed(f"{self.model_id} failed: {self.life.reason}")
        if state in (ModelState.COLD, ModelState.ASLEEP):
            raise Overloaded(f"{self.model_id} is {_ABSENT[state]}; POST /models/load brings it up", retry_after_s=1)
        raise Overloaded(f"{self.model_id} is {state.value}; try again", retry_after_s=self._retry_after_s())

    def abandon(self) -> None:
        """The node goes down: nothing new is begun, what is under way is called off, who waits is told."""
        self._abandoned = True
        if self._work is not None:
            self._work.cancel()
        for waiter in self._ready_waiters:
            _reject(waiter, ShuttingDown("the node is shutting down"))
        _release(self._asleep_waiters)
        _release(self._gone_waiters)

    async def abandoned(self) -> None:
        """Returns when nothing is under way any more; the workers must be gone by then."""
        if self._work is not None:
            await asyncio.wait({self._work})

    def _prepare(self, model: KnownModel) -> None:
        """Takes over how the model is to be loaded, unless it is loaded already. A sleeper wakes where it is, however
        asked; one that is asked for on another device is taken out of its sleep first."""
        sleeper = self.instance if self.life.state is ModelState.ASLEEP else None
        if sleeper is not None and model.devices and sleeper.supervisor.device.index not in model.devices:
            self._post(EnsureGone())
        if self.life.state in (ModelState.COLD, ModelState.FAILED, ModelState.UNLOADING):
            self.model = model

    def _retry_after_s(self) -> float:
        eta_s = self.progress.told().eta_s if self.progress is not None else None
        return max(1.0, eta_s if eta_s is not None else 2.0)

    async def _wait(self, waiters: set[asyncio.Future[None]], wish: Input) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.add(waiter)
        try:
            self._post(wish)
            await waiter
        finally:
            waiters.discard(waiter)

    # The one place where the lifecycle changes

    def _post(self, happened: Input) -> None:
        self._inputs.append(happened)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inputs:
                self._handle(self._inputs.popleft())
        finally:
            self._handling = False

    def _handle(self, happened: Input) -> None:
        before = self.life
        self.life, effects = transition(before, happened, time.monotonic(), self._policy)
        if self.life.state is not before.state:
            reason = f": {self.life.reason}" if self.life.reason else ""
            log.info("%s: %s → %s%s", self.model_id, before.state.value, self.life.state.value, reason)
            if self.life.state not in (ModelState.DOWNLOADING, ModelState.LOADING, ModelState.RECOVERING):
                self.progress = None
        for effect in effects:
            self._carry_out(effect)
        if self.life.state is not before.state:
            self._on_changed(self.model_id)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartLoad() if self._abandoned:
                pass
            case StartLoad(attempt, delay_s):
                self.progress = LoadProgressTracker.begin(time.monotonic())
                self._work = asyncio.create_task(self._load(attempt, delay_s), name=f"bring up {self.model_id}")
                self._work.add_done_callback(lambda work: self._bring_up_ended(work, attempt))
            case StartWake() if self._abandoned:
                pass
            case StartWake(attempt):
                self.progress = LoadProgressTracker.begin(time.monotonic())
                self._work = asyncio.create_task(self._wake(attempt), name=f"wake {self.model_id}")
                self._work.add_done_callback(lambda work: self._bring_up_ended(work, attempt))
            case AbortLoad():
                if self._work is not None:
                    self._work.cancel()
            case StartUnload(attempt, drain_s, park):
                self._parks = park
                self._drain_deadline_s = time.monotonic() + drain_s
                self._work = asyncio.create_task(self._take_down(attempt), name=f"take down {self.model_id}")
            case UnloadInstead():
                self._parks = False
            case ShortenDrain(drain_s):
                self._drain_deadline_s = min(self._drain_deadline_s, time.monotonic() + drain_s)
                self._drain_hurried.set()
            case NotifyReady():
                _release(self._ready_waiters)
            case NotifyFailed(reason):
                error = self.last_error
                if error is None or error.message != reason:
                    error = LoadFailed(f"{self.model_id}: {reason}")
                for waiter in self._ready_waiters:
                    _reject(waiter, error)
            case NotifyAsleep():
                _release(self._asleep_waiters)
            case NotifyGone():
                _release(self._asleep_waiters)
                _release(self._gone_waiters)

    async def _load(self, attempt: int, delay_s: float) -> None:
        try:
            if delay_s:
                await asyncio.sleep(delay_s)
            self.instance = await self._loader(self.model, Reports(self.happened, self.progressed, attempt))
        except CortexError as error:
            self.last_error = error
            self._post(LoadingFailed(attempt, error.message))
        except WorkerLost as error:
            self.last_error = LoadFailed(f"{self.model_id}: {error}")
            self._post(LoadingFailed(attempt, str(error), fault=True))
        except Exception as error:
            log.exception("bringing up %s failed in a way nobody foresaw", self.model_id)
            self.last_error = LoadFailed(f"{self.model_id}: {type(error).__name__}: {error}; see the node's log")
            self._post(LoadingFailed(attempt, self.last_error.message))
        else:
            self.last_error = None
            self._post(LoadSucceeded(attempt))

    def _bring_up_ended(self, work: asyncio.Task[None], attempt: int) -> None:
        # A task may be cancelled before its first line runs, so this cannot be an `except` in it.
        if work.cancelled():
            self._post(LoadingFailed(attempt, "called off"))

    async def _wake(self, attempt: int) -> None:
        try:
            if self.instance is None:
                raise WorkerLost("its worker is gone")
            await self._loader.wake(self.instance)
        except CortexError as error:
            self.last_error = error
            self._post(WakingFailed(attempt, error.message))
        except (Damaged, WorkerLost) as error:
            self.instance = None
            self.last_error = LoadFailed(f"{self.model_id}: {error}")
            self._post(LoadingFailed(attempt, f"it did not survive its sleep: {error}", fault=True))
        except Exception as error:
            log.exception("waking %s failed in a way nobody foresaw", self.model_id)
            self.last_error = LoadFailed(f"{self.model_id}: {type(error).__name__}: {error}; see the node's log")
            self._post(WakingFailed(attempt, self.last_error.message))
        else:
            self.last_error = None
            self._post(LoadSucceeded(attempt))

    async def _take_down(self, attempt: int) -> None:
        instance = self.instance
        is_asleep = False
        try:
            if instance is not None:
                message = f"{self.model_id} is being unloaded; try again to have it loaded"
                instance.close_admission(Overloaded(message, retry_after_s=2))
                await self._drain(instance)
                is_asleep = self._parks and await self._park(instance)
                if not is_asleep:
                    self.instance = None
                    reclaimed = await instance.unload()
                    log.info("%s: unloaded, %s", self.model_id, reclaimed)
        finally:
            self._post(FellAsleep(attempt) if is_asleep else UnloadFinished(attempt))

    async def _park(self, instance: Instance) -> bool:
        """Whether it sleeps, and is still meant to; else it has to be unloaded."""
        need_bytes = instance.resident.info.weight_bytes
        async with self._parking.room(need_bytes) as has_room:
            if not has_room:
                log.info("%s: no room in host memory to park %d MiB", self.model_id, need_bytes >> 20)
                return False
            try:
                await instance.sleep()
            except (SleepRejected, WorkerLost) as error:
                log.warning("%s: cannot be put to sleep: %s", self.model_id, error)
                return False
        log.info("%s: asleep, %d MiB in host memory", self.model_id, instance.resident.host_bytes >> 20)
        return self._parks and self.instance is instance  # neither wanted gone nor lost meanwhile

    async def _drain(self, instance: Instance) -> None:
        """Until no request is left or the deadline has passed, which may be moved up meanwhile."""
        while (left_s := self._drain_deadline_s - time.monotonic()) > 0:
            self._drain_hurried.clear()
            drained = asyncio.ensure_future(instance.drained(left_s))
            hurried = asyncio.ensure_future(self._drain_hurried.wait())
            try:
                await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
                if drained.done():
                    return
            finally:
                drained.cancel()
                hurried.cancel()

    def progressed(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        progress = self.progress or LoadProgressTracker.begin(now_s)
        self.progress = progress.advanced(stage, done_bytes, total_bytes, now_s)
        if self.progress.stage != progress.stage or now_s - self._progress_told_s >= _PROGRESS_EVENT_S:
            self._progress_told_s = now_s
            self._on_changed(self.model_id)

    def happened(self, what: Input) -> None:
        """An input from the bring-up or from the instance."""
        if isinstance(what, ModelLost):
            self.instance = None
            if self._abandoned:
                return  # the node ended the worker itself
        self._post(what)


def _release(waiters: set[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def _reject(waiter: asyncio.Future[None], error: CortexError) -> None:
    if not waiter.done():
        waiter.set_exception(error.with_traceback(None))
