"""The lifecycle of one model on this node, as a pure function: state and input in, state and effects out.

`controller.py` feeds it one input at a time and carries out the effects. At most one load, wake or unload is in
progress. Each is an attempt with a number, and inputs from older attempts are ignored. Every waiting caller is
notified at the next stable state: ready, failed, asleep or cold. A model that falls asleep is `unloading` on the way,
and one that wakes is `loading`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from cortex.neuron.worker.backoff import BackoffPolicy, FaultHistory
from cortex.wire.errors import CortexError, LoadFailed, UnloadedWhileLoading
from cortex.wire.node.protocol import ModelState

# Inputs


@dataclass(frozen=True, slots=True)
class EnsureReady:
    """A caller wants the model to serve."""


@dataclass(frozen=True, slots=True)
class EnsureGone:
    """A caller wants all of the model's memory back. Running requests get `drain_s` to finish."""

    drain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EnsureAsleep:
    """A caller wants the model's device memory back; its weights stay in host memory if there is room for them.

    Running requests get `drain_s` to finish. A cold model stays cold, and a load in progress is cancelled.
    """

    drain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DownloadStarted:
    attempt: int


@dataclass(frozen=True, slots=True)
class FilesReady:
    """All files are on disk; the load continues on the device."""

    attempt: int


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load or a wake ended: the model serves, or `error` says why not.

    `worker_lost`: nothing of the model is left and another attempt may succeed. Without it, a model that failed to
    wake is asleep as before; `has_room_elsewhere`: on other devices it could be loaded.
    """

    attempt: int
    error: CortexError | None = None
    worker_lost: bool = False
    has_room_elsewhere: bool = False
    restarts: bool = True
    """As of `ModelLost`."""


@dataclass(frozen=True, slots=True)
class ModelLost:
    """The worker that held the model is gone."""

    reason: str
    restarts: bool = True
    """Whether the model is reloaded without a request."""


@dataclass(frozen=True, slots=True)
class ProducedTokens:
    """The model has produced its first tokens since it was loaded."""


@dataclass(frozen=True, slots=True)
class UnloadEnded:
    """An unload ended: the weights are in host memory (`asleep`), or nothing of the model is left."""

    attempt: int
    asleep: bool = False


Input = (
    EnsureReady
    | EnsureGone
    | EnsureAsleep
    | DownloadStarted
    | FilesReady
    | LoadEnded
    | ModelLost
    | ProducedTokens
    | UnloadEnded
)


# Effects


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Load the model after `delay_s`; ends in `LoadEnded`."""

    attempt: int
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StartWake:
    """Wake the sleeping model; ends in `LoadEnded`. Cannot be cancelled."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StopLoad:
    """Cancel the load in progress, which still ends in `LoadEnded`."""


@dataclass(frozen=True, slots=True)
class StartUnload:
    """Drain and unload; ends in `UnloadEnded`. With `to_sleep` the weights stay in host memory if there is room."""

    attempt: int
    drain_s: float = 0.0
    to_sleep: bool = False


@dataclass(frozen=True, slots=True)
class UnloadInstead:
    """The unload in progress must not end in sleep."""


@dataclass(frozen=True, slots=True)
class ShortenDrain:
    """The unload in progress drains for at most `drain_s` from now."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class NotifyReady:
    """Release the callers that wait for the model."""


@dataclass(frozen=True, slots=True)
class NotifyFailed:
    """Raise `error` in the callers that wait for the model."""

    error: CortexError


@dataclass(frozen=True, slots=True)
class NotifyAsleep:
    """Release the callers that wait for the device memory."""


@dataclass(frozen=True, slots=True)
class NotifyGone:
    """Release the callers that wait for the device memory or for all memory."""


Effect = (
    StartLoad
    | StartWake
    | StopLoad
    | StartUnload
    | UnloadInstead
    | ShortenDrain
    | NotifyReady
    | NotifyFailed
    | NotifyAsleep
    | NotifyGone
)


# The state

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


Transition = tuple[Lifecycle, tuple[Effect, ...]]

_LOADING = frozenset({ModelState.DOWNLOADING, ModelState.LOADING, ModelState.RECOVERING})
_NOT_IN_MEMORY = frozenset({ModelState.COLD, ModelState.FAILED})


def transition(life: Lifecycle, happened: Input, now_s: float, policy: BackoffPolicy) -> Transition:
    """The lifecycle after `happened`, and the effects to carry out."""
    match happened:
        case EnsureReady():
            return _ensure_ready(life, now_s)
        case EnsureGone():
            return _ensure_gone(life, happened, now_s)
        case EnsureAsleep():
            return _ensure_asleep(life, happened, now_s)
        case DownloadStarted(attempt) if attempt == life.attempt and life.state is ModelState.LOADING:
            return _enter(life, ModelState.DOWNLOADING, now_s), ()
        case FilesReady(attempt) if attempt == life.attempt and life.state is ModelState.DOWNLOADING:
            return _enter(life, ModelState.LOADING, now_s), ()
        case LoadEnded(attempt, None) if attempt == life.attempt:
            return _load_succeeded(life, now_s)
        case LoadEnded(attempt, error, worker_lost) if attempt == life.attempt and error is not None:
            if life.weights_in_host and not worker_lost:
                return _wake_failed(life, error, now_s, has_room_elsewhere=happened.has_room_elsewhere)
            return _load_failed(life, error, worker_lost and happened.restarts, now_s, policy)
        case ModelLost(reason, restarts=False) if life.state is ModelState.READY:
            return _enter(replace(life, wanted="gone"), ModelState.COLD, now_s, reason), ()
        case ModelLost(reason) if life.state is ModelState.READY:
            return _recover(life, reason, now_s, policy)
        case ModelLost(reason) if life.state is ModelState.ASLEEP:
            # It served no request, so it need not recover: the next request loads it.
            reason = f"its weights were lost while it slept: {reason}"
            return _enter(replace(life, weights_in_host=False), ModelState.COLD, now_s, reason), ()
        case ProducedTokens():
            return replace(life, faults=life.faults.proved()), ()
        case UnloadEnded(attempt, asleep) if attempt == life.attempt and life.state is ModelState.UNLOADING:
            return _fell_asleep(life, now_s) if asleep else _gone(life, now_s)
        case _:
            return life, ()  # from an older attempt


def _ensure_ready(life: Lifecycle, now_s: float) -> Transition:
    life = replace(life, wanted="ready")
    if life.state is ModelState.READY:
        return life, (NotifyReady(),)
    if life.state is ModelState.ASLEEP:
        return _wake(life, now_s)
    if life.state in _NOT_IN_MEMORY:
        return _start_load(replace(life, faults=FaultHistory()), now_s)
    return life, ()


def _ensure_gone(life: Lifecycle, wish: EnsureGone, now_s: float) -> Transition:
    life = replace(life, wanted="gone")
    if life.state in _NOT_IN_MEMORY:
        return _enter(life, ModelState.COLD, now_s), (NotifyGone(),)
    if life.state in _LOADING:
        return _cancel_load(life, now_s)
    if life.state is ModelState.UNLOADING:
        return life, (_load_cancelled(), UnloadInstead(), ShortenDrain(wish.drain_s))
    return _start_unload(life, StartUnload(life.attempt + 1, wish.drain_s), now_s)


def _ensure_asleep(life: Lifecycle, wish: EnsureAsleep, now_s: float) -> Transition:
    if life.state is ModelState.ASLEEP:
        return life, (NotifyAsleep(),)
    if life.state in _NOT_IN_MEMORY:
        return _ensure_gone(life, EnsureGone(), now_s)
    life = replace(life, wanted="gone")
    if life.state in _LOADING:
        return _cancel_load(life, now_s)
    if life.state is ModelState.UNLOADING:
        return life, (_load_cancelled(), ShortenDrain(wish.drain_s))
    return _start_unload(life, StartUnload(life.attempt + 1, wish.drain_s, to_sleep=True), now_s)


def _cancel_load(life: Lifecycle, now_s: float) -> Transition:
    """A wake is short and cannot be cancelled; the model is unloaded afterwards."""
    effects: tuple[Effect, ...] = (_load_cancelled(),) if life.weights_in_host else (_load_cancelled(), StopLoad())
    return _enter(life, ModelState.UNLOADING, now_s), effects


def _load_succeeded(life: Lifecycle, now_s: float) -> Transition:
    life = replace(life, weights_in_host=False)
    if life.state in _LOADING:
        return _enter(life, ModelState.READY, now_s), (NotifyReady(),)
    if life.state is ModelState.UNLOADING:  # cancelled too late
        return _start_unload(life, StartUnload(life.attempt + 1), now_s)
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
        return _start_unload(life, StartUnload(life.attempt + 1), now_s)
    return _enter(replace(life, wanted="gone"), ModelState.ASLEEP, now_s), (NotifyFailed(error),)


def _fell_asleep(life: Lifecycle, now_s: float) -> Transition:
    life = _enter(replace(life, weights_in_host=True), ModelState.ASLEEP, now_s)
    if life.wanted == "ready":  # a caller wants it again
        life, effects = _wake(life, now_s)
        return life, (NotifyAsleep(), *effects)
    return life, (NotifyAsleep(),)


def _gone(life: Lifecycle, now_s: float) -> Transition:
    life = _enter(life, ModelState.COLD, now_s)
    if life.wanted == "ready":  # a caller wants it again
        life, effects = _start_load(life, now_s)
        return life, (NotifyGone(), *effects)
    return life, (NotifyGone(),)


def _recover(life: Lifecycle, reason: str, now_s: float, policy: BackoffPolicy) -> Transition:
    life = replace(life, faults=life.faults.faulted(now_s, policy))
    delay_s = life.faults.delay_s(policy)
    if delay_s is None:
        num_faults = len(life.faults.times_s)
        return _fail(life, LoadFailed(f"gave up after {num_faults} faults; the latest: {reason}"), now_s)
    life = replace(_enter(life, ModelState.RECOVERING, now_s, reason), attempt=life.attempt + 1)
    return life, (StartLoad(life.attempt, delay_s),)


def _fail(life: Lifecycle, error: CortexError, now_s: float) -> Transition:
    return replace(_enter(life, ModelState.FAILED, now_s, error.message), error=error), (NotifyFailed(error),)


def _start_load(life: Lifecycle, now_s: float) -> Transition:
    life = replace(_enter(life, ModelState.LOADING, now_s), attempt=life.attempt + 1)
    return life, (StartLoad(life.attempt),)


def _wake(life: Lifecycle, now_s: float) -> Transition:
    life = replace(_enter(life, ModelState.LOADING, now_s), attempt=life.attempt + 1)
    return life, (StartWake(life.attempt),)


def _start_unload(life: Lifecycle, effect: StartUnload, now_s: float) -> Transition:
    life = replace(_enter(life, ModelState.UNLOADING, now_s), attempt=effect.attempt, weights_in_host=False)
    return life, (effect,)


def _enter(life: Lifecycle, state: ModelState, now_s: float, reason: str | None = None) -> Lifecycle:
    since_s = life.since_s if state is life.state else now_s
    return replace(life, state=state, since_s=since_s, reason=reason, error=None)


def _load_cancelled() -> NotifyFailed:
    return NotifyFailed(UnloadedWhileLoading("the model was unloaded while it was being loaded; load it again"))
