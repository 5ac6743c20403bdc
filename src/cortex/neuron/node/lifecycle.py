"""The life of one model on this node, as a pure function: state and input in, state and effects out.

The owner (`controller.py`) feeds it one input at a time and carries out what it says. At most one bring-up, wake or
take-down is under way; each has a number, and what an older one still reports is ignored. Whatever
happens, everyone who waits is told at the next resting state. Asleep is such a state: on the way there the
model is `unloading`, on the way back `loading`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from cortex.neuron.node.lifecycle_events import (
    AbortLoad,
    Downloading,
    Effect,
    EnsureAsleep,
    EnsureGone,
    EnsureReady,
    FellAsleep,
    FilesReady,
    Input,
    LoadingFailed,
    LoadSucceeded,
    ModelLost,
    NotifyAsleep,
    NotifyFailed,
    NotifyGone,
    NotifyReady,
    ProducedTokens,
    ShortenDrain,
    StartLoad,
    StartUnload,
    StartWake,
    UnloadFinished,
    UnloadInstead,
    WakingFailed,
)
from cortex.neuron.worker.backoff import BackoffPolicy, FaultHistory
from cortex.wire.node import ModelState


@dataclass(frozen=True, slots=True)
class Lifecycle:
    state: ModelState = ModelState.COLD
    wanted: Literal["ready", "gone"] = "gone"
    attempt: int = 0
    """The number of the latest bring-up, wake or take-down."""
    parked: bool = False
    """Its weights are in host memory: it sleeps, or is just waking."""
    since_s: float = 0.0
    """When `state` began."""
    reason: str | None = None
    """Why it is failed or recovering, or cold although nobody asked for that."""
    faults: FaultHistory = field(default_factory=FaultHistory)


_COMING_UP = frozenset({ModelState.DOWNLOADING, ModelState.LOADING, ModelState.RECOVERING})
_AT_REST = frozenset({ModelState.COLD, ModelState.FAILED})
_CALLED_OFF = "the model was unloaded while it was being loaded; ask again to load it"


def transition(
    life: Lifecycle, happened: Input, now_s: float, policy: BackoffPolicy
) -> tuple[Lifecycle, tuple[Effect, ...]]:
    """What the model is after `happened`, and what to do about it."""
    match happened:
        case EnsureReady():
            return _ensure_ready(life, now_s)
        case EnsureGone():
            return _ensure_gone(life, happened, now_s)
        case EnsureAsleep():
            return _ensure_asleep(life, happened, now_s)
        case Downloading(attempt) if attempt == life.attempt and life.state is ModelState.LOADING:
            return _enter(life, ModelState.DOWNLOADING, now_s), ()
        case FilesReady(attempt) if attempt == life.attempt and life.state is ModelState.DOWNLOADING:
            return _enter(life, ModelState.LOADING, now_s), ()
        case LoadSucceeded(attempt) if attempt == life.attempt:
            return _load_succeeded(life, now_s)
        case LoadingFailed(attempt) if attempt == life.attempt:
            return _loading_failed(life, happened, now_s, policy)
        case WakingFailed(attempt) if attempt == life.attempt:
            return _waking_failed(life, happened.reason, now_s)
        case ModelLost() if life.state is ModelState.READY:
            return _recover(life, happened.reason, now_s, policy)
        case ModelLost() if life.state is ModelState.ASLEEP:
            # Nobody is served by it, so nobody misses it: the next request loads it.
            reason = f"its weights were lost while it slept: {happened.reason}"
            return _enter(replace(life, parked=False), ModelState.COLD, now_s, reason), ()
        case ProducedTokens():
            return replace(life, faults=life.faults.proved()), ()
        case UnloadFinished(attempt) if attempt == life.attempt and life.state is ModelState.UNLOADING:
            return _gone(life, now_s)
        case FellAsleep(attempt) if attempt == life.attempt and life.state is ModelState.UNLOADING:
            return _fell_asleep(life, now_s)
        case _:
            return life, ()  # from an attempt that is over


def _ensure_ready(life: Lifecycle, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(life, wanted="ready")
    if life.state is ModelState.READY:
        return life, (NotifyReady(),)
    if life.state is ModelState.ASLEEP:
        return _wake(life, now_s)
    if life.state in _AT_REST:
        # Asked for anew, an earlier failure is forgotten.
        return _start(replace(life, faults=FaultHistory()), now_s)
    return life, ()


def _ensure_gone(life: Lifecycle, wish: EnsureGone, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(life, wanted="gone")
    if life.state in _AT_REST:
        return _enter(life, ModelState.COLD, now_s), (NotifyGone(),)
    if life.state in _COMING_UP:
        return _abort_load(life, now_s)
    if life.state is ModelState.UNLOADING:
        return life, (NotifyFailed(_CALLED_OFF), UnloadInstead(), ShortenDrain(wish.drain_s))
    return _start_unload(life, StartUnload(life.attempt + 1, wish.drain_s), now_s)


def _ensure_asleep(life: Lifecycle, wish: EnsureAsleep, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    if life.state is ModelState.ASLEEP:
        return life, (NotifyAsleep(),)
    if life.state in _AT_REST:
        return _ensure_gone(life, EnsureGone(), now_s)
    life = replace(life, wanted="gone")
    if life.state in _COMING_UP:
        return _abort_load(life, now_s)
    if life.state is ModelState.UNLOADING:
        return life, (NotifyFailed(_CALLED_OFF), ShortenDrain(wish.drain_s))
    return _start_unload(life, StartUnload(life.attempt + 1, wish.drain_s, park=True), now_s)


def _abort_load(life: Lifecycle, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    """A load is stopped; a wake is soon over, and then taken down like a load that was called off too late."""
    effects: tuple[Effect, ...] = (
        (NotifyFailed(_CALLED_OFF),) if life.parked else (NotifyFailed(_CALLED_OFF), AbortLoad())
    )
    return _enter(life, ModelState.UNLOADING, now_s), effects


def _load_succeeded(life: Lifecycle, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(life, parked=False)
    if life.state in _COMING_UP:
        return _enter(life, ModelState.READY, now_s), (NotifyReady(),)
    if life.state is ModelState.UNLOADING:  # called off too late
        return _start_unload(life, StartUnload(life.attempt + 1), now_s)
    return life, ()


def _waking_failed(life: Lifecycle, reason: str, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    if life.state is ModelState.UNLOADING:  # called off meanwhile
        return _start_unload(life, StartUnload(life.attempt + 1), now_s)
    return _enter(replace(life, wanted="gone"), ModelState.ASLEEP, now_s), (NotifyFailed(reason),)


def _fell_asleep(life: Lifecycle, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = _enter(replace(life, parked=True), ModelState.ASLEEP, now_s)
    if life.wanted == "ready":  # somebody asked again meanwhile
        life, effects = _wake(life, now_s)
        return life, (NotifyAsleep(), *effects)
    return life, (NotifyAsleep(),)


def _loading_failed(
    life: Lifecycle, failed: LoadingFailed, now_s: float, policy: BackoffPolicy
) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(life, parked=False)
    if life.state is ModelState.UNLOADING:  # called off, or it would have failed anyway
        return _gone(life, now_s)
    if life.state not in _COMING_UP:
        return life, ()
    if failed.fault or life.state is ModelState.RECOVERING:
        return _recover(life, failed.reason, now_s, policy)
    return _enter(life, ModelState.FAILED, now_s, failed.reason), (NotifyFailed(failed.reason),)


def _recover(life: Lifecycle, reason: str, now_s: float, policy: BackoffPolicy) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(life, faults=life.faults.faulted(now_s, policy))
    delay_s = life.faults.delay_s(policy)
    if delay_s is None:
        reason = f"given up after {life.faults.streak} faults in a row; the last one: {reason}"
        return _enter(life, ModelState.FAILED, now_s, reason), (NotifyFailed(reason),)
    life = replace(_enter(life, ModelState.RECOVERING, now_s, reason), attempt=life.attempt + 1)
    return life, (StartLoad(life.attempt, delay_s),)


def _wake(life: Lifecycle, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(_enter(life, ModelState.LOADING, now_s), attempt=life.attempt + 1)
    return life, (StartWake(life.attempt),)


def _start_unload(life: Lifecycle, effect: StartUnload, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(_enter(life, ModelState.UNLOADING, now_s), attempt=effect.attempt, parked=False)
    return life, (effect,)


def _gone(life: Lifecycle, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = _enter(life, ModelState.COLD, now_s)
    if life.wanted == "ready":  # somebody asked again meanwhile
        life, effects = _start(life, now_s)
        return life, (NotifyGone(), *effects)
    return life, (NotifyGone(),)


def _start(life: Lifecycle, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(_enter(life, ModelState.LOADING, now_s), attempt=life.attempt + 1)
    return life, (StartLoad(life.attempt),)


def _enter(life: Lifecycle, state: ModelState, now_s: float, reason: str | None = None) -> Lifecycle:
    since_s = life.since_s if state is life.state else now_s
    return replace(life, state=state, since_s=since_s, reason=reason)
