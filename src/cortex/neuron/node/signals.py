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
class WakeFailed:
    """It did not wake and sleeps as before. A model that was lost on the way is a `BringUpFailed` with `fault`."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker that held the model is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Proved:
    """The model has produced tokens since it came up."""


@dataclass(frozen=True, slots=True)
class TookDown:
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
    | FilesAtHand
    | BroughtUp
    | BringUpFailed
    | WakeFailed
    | Lost
    | Proved
    | TookDown
    | FellAsleep
)


# Effects


@dataclass(frozen=True, slots=True)
class BringUp:
    """Resolve, check and load, after `delay_s`; ends in `BroughtUp` or `BringUpFailed`."""

    attempt: int
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wake:
    """Bring the sleeping model back; ends in `BroughtUp`, `WakeFailed` or `BringUpFailed`. Cannot be called off."""

    attempt: int


@dataclass(frozen=True, slots=True)
class CallOff:
    """Stop the bring-up; it still ends in `BroughtUp` or `BringUpFailed`."""


@dataclass(frozen=True, slots=True)
class TakeDown:
    """Drain and unload; ends in `TookDown`, or with `park` in `FellAsleep` where there is room for the weights."""

    attempt: int
    drain_s: float = 0.0
    park: bool = False


@dataclass(frozen=True, slots=True)
class ForgoParking:
    """The take-down under way ends in `TookDown` after all."""


@dataclass(frozen=True, slots=True)
class HurryDrain:
    """The take-down under way gets no more than `drain_s` from now."""

    drain_s: float


@dataclass(frozen=True, slots=True)
class TellReady:
    """Those who wait for the model can have it."""


@dataclass(frozen=True, slots=True)
class FailReady:
    """Those who wait for the model get `reason` instead."""

    reason: str


@dataclass(frozen=True, slots=True)
class TellAsleep:
    """Those who wait for the device memory can have it."""


@dataclass(frozen=True, slots=True)
class TellGone:
    """Those who wait for the memory, on the device or all of it, can have it."""


Effect = BringUp | Wake | CallOff | TakeDown | ForgoParking | HurryDrain | TellReady | FailReady | TellAsleep | TellGone
