"""Starts programs as child processes, watches them, and ends them together within a time limit.

Each child leads its own process group, so that Ctrl-C reaches only the supervisor. The kernel sends each child SIGTERM
when the supervisor dies, so that even `kill -9` on the supervisor leaves no process behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Self

from cortex.ipc.child import die_with_parent

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path | None
    """The file with its output; None: the output goes where the supervisor's goes."""

    def last_lines(self, count: int = 1) -> list[str]:
        """The last non-empty lines of its log."""
        if self.log is None:
            return []
        with self.log.open(encoding="utf-8", errors="replace") as file:
            return list(deque((line.rstrip() for line in file if line.strip()), maxlen=count))


class ChildDied(Exception):
    """A child exited while it should have been running."""

    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.name} exited with {child.process.returncode}")
        self.child = child


class ProcessSupervisor:
    """Owns its children; use it as a context manager on the main thread.

    Inside the block, SIGINT, SIGTERM and SIGHUP only set `stopping`. Leaving the block ends every child: with SIGTERM,
    then after `grace_s` or a second signal with SIGKILL to its process group.
    """

    def __init__(self, grace_s: float) -> None:
        self.children: list[Child] = []
        self.stopping = False
        self._kill_now = False
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
        """Runs `command` with its output in `log`, or where the supervisor's goes."""
        with contextlib.nullcontext() if log is None else log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                process_group=0,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def check(self) -> None:
        """Raises `ChildDied` for the first child that has exited."""
        for child in self.children:
            if child.process.poll() is not None:
                raise ChildDied(child)

    def wait(self, seconds: float) -> bool:
        """Waits and watches the children; False as soon as a signal asks to stop. Raises `ChildDied`."""
        deadline = time.monotonic() + seconds
        while not self.stopping:
            self.check()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return True
            time.sleep(min(_POLL_S, remaining_s))
        return False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._kill_now = self.stopping
        self.stopping = True

    def _end_all(self) -> None:
        self.stopping = True
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + self._grace_s
        while not self._kill_now and time.monotonic() < deadline:
            if all(child.process.poll() is not None for child in self.children):
                break
            time.sleep(_POLL_S)
        for child in self.children:
            try:
                os.killpg(child.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the whole group has exited
            child.process.wait()
