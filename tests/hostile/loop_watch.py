"""Measures how long an event loop is occupied by one callback, in CPU time: others on the host do not disturb it.

Work that a loop gives to a thread delays it too, where it holds the interpreter lock. It is measured as well.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import pytest


@dataclass
class LoopWatch:
    worst_s: float = 0.0
    """CPU time of the longest callback."""
    what: str = ""
    """That callback."""
    threads_s: float = 0.0
    """CPU time that threads of the loop's executor took."""


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopWatch]:
    """Watches the callbacks of the loop that runs in this thread."""
    watch, thread, run = LoopWatch(), threading.get_ident(), asyncio.Handle._run  # noqa: SLF001 - asyncio has no hook

    def measured(handle: asyncio.Handle) -> None:
        began_s = time.thread_time()
        run(handle)
        elapsed_s = time.thread_time() - began_s
        if elapsed_s > watch.worst_s and threading.get_ident() == thread:
            watch.worst_s, watch.what = elapsed_s, repr(handle)[:2000]

    before_s = _executor_s()
    gc.disable()  # a collection visits what all tests before have left, in whichever callback it comes
    try:
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.Handle, "_run", measured)
            yield watch
    finally:
        gc.enable()
    watch.threads_s = sum(cpu_s - before_s.get(id, 0.0) for id, cpu_s in _executor_s().items())


def _executor_s() -> dict[int, float]:
    """CPU time of each thread that a loop may give work to."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("asyncio_")]
    return {
        thread.ident: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        for thread in threads
        if thread.ident is not None
    }


class Unit:
    """A fixed piece of work, decoding 64 KiB of small objects: its CPU time says how fast this host is."""

    def __init__(self) -> None:
        self._body = b"[" + b",".join([b'{"a":[1,2]}'] * 5460) + b"]"
        self._fastest_s = self._measure_s()

    def count(self, elapsed_s: float, limit: float) -> float:
        """How many units `elapsed_s` is: as fast as the host has been, or, beyond the limit, as fast as it is now."""
        if elapsed_s > limit * self._fastest_s:
            return elapsed_s / self._measure_s()
        return elapsed_s / self._fastest_s

    def _measure_s(self) -> float:
        return min(self._once_s() for _ in range(20))

    def _once_s(self) -> float:
        began_s = time.thread_time()
        msgspec.json.decode(self._body)
        return time.thread_time() - began_s
