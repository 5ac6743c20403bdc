"""The progress of a load: stages in order, bytes that never decrease, and an estimate of the time left."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cortex.wire.node.protocol import Progress

STAGES = ("resolve", "download", "read", "place", "compile", "warm")
_STAGE_OF = {"compile": "place"}
"""Stages that are reported as part of another."""
_MIN_SAMPLE_S = 0.5
"""Minimum time for a meaningful rate."""


@dataclass(frozen=True, slots=True)
class LoadProgressTracker:
    """Replaced with each report. Stages only advance; within a stage, bytes only grow."""

    stage: str
    since_s: float
    """When the stage began."""
    now_s: float
    done_bytes: int = 0
    total_bytes: int = 0
    waits_for: str | None = None
    """Why it does not advance."""

    @classmethod
    def begin(cls, now_s: float) -> LoadProgressTracker:
        return cls("resolve", now_s, now_s)

    def advanced(self, stage: str, done_bytes: int, total_bytes: int, now_s: float) -> LoadProgressTracker:
        """The progress after a report. A report that would go backwards only updates the clock."""
        if stage not in STAGES or STAGES.index(stage) < STAGES.index(self.stage):
            return replace(self, now_s=now_s)
        if stage != self.stage:
            return LoadProgressTracker(stage, now_s, now_s, done_bytes, total_bytes)
        total_bytes = max(self.total_bytes, total_bytes)
        done_bytes = max(self.done_bytes, min(done_bytes, total_bytes))
        return replace(self, done_bytes=done_bytes, total_bytes=total_bytes, now_s=now_s)

    def waiting(self, reason: str | None, now_s: float) -> LoadProgressTracker:
        """The progress while the load waits for something; None when it no longer waits."""
        return replace(self, waits_for=reason, now_s=now_s)

    def snapshot(self) -> Progress:
        """The progress as the API reports it."""
        whole = _STAGE_OF.get(self.stage)
        return Progress(
            stage=whole or self.stage,
            substage=self.stage if whole else None,
            done_bytes=self.done_bytes,
            total_bytes=self.total_bytes,
            eta_s=self._eta_s(),
            waits_for=self.waits_for,
        )

    def _eta_s(self) -> float | None:
        elapsed_s = self.now_s - self.since_s
        if elapsed_s < _MIN_SAMPLE_S or not 0 < self.done_bytes <= self.total_bytes:
            return None
        return round((self.total_bytes - self.done_bytes) * elapsed_s / self.done_bytes, 1)
