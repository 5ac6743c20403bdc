"""How many threads a decode step uses on a CPU.

A step of a small model is hundreds of operations of some microseconds each, and threads that share an operation wait
for each other at its end. On idle cores, all threads are faster than one. If other programs run too, waiting for a
thread that is not running costs more than it saves. This changes from minute to minute, so it is measured
continuously.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRY_STEPS = 4
_FIRST_TRY_AFTER = 8
_LONGEST_PAUSE = 4096
_ABORT_RATIOS = (2.0, 1.3)
"""A try ends early if its first step, or the mean of its first steps, takes this many times as long as usual."""


class ThreadChoice:
    """One thread or all, whichever was faster in the latest steps. Pure: seconds in, threads out.

    From time to time a few steps try the other number. Each lost try doubles the pause before the next, so that tries
    cost almost nothing if one of the two is always faster.
    """

    def __init__(self, all_threads: int) -> None:
        self.threads = all_threads
        """How many threads the next step uses."""
        self._chosen, self._other = all_threads, 1
        self._usual_s: deque[float] = deque(maxlen=_TRY_STEPS)
        self._tried_s: list[float] = []
        self._pause = _FIRST_TRY_AFTER
        self._steps_to_try = _FIRST_TRY_AFTER

    def record(self, seconds: float) -> None:
        """Records how long the step on `threads` threads took, and decides about the next."""
        if self.threads == self._chosen:
            self._usual_s.append(seconds)
            self._steps_to_try -= 1
            if self._steps_to_try <= 0 and self._other != self._chosen:
                self.threads = self._other
            return
        self._tried_s.append(seconds)
        usual_s = sum(self._usual_s) / len(self._usual_s)
        tried_s = sum(self._tried_s) / len(self._tried_s)
        if tried_s > _ABORT_RATIOS[min(len(self._tried_s), len(_ABORT_RATIOS)) - 1] * usual_s:
            self._end_try(won=False)
        elif len(self._tried_s) == _TRY_STEPS:
            self._end_try(won=tried_s < usual_s)

    def _end_try(self, *, won: bool) -> None:
        if won:
            self._chosen, self._other = self._other, self._chosen
            self._usual_s.clear()
            self._usual_s.extend(self._tried_s)
        self._pause = _FIRST_TRY_AFTER if won else min(2 * self._pause, _LONGEST_PAUSE)
        self._steps_to_try = self._pause
        self._tried_s.clear()
        self.threads = self._chosen


class StepThreads:
    """Runs decode steps on the threads chosen for their number of rows. Belongs to the engine thread."""

    def __init__(self) -> None:
        all_threads = torch.get_num_threads()
        self._all_threads = all_threads
        self._choices: defaultdict[int, ThreadChoice] = defaultdict(lambda: ThreadChoice(all_threads))

    @contextmanager
    def decoding(self, rows: int) -> Iterator[None]:
        """Wraps one step of `rows` single tokens, including the wait for its result."""
        choice = self._choices[rows]
        torch.set_num_threads(choice.threads)
        start = time.perf_counter()
        try:
            yield
            choice.record(time.perf_counter() - start)
        finally:
            torch.set_num_threads(self._all_threads)
