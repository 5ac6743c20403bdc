"""Inputs and effects of a model's lifecycle: plain values between `lifecycle.py` and `controller.py`."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.wire.errors import CortexError

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
