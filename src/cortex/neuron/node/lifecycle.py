"""The lifecycle of one model on this node, as a pure function: state and input in, state and effects out.

`controller.py` feeds it one input at a time and carries out the effects. At most one load, wake or unload is in
progress. Each is an attempt with a number, and inputs from older attempts are ignored. Every waiting caller is
notified at the next stable state: ready, failed, asleep or cold. A model that falls asleep is `unloading` on the way,
and one that wakes is `loading`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from cortex.neuron.node import lifecycle_events as events
from cortex.neuron.worker.backoff import BackoffPolicy, FaultHistory
from cortex.wire.errors import CortexError, LoadFailed, UnloadedWhileLoading
from cortex.wire.node.protocol import ModelState

FAILURE_S = 30.0
"""How long a model is reported as failed after its last load."""


@dataclass(frozen=True, slots=True)
class Lifecycle:
    state: ModelState = ModelState.COLD
    wanted: Literal["ready", "gone"] = "gone"
    attempt: int = 0
    """The number of the latest load, wake or unload."""
    weights_in_host: bool = False
    """The model is asleep, or waking."""
    since_s: float = 0.0
    """When `state` began."""
    reason: str | None = None
    """Why the model is failed or recovering, or cold without a request."""
    error: CortexError | None = None
    """The error for callers of a failed model."""
    faults: FaultHistory = field(default_factory=FaultHistory)

    def reported_state(self, now_s: float) -> ModelState:
        """`state`, but a failure expires after a while: only its reason remains, and the next request loads the model.
        A model that is unloaded to be reloaded counts as loading, so that its memory is not given to others."""
        if self.state is ModelState.UNLOADING and self.wanted == "ready":
            return ModelState.LOADING
        is_over = self.state is ModelState.FAILED and now_s - self.since_s >= FAILURE_S
        return ModelState.COLD if is_over else self.state


Transition = tuple[Lifecycle, tuple[events.Effect, ...]]

_LOADING = frozenset({ModelState.DOWNLOADING, ModelState.LOADING, ModelState.RECOVERING})
_NOT_IN_MEMORY = frozenset({ModelState.COLD, ModelState.FAILED})


def transition(life: Lifecycle, happened: events.Input, now_s: float, policy: BackoffPolicy) -> Transition:
    """The lifecycle after `happened`, and the effects to carry out."""
    match happened:
        case events.EnsureReady():
            return _ensure_ready(life, now_s)
        case events.EnsureGone():
            return _ensure_gone(life, happened, now_s)
        case events.EnsureAsleep():
            return _ensure_asleep(life, happened, now_s)
        case events.DownloadStarted(attempt) if attempt == life.attempt and life.state is ModelState.LOADING:
            return _enter(life, ModelState.DOWNLOADING, now_s), ()
        case events.FilesReady(attempt) if attempt == life.attempt and life.state is ModelState.DOWNLOADING:
            return _enter(life, ModelState.LOADING, now_s), ()
        case events.LoadEnded(attempt, None) if attempt == life.attempt:
            return _load_succeeded(life, now_s)
        case events.LoadEnded(attempt, error, worker_lost) if attempt == life.attempt and error is not None:
            if life.weights_in_host and not worker_lost:
                return _wake_failed(life, error, now_s, has_room_elsewhere=happened.has_room_elsewhere)
            return _load_failed(life, error, worker_lost and happened.restarts, now_s, policy)
        case events.ModelLost(reason, restarts=False) if life.state is ModelState.READY:
            return _enter(replace(life, wanted="gone"), ModelState.COLD, now_s, reason), ()
        case events.ModelLost(reason) if life.state is ModelState.READY:
            return _recover(life, reason, now_s, policy)
        case events.ModelLost(reason) if life.state is ModelState.ASLEEP:
            # It served no request, so it need not recover: the next request loads it.
            reason = f"its weights were lost while it slept: {reason}"
            return _enter(replace(life, weights_in_host=False), ModelState.COLD, now_s, reason), ()
        case events.ProducedTokens():
            return replace(life, faults=life.faults.proved()), ()
        case events.UnloadEnded(attempt, asleep) if attempt == life.attempt and life.state is ModelState.UNLOADING:
            return _fell_asleep(life, now_s) if asleep else _gone(life, now_s)
        case _:
            return life, ()  # from an older attempt


def _ensure_ready(life: Lifecycle, now_s: float) -> Transition:
    life = replace(life, wanted="ready")
    if life.state is ModelState.READY:
        return life, (events.NotifyReady(),)
    if life.state is ModelState.ASLEEP:
        return _wake(life, now_s)
    if life.state in _NOT_IN_MEMORY:
        return _start_load(replace(life, faults=FaultHistory()), now_s)
    return life, ()


def _ensure_gone(life: Lifecycle, wish: events.EnsureGone, now_s: float) -> Transition:
    life = replace(life, wanted="gone")
    if life.state in _NOT_IN_MEMORY:
        return _enter(life, ModelState.COLD, now_s), (events.NotifyGone(),)
    if life.state in _LOADING:
        return _cancel_load(life, now_s)
    if life.state is ModelState.UNLOADING:
        return life, (_load_cancelled(), events.UnloadInstead(), events.ShortenDrain(wish.drain_s))
    return _start_unload(life, events.StartUnload(life.attempt + 1, wish.drain_s), now_s)


def _ensure_asleep(life: Lifecycle, wish: events.EnsureAsleep, now_s: float) -> Transition:
    if life.state is ModelState.ASLEEP:
        return life, (events.NotifyAsleep(),)
    if life.state in _NOT_IN_MEMORY:
        return _ensure_gone(life, events.EnsureGone(), now_s)
    life = replace(life, wanted="gone")
    if life.state in _LOADING:
        return _cancel_load(life, now_s)
    if life.state is ModelState.UNLOADING:
        return life, (_load_cancelled(), events.ShortenDrain(wish.drain_s))
    return _start_unload(life, events.StartUnload(life.attempt + 1, wish.drain_s, to_sleep=True), now_s)


def _cancel_load(life: Lifecycle, now_s: float) -> Transition:
    """A wake is short and cannot be cancelled; the model is unloaded afterwards."""
    effects: tuple[events.Effect, ...] = (
        (_load_cancelled(),) if life.weights_in_host else (_load_cancelled(), events.StopLoad())
    )
    return _enter(life, ModelState.UNLOADING, now_s), effects


def _load_succeeded(life: Lifecycle, now_s: float) -> Transition:
    life = replace(life, weights_in_host=False)
    if life.state in _LOADING:
        return _enter(life, ModelState.READY, now_s), (events.NotifyReady(),)
    if life.state is ModelState.UNLOADING:  # cancelled too late
        return _start_unload(life, events.StartUnload(life.attempt + 1), now_s)
    return life, ()


def _load_failed(
    life: Lifecycle, error: CortexError, recovers: bool, now_s: float, policy: BackoffPolicy
) -> Transition:
    life = replace(life, weights_in_host=False)
    if life.state is ModelState.UNLOADING:  # cancelled
        return _gone(life, now_s)
    if life.state not in _LOADING:
        return life, ()
    if recovers or life.state is ModelState.RECOVERING:
        return _recover(life, error.message, now_s, policy)
    return _fail(life, error, now_s)


def _wake_failed(life: Lifecycle, error: CortexError, now_s: float, *, has_room_elsewhere: bool) -> Transition:
    if life.state is ModelState.UNLOADING or has_room_elsewhere:  # cancelled, or unloaded to be loaded again
        return _start_unload(life, events.StartUnload(life.attempt + 1), now_s)
    return _enter(replace(life, wanted="gone"), ModelState.ASLEEP, now_s), (events.NotifyFailed(error),)


def _fell_asleep(life: Lifecycle, now_s: float) -> Transition:
    life = _enter(replace(life, weights_in_host=True), ModelState.ASLEEP, now_s)
    if life.wanted == "ready":  # a caller wants it again
        life, effects = _wake(life, now_s)
        return life, (events.NotifyAsleep(), *effects)
    return life, (events.NotifyAsleep(),)


def _gone(life: Lifecycle, now_s: float) -> Transition:
    life = _enter(life, ModelState.COLD, now_s)
    if life.wanted == "ready":  # a caller wants it again
        life, effects = _start_load(life, now_s)
        return life, (events.NotifyGone(), *effects)
    return life, (events.NotifyGone(),)


def _recover(life: Lifecycle, reason: str, now_s: float, policy: BackoffPolicy) -> Transition:
    life = replace(life, faults=life.faults.faulted(now_s, policy))
    delay_s = life.faults.delay_s(policy)
    if delay_s is None:
        num_faults = len(life.faults.times_s)
        return _fail(life, LoadFailed(f"gave up after {num_faults} faults; the latest: {reason}"), now_s)
    life = replace(_enter(life, ModelState.RECOVERING, now_s, reason), attempt=life.attempt + 1)
    return life, (events.StartLoad(life.attempt, delay_s),)


def _fail(life: Lifecycle, error: CortexError, now_s: float) -> Transition:
    return replace(_enter(life, ModelState.FAILED, now_s, error.message), error=error), (events.NotifyFailed(error),)


def _start_load(life: Lifecycle, now_s: float) -> Transition:
    life = replace(_enter(life, ModelState.LOADING, now_s), attempt=life.attempt + 1)
    return life, (events.StartLoad(life.attempt),)


def _wake(life: Lifecycle, now_s: float) -> Transition:
    life = replace(_enter(life, ModelState.LOADING, now_s), attempt=life.attempt + 1)
    return life, (events.StartWake(life.attempt),)


def _start_unload(life: Lifecycle, effect: events.StartUnload, now_s: float) -> Transition:
    life = replace(_enter(life, ModelState.UNLOADING, now_s), attempt=effect.attempt, weights_in_host=False)
    return life, (effect,)


def _enter(life: Lifecycle, state: ModelState, now_s: float, reason: str | None = None) -> Lifecycle:
    since_s = life.since_s if state is life.state else now_s
    return replace(life, state=state, since_s=since_s, reason=reason, error=None)


def _load_cancelled() -> events.NotifyFailed:
    return events.NotifyFailed(UnloadedWhileLoading("the model was unloaded while it was being loaded; load it again"))
