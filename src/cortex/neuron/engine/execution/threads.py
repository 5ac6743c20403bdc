"""How many threads a decode step takes on a CPU.

A step of a small model is hundreds of operations of some microseconds each, and threads that share an operation wait
for each other at its end. On idle cores all of them are faster than one; where other programs run too, waiting for a
thread that is not running costs more than its help. Which it is changes from minute to minute, so it is measured on
the way.
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
_HOPELESS = 2.0
"""A try is over at once when a step of it takes so many times as long as usual."""


class ThreadChoice:
    """One thread or all, whichever the latest steps say is faster. Pure: seconds in, threads out.

    Now and then a few steps try the other number. Each try that loses doubles the pause before the next, so that where
    one of the two is plainly right, tries cost next to nothing.
    """

    def __init__(self, all_threads: int) -> None:
        self.threads = all_threads
        """What the next step takes."""
        self._chosen, self._other = all_threads, 1
        self._usual_s: deque[float] = deque(maxlen=_TRY_STEPS)
        self._tried_s: list[float] = []
        self._pause = _FIRST_TRY_AFTER
        self._steps_to_try = _FIRST_TRY_AFTER

    def took(self, seconds: float) -> None:
        """Tells how long the step on `threads` threads took, and decides about the next."""
        if self.threads == self._chosen:
            self._usual_s.append(seconds)
            self._steps_to_try -= 1
            if self._steps_to_try <= 0 and self._other != self._chosen:
                self.threads = self._other
            return
        self._tried_s.append(seconds)
        usual_s = sum(self._usual_s) / len(self._usual_s)
        if seconds > _HOPELESS * usual_s:
            self._end_try(won=False)
        elif len(self._tried_s) == _TRY_STEPS:
            self._end_try(won=sum(self._tried_s) / _TRY_STEPS < usual_s)

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
    """Runs decode steps on the threads chosen for as many rows. Belongs to the engine thread."""

    def __init__(self) -> None:
        all_threads = torch.get_num_threads()
        self._all_threads = all_threads
        self._choices: defaultdict[int, ThreadChoice] = defaultdict(lambda: ThreadChoice(all_threads))

    @contextmanager
    def decoding(self, rows: int) -> Iterator[None]:
        """Around one step of `rows` single tokens, the host's waiting for it included."""
        choice = self._choices[rows]
        torch.set_num_threads(choice.threads)
        start = time.perf_counter()
        try:
            yield
            choice.took(time.perf_counter() - start)
        finally:
            torch.set_num_threads(self._all_threads)
