"""Decides when to retry something that keeps failing, and when to stop. Pure: the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """The first retry is immediate; each later one doubles the delay.

    There are no more retries after more than `max_streak` faults in a row without useful work between them, or more
    than `max_faults` within `window_s` even with useful work between them.
    """

    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    max_streak: int = 5
    max_faults: int = 40
    window_s: float = 600.0


@dataclass(frozen=True, slots=True)
class FaultHistory:
    """The faults so far. Immutable."""

    streak: int = 0
    """Faults since the last useful work."""
    times_s: tuple[float, ...] = ()

    def faulted(self, now_s: float, policy: BackoffPolicy) -> FaultHistory:
        recent = tuple(at_s for at_s in self.times_s if now_s - at_s < policy.window_s)
        return FaultHistory(self.streak + 1, (*recent, now_s))

    def proved(self) -> FaultHistory:
        """The history after useful work: the streak ends, the count in the window stays."""
        return replace(self, streak=0)

    def delay_s(self, policy: BackoffPolicy) -> float | None:
        """Delay before the next retry; None: do not retry."""
        if self.streak > policy.max_streak or len(self.times_s) > policy.max_faults:
            return None
        if self.streak <= 1:
            return 0.0
        return min(policy.first_delay_s * 2.0 ** (self.streak - 2), policy.max_delay_s)
