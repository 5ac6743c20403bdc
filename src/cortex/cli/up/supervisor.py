"""Programs that live and die together: started as children, watched, and ended within a bound.

Each child leads its own process group, so that Ctrl-C reaches only us and we decide the order of things; and each
is told by the kernel when we die, so that even `kill -9` on us leaves no process behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path | None
    """Where its output goes; None: wherever ours goes."""

    def last_words(self, count: int = 1) -> list[str]:
        """The last lines it logged that say something."""
        if self.log is None:
            return []
        with self.log.open(encoding="utf-8", errors="replace") as file:
            return list(deque((line.rstrip() for line in file if line.strip()), maxlen=count))


class ChildDied(Exception):
    """A child ended by itself while it should have been running."""

    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.name} ended with {child.process.returncode}")
        self.child = child


class ProcessSupervisor:
    """Owns its children; use as a context manager on the main thread.

    Inside the block SIGINT, SIGTERM and SIGHUP only set `stopping`; leaving it, for whatever reason, ends every
    child: SIGTERM, then after `grace_s` (or a second signal) SIGKILL to its whole group.
    """

    def __init__(self, grace_s: float) -> None:
        self.children: list[Child] = []
        self.stopping = False
        self._impatient = False
        self._grace_s = grace_s
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_failure: object) -> None:
        self._end_all()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def start(self, name: str, command: Sequence[str], log: Path | None, environment: Mapping[str, str]) -> Child:
        """Run `command` with its output in `log`, or where ours goes."""
        with contextlib.nullcontext() if log is None else log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                process_group=0,
                preexec_fn=_die_with_parent(os.getpid()),
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def check(self) -> None:
        """Raises `ChildDied` for the first child that is gone."""
        for child in self.children:
            if child.process.poll() is not None:
                raise ChildDied(child)

    def wait(self, seconds: float) -> bool:
        """Sleep while watching; False once a signal asked us to stop. Raises `ChildDied`."""
        deadline = time.monotonic() + seconds
        while not self.stopping:
            self.check()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return True
            time.sleep(min(_POLL_S, remaining_s))
        return False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._impatient = self.stopping
        self.stopping = True

    def _end_all(self) -> None:
        self.stopping = True
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + self._grace_s
        while not self._impatient and time.monotonic() < deadline:
            if all(child.process.poll() is not None for child in self.children):
                break
            time.sleep(_POLL_S)
        for child in self.children:
            try:
                os.killpg(child.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the whole group is gone already
            child.process.wait()


def _die_with_parent(parent_pid: int) -> Callable[[], None] | None:
    """What a fresh child runs before its program: ask the kernel for SIGTERM when the parent dies."""
    if _LIBC is None:
        return None
    prctl = _LIBC.prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:
            os._exit(1)  # the parent died before the line above

    return prepare
