"""Tokens per second of a model, for people who watch it."""

from __future__ import annotations

from collections import deque


class Throughput:
    """Completion tokens per second over the last seconds in which the model generated.

    Counts as the log of requests does: without the first token of a request, and without the time before it. The rate
    of one request is the one that the log has of it; that of several is their sum.
    """

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, int]] = deque()
        """Seconds in which a request generated, and the tokens of all in them."""
        self._total_s = 0.0
        self._num_tokens = 0
        self._latest_s = float("-inf")
        self._since_s: float | None = None
        """The end of the latest sample, while a request generates."""

    def sample(self, now_s: float, num_tokens: int, *, is_generating: bool) -> None:
        """`num_tokens` have come since the last call. `is_generating`: a request has its first token and goes on."""
        if self._since_s is None and now_s - self._latest_s > self._window_s:
            self._samples.clear()
            self._total_s, self._num_tokens = 0.0, 0
        elapsed_s = 0.0 if self._since_s is None else now_s - self._since_s
        self._since_s = now_s if is_generating else None
        self._latest_s = now_s
        if self._samples and not elapsed_s:  # samples of no length never fill the window, so none would leave it
            latest_s, latest = self._samples[-1]
            self._samples[-1] = (latest_s, latest + num_tokens)
        else:
            self._samples.append((elapsed_s, num_tokens))
        self._total_s += elapsed_s
        self._num_tokens += num_tokens
        while self._total_s - self._samples[0][0] >= self._window_s:
            oldest_s, oldest = self._samples.popleft()
            self._total_s -= oldest_s
            self._num_tokens -= oldest

    def per_s(self, now_s: float) -> float:
        """0 when the latest sample is older than the window."""
        if self._total_s <= 0 or now_s - self._latest_s > self._window_s:
            return 0.0
        return round(self._num_tokens / self._total_s, 2)
