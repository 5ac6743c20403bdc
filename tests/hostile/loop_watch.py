"""Measures how long an event loop is occupied by one callback, in CPU time: others on the host do not disturb it."""

from __future__ import annotations

import asyncio
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


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopWatch]:
    """Watches the callbacks of the loop that runs in this thread."""
    watch, thread, run = LoopWatch(), threading.get_ident(), asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        began_s = time.thread_time()
        run(handle)
        elapsed_s = time.thread_time() - began_s
        if elapsed_s > watch.worst_s and threading.get_ident() == thread:
            watch.worst_s, watch.what = elapsed_s, repr(handle)[:2000]

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.Handle, "_run", measured)
        yield watch


def unit_s() -> float:
    """CPU time of a fixed piece of work: decoding 64 KiB of small objects. It says how fast this host is."""
    body = b"[" + b",".join([b'{"a":[1,2]}'] * 5460) + b"]"

    def once() -> float:
        began_s = time.thread_time()
        msgspec.json.decode(body)
        return time.thread_time() - began_s

    return min(once() for _ in range(20))
