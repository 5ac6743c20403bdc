"""What servers have taken: a quantile of their latest starts and runs.

One run may have been unusual. Its size is one of several samples, and none counts for ever: otherwise a single peak
would keep a model out of memory in which it has run before.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

_QUANTILE = 0.75
_MAX_SAMPLES = 16
MAX_AGE_S = 30 * 86400.0


def quantile(sizes: Iterable[int], share: float = _QUANTILE) -> int:
    """The smallest of the sizes that at least this share of them does not exceed; 0 without any."""
    ordered = sorted(sizes)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0


class _Samples:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all: deque[tuple[float, int]] = deque(maxlen=_MAX_SAMPLES)
        """When, and the bytes."""

    def add(self, num_bytes: int) -> None:
        self._all.append((self._clock(), num_bytes))

    @property
    def size(self) -> int:
        oldest = self._clock() - MAX_AGE_S
        return quantile(num_bytes for at, num_bytes in self._all if at >= oldest)


class ServerSizes:
    """By model id. Belongs to the daemon's loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._starts: dict[str, _Samples] = {}
        self._runs: dict[str, _Samples] = {}

    def note_start(self, model_id: str, num_bytes: int) -> None:
        """What a server held when it was ready."""
        self._starts.setdefault(model_id, _Samples(self._clock)).add(num_bytes)

    def note_run(self, model_id: str, num_bytes: int) -> None:
        """What it held for most of the time until its end."""
        self._runs.setdefault(model_id, _Samples(self._clock)).add(num_bytes)

    def start_bytes(self, model_id: str) -> int:
        """With which it can start; 0: unknown."""
        samples = self._starts.get(model_id)
        return 0 if samples is None else samples.size

    def run_bytes(self, model_id: str) -> int:
        """What it takes as it serves; 0: unknown."""
        samples = self._runs.get(model_id)
        return 0 if samples is None else samples.size

    def forget(self, model_id: str) -> None:
        self._starts.pop(model_id, None)
        self._runs.pop(model_id, None)

    @property
    def basis(self) -> object:
        """Changes with every size."""
        return tuple(
            (model_id, samples.size) for each in (self._starts, self._runs) for model_id, samples in each.items()
        )


class ServerSize(Protocol):
    """How the host of one server reports what it holds."""

    def started(self, num_bytes: int) -> int:
        """It is ready. Returns the size that the model counts as."""

    def holds(self, num_bytes: int) -> int:
        """The same for what it holds later."""

    def ran(self, num_bytes: int) -> None:
        """It has ended, and held this for most of the time."""
