"""What the lifecycle of a model is told, and what it orders: plain values between `lifecycle.py` and the owner."""

from __future__ import annotations

from dataclasses import dataclass

# Inputs


@dataclass(frozen=True, slots=True)
class EnsureReady:
    """Somebody wants the model."""


@dataclass(frozen=True, slots=True)
class EnsureGone:
    """Somebody wants its memory back. Running requests get `drain_s`, or nothing when forced."""

    drain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EnsureAsleep:
    """Somebody wants its device memory back, but not its weights out of host memory, if there is room for them.

    Running requests get `drain_s`. A model that is not in memory stays so, and one on its way up is called off.
    """

    drain_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Downloading:
    """The bring-up fetches files from the hub."""

    attempt: int


@dataclass(frozen=True, slots=True)
class FilesReady:
    """The bring-up has the files and goes for the device."""

    attempt: int


@dataclass(frozen=True, slots=True)
class LoadSucceeded:
    attempt: int


@dataclass(frozen=True, slots=True)
class LoadingFailed:
    """`fault`: the worker was lost meanwhile, so that trying again makes sense."""

    attempt: int
    reason: str
    fault: bool = False


@dataclass(frozen=True, slots=True)
class WakingFailed:
    """It did not wake and sleeps as before. A model that was lost on the way is a `LoadingFailed` with `fault`."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class ModelLost:
    """The worker that held the model is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProducedTokens:
    """The model has produced tokens since it came up."""


@dataclass(frozen=True, slots=True)
class UnloadFinished:
    """Nothing of it is in memory any more."""

    attempt: int


@dataclass(frozen=True, slots=True)
class FellAsleep:
    """The take-down has left its weights in host memory."""

    attempt: int


Input = (
    EnsureReady
    | EnsureGone
    | EnsureAsleep
    | Downloading
    | FilesReady
    | LoadSucceeded
    | LoadingFailed
    | WakingFailed
    | ModelLost
    | ProducedTokens
    | UnloadFinished
    | FellAsleep
)


# Effects


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Resolve, check and load, after `delay_s`; ends in `LoadSucceeded` or `LoadingFailed`."""

    attempt: int
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StartWake:
    """Wake the sleeping model; ends in `LoadSucceeded`, `WakingFailed` or `LoadingFailed`. Cannot be cancelled."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AbortLoad:
    """Stop the bring-up; it still ends in `LoadSucceeded` or `LoadingFailed`."""


@dataclass(frozen=True, slots=True)
class StartUnload:
    """Drain and unload; ends in `UnloadFinished`, or with `park` in `FellAsleep` if there is room for the weights."""

    attempt: int
    drain_s: float = 0.0
    park: bool = False


@dataclass(frozen=True, slots=True)
class UnloadInstead:
    """The take-down under way ends in `UnloadFinished` after all."""


@dataclass(frozen=True, slots=True)
class ShortenDrain:
    """The take-down under way gets no more than `drain_s` from now."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class NotifyReady:
    """Those who wait for the model can have it."""


@dataclass(frozen=True, slots=True)
class NotifyFailed:
    """Those who wait for the model get `reason` instead."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotifyAsleep:
    """Those who wait for the device memory can have it."""


@dataclass(frozen=True, slots=True)
class NotifyGone:
    """Those who wait for the memory, on the device or all of it, can have it."""


Effect = (
    StartLoad
    | StartWake
    | AbortLoad
    | StartUnload
    | UnloadInstead
    | ShortenDrain
    | NotifyReady
    | NotifyFailed
    | NotifyAsleep
    | NotifyGone
)
