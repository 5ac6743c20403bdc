"""Warnings about what clients can cause as often as they like."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

INTERVAL_S = 10.0


class ThrottledLog:
    """Logs one warning of each kind per interval, with the number of those that it left out since the last one."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}
        """When each kind was logged last, and how often it occurred since."""

    def warning(self, kind: str, message: str) -> None:
        """`kind` is one of a few constants, never something that a client sent."""
        now = self._clock()
        logged_at, num_left_out = self._logged.get(kind, (-INTERVAL_S, 0))
        if now - logged_at < INTERVAL_S:
            self._logged[kind] = logged_at, num_left_out + 1
            return
        self._logged[kind] = now, 0
        self._log.warning("%s%s", message, f" ({num_left_out} more since the last line)" if num_left_out else "")
