"""How often a thing that keeps failing is tried again, and when to stop. Pure: the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """The first retry is immediate; the next ones double their delay.

    Two ways to be given up: `max_streak` faults in a row with no sign of life between them (it can never
    work), or `max_faults` within `window_s` even with signs of life (it works, but something keeps killing it).
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_streak: int = 5
    max_faults: int = 40
    window_s: float = 600.0


@dataclass(frozen=True, slots=True)
class FaultHistory:
    """The faults of one thing. Replaced, never changed."""

    streak: int = 0
    """Faults since it last did something useful."""
    times_s: tuple[float, ...] = ()

    def faulted(self, now_s: float, policy: BackoffPolicy) -> FaultHistory:
        recent = tuple(at_s for at_s in self.times_s if now_s - at_s < policy.window_s)
        return FaultHistory(self.streak + 1, (*recent, now_s))

    def proved(self) -> FaultHistory:
        """It did something useful: the streak is over, the count in the window stays."""
        return replace(self, streak=0)

    def delay_s(self, policy: BackoffPolicy) -> float | None:
        """How long to wait before the next try after the latest fault; None: give up."""
        if self.streak > policy.max_streak or len(self.times_s) > policy.max_faults:
            return None
        if self.streak <= 1:
            return 0.0
        return min(policy.first_delay_s * 2.0 ** (self.streak - 2), policy.max_delay_s)
