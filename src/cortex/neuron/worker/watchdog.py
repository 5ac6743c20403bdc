"""Is a worker stuck? Judged by progress while work is pending, never by whether it answers a ping."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.neuron.worker.protocol import Activity


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a worker may take. The first four: without progress, by activity; a load progresses piece by piece."""

    start_s: float = 120.0
    step_s: float = 120.0
    load_s: float = 300.0
    unload_s: float = 30.0
    reclaim_s: float = 5.0
    """How long an unloaded model's memory may take to come back."""
    exit_s: float = 3.0
    """How long a worker that was told to leave may take."""

    def for_activity(self, activity: Activity) -> float:
        if activity == "start":
            return self.start_s
        if activity == "load":
            return self.load_s
        if activity == "unload":
            return self.unload_s
        return self.step_s


@dataclass(frozen=True, slots=True)
class ProgressWatch:
    """What the watchdog last saw of a worker, and since when nothing has moved."""

    activity: Activity
    progress: int
    since_s: float

    @classmethod
    def begin(cls, now_s: float) -> ProgressWatch:
        return cls("start", -1, now_s)

    def reported(self, activity: Activity, progress: int, now_s: float) -> ProgressWatch:
        """After a report. Only a change of progress restarts the clock; a change of activity does not."""
        since_s = now_s if progress != self.progress else self.since_s
        return ProgressWatch(activity, progress, since_s)

    def at_rest(self, now_s: float) -> ProgressWatch:
        """Nothing is pending: silence is fine."""
        return ProgressWatch(self.activity, self.progress, now_s)

    def verdict(self, now_s: float, patience: Patience) -> str | None:
        """Why the worker must be replaced, or None while it may go on."""
        limit_s = patience.for_activity(self.activity)
        silent_s = now_s - self.since_s
        if silent_s < limit_s:
            return None
        return f"no progress in '{self.activity}' for {silent_s:.0f} s with work pending (limit {limit_s:.0f} s)"
