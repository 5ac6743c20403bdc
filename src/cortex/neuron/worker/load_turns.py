"""A load and the models that serve beside it take turns on the engine thread."""

from __future__ import annotations

import time
from typing import Protocol

PROGRESS_INTERVAL_S = 0.05


class EngineThread(Protocol):
    """The part of the executor that a load speaks to."""

    def load_progressed(self, handle: int, stage: str, done_bytes: int, total_bytes: int, *, tell: bool) -> None:
        """The load is alive; `tell` whether the daemon is to know how far it is."""

    def serve_during_load(self) -> None:
        """One turn for the models that serve."""


class LoadTurns:
    """The progress callback of one load: tells the daemon, and lets the serving models have their turn."""

    def __init__(self, thread: EngineThread, handle: int) -> None:
        self._thread = thread
        self._handle = handle
        self._stage: str | None = None
        self._told_at_s = 0.0
        self._resumed_at_s = time.monotonic()
        self._served_s = 0.0

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        tell = stage != self._stage or done_bytes >= total_bytes or now_s - self._told_at_s >= PROGRESS_INTERVAL_S
        if tell:
            self._stage, self._told_at_s = stage, now_s
        self._thread.load_progressed(self._handle, stage, done_bytes, total_bytes, tell=tell)
        if now_s - self._resumed_at_s >= self._served_s:
            self._thread.serve_during_load()
            self._resumed_at_s = time.monotonic()
            self._served_s = self._resumed_at_s - now_s
