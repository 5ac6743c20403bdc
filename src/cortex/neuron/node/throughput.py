"""Tokens per second over the last seconds, from samples of a growing counter."""

from __future__ import annotations

from collections import deque


class Throughput:
    """Belongs to one loop."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()

    def sample(self, now_s: float, count: int) -> None:
        self._samples.append((now_s, count))
        # Keep one sample older than the window: the rate is measured from it.
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= self._window_s:
            self._samples.popleft()

    def per_s(self, now_s: float) -> float:
        """0 when the latest sample is older than the window."""
        if len(self._samples) < 2 or now_s - self._samples[-1][0] > self._window_s:
            return 0.0
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return round((last - first) / max(last_s - first_s, 0.001), 2)
