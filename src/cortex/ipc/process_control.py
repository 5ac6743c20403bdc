"""What a worker asks of the operating system's kernel; nothing where there is no such call."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent_id: int) -> None:
    """Asks for SIGKILL when the parent of this process dies; ends it at once where `parent_id` is gone already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_id:
        os._exit(0)


def name_thread(name: str) -> None:
    """Lets `top -H` and debuggers show the calling thread under the name Python knows it by."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, argument: int | bytes) -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(option, argument)
