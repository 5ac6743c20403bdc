"""The life of one model on this node, as a pure function: state and input in, state and effects out.

The owner (`owner.py`) feeds it one input at a time and carries out what it says. At most one bring-up or
take-down is under way; each has a number, and what an older one still reports is ignored. Whatever
happens, everyone who waits is told at the next resting state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from cortex.neuron.device.backoff import BackoffPolicy, FaultHistory
from cortex.wire.node import ModelState


@dataclass(frozen=True, slots=True)
class Lifecycle:
    state: ModelState = ModelState.COLD
    wanted: Literal["ready", "gone"] = "gone"
    attempt: int = 0
    """The number of the latest bring-up or take-down."""
    since_s: float = 0.0
    """When `state` began."""
    reason: str | None = None
    """Why it is failed or recovering."""
    faults: FaultHistory = field(default_factory=FaultHistory)


# Inputs


@dataclass(frozen=True, slots=True)
class EnsureReady:
    """Somebody wants the model."""


@dataclass(frozen=True, slots=True)
class EnsureGone:
    """Somebody wants its memory back. Running requests get `drain_s`, or nothing when forced."""

    drain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Downloading:
    """The bring-up fetches files from the hub."""

    attempt: int


@dataclass(frozen=True, slots=True)
class FilesAtHand:
    """The bring-up has the files and goes for the device."""

    attempt: int


@dataclass(frozen=True, slots=True)
class BroughtUp:
    attempt: int


@dataclass(frozen=True, slots=True)
class BringUpFailed:
    """`fault`: the worker was lost meanwhile, so that trying again makes sense."""

    attempt: int
    reason: str
    fault: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker that held the model is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Proved:
    """The model has produced tokens since it came up."""


@dataclass(frozen=True, slots=True)
class TookDown:
    attempt: int


Input = EnsureReady | EnsureGone | Downloading | FilesAtHand | BroughtUp | BringUpFailed | Lost | Proved | TookDown


# Effects


@dataclass(frozen=True, slots=True)
class BringUp:
    """Resolve, check and load, after `delay_s`; ends in `BroughtUp` or `BringUpFailed`."""

    attempt: int
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CallOff:
    """Stop the bring-up; it still ends in `BroughtUp` or `BringUpFailed`."""


@dataclass(frozen=True, slots=True)
class TakeDown:
    """Drain and unload; ends in `TookDown`, always."""

    attempt: int
    drain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HurryDrain:
    """The take-down under way gets no more than `drain_s` from now."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class WakeReady:
    """Those who wait for the model can have it."""


@dataclass(frozen=True, slots=True)
class FailReady:
    """Those who wait for the model get `reason` instead."""

    reason: str


@dataclass(frozen=True, slots=True)
class WakeGone:
    """Those who wait for the memory can have it."""


Effect = BringUp | CallOff | TakeDown | HurryDrain | WakeReady | FailReady | WakeGone

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
        case Downloading(attempt) if attempt == life.attempt and life.state is ModelState.LOADING:
            return _enter(life, ModelState.DOWNLOADING, now_s), ()
        case FilesAtHand(attempt) if attempt == life.attempt and life.state is ModelState.DOWNLOADING:
            return _enter(life, ModelState.LOADING, now_s), ()
        case BroughtUp(attempt) if attempt == life.attempt:
            return _brought_up(life, now_s)
        case BringUpFailed(attempt) if attempt == life.attempt:
            return _bring_up_failed(life, happened, now_s, policy)
        case Lost() if life.state is ModelState.READY:
            return _recover(life, happened.reason, now_s, policy)
        case Proved():
            return replace(life, faults=life.faults.proved()), ()
        case TookDown(attempt) if attempt == life.attempt and life.state is ModelState.UNLOADING:
            return _gone(life, now_s)
        case _:
            return life, ()  # from an attempt that is over


def _ensure_ready(life: Lifecycle, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(life, wanted="ready")
    if life.state is ModelState.READY:
        return life, (WakeReady(),)
    if life.state in _AT_REST:
        # Asked for anew, an earlier failure is forgotten.
        return _start(replace(life, faults=FaultHistory()), now_s)
    return life, ()


def _ensure_gone(life: Lifecycle, wish: EnsureGone, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(life, wanted="gone")
    if life.state in _AT_REST:
        return _enter(life, ModelState.COLD, now_s), (WakeGone(),)
    if life.state in _COMING_UP:
        return _enter(life, ModelState.UNLOADING, now_s), (FailReady(_CALLED_OFF), CallOff())
    if life.state is ModelState.UNLOADING:
        return life, (FailReady(_CALLED_OFF), HurryDrain(wish.drain_s))
    life = replace(_enter(life, ModelState.UNLOADING, now_s), attempt=life.attempt + 1)
    return life, (TakeDown(life.attempt, wish.drain_s),)


def _brought_up(life: Lifecycle, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    if life.state in _COMING_UP:
        return _enter(life, ModelState.READY, now_s), (WakeReady(),)
    if life.state is ModelState.UNLOADING:  # called off too late
        life = replace(life, attempt=life.attempt + 1)
        return life, (TakeDown(life.attempt),)
    return life, ()


def _bring_up_failed(
    life: Lifecycle, failed: BringUpFailed, now_s: float, policy: BackoffPolicy
) -> tuple[Lifecycle, tuple[Effect, ...]]:
    if life.state is ModelState.UNLOADING:  # called off, or it would have failed anyway
        return _gone(life, now_s)
    if life.state not in _COMING_UP:
        return life, ()
    if failed.fault or life.state is ModelState.RECOVERING:
        return _recover(life, failed.reason, now_s, policy)
    return _enter(life, ModelState.FAILED, now_s, failed.reason), (FailReady(failed.reason),)


def _recover(life: Lifecycle, reason: str, now_s: float, policy: BackoffPolicy) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(life, faults=life.faults.faulted(now_s, policy))
    delay_s = life.faults.delay_s(policy)
    if delay_s is None:
        reason = f"given up after {life.faults.streak} faults in a row; the last one: {reason}"
        return _enter(life, ModelState.FAILED, now_s, reason), (FailReady(reason),)
    life = replace(_enter(life, ModelState.RECOVERING, now_s, reason), attempt=life.attempt + 1)
    return life, (BringUp(life.attempt, delay_s),)


def _gone(life: Lifecycle, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = _enter(life, ModelState.COLD, now_s)
    if life.wanted == "ready":  # somebody asked again meanwhile
        life, effects = _start(life, now_s)
        return life, (WakeGone(), *effects)
    return life, (WakeGone(),)


def _start(life: Lifecycle, now_s: float) -> tuple[Lifecycle, tuple[Effect, ...]]:
    life = replace(_enter(life, ModelState.LOADING, now_s), attempt=life.attempt + 1)
    return life, (BringUp(life.attempt),)


def _enter(life: Lifecycle, state: ModelState, now_s: float, reason: str | None = None) -> Lifecycle:
    since_s = life.since_s if state is life.state else now_s
    return replace(life, state=state, since_s=since_s, reason=reason)
