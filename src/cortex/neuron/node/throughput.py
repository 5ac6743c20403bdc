"""Tokens per second of a model, for people who watch it."""

from __future__ import annotations

from collections import deque


class Throughput:
    """Tokens per second over the last seconds in which the model had requests, from samples of a growing counter."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()
        self._idle_s: float | None = None
        """When it was last seen idle, if it was so at the latest sample."""

    def sample(self, now_s: float, count: int, *, is_idle: bool) -> None:
        """`is_idle`: no request runs. Idle time is not part of the rate: a short stream has the speed of a long one."""
        if is_idle and self._samples and self._samples[-1][1] == count:
            self._idle_s = now_s
            return
        if self._idle_s is not None:
            before = self._samples[-1][1]
            self._samples.clear()
            self._samples.append((self._idle_s, before))
            self._idle_s = None
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
