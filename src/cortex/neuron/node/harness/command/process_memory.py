"""The memory of a process and all its descendants, and whether they run."""

from __future__ import annotations

import contextlib
from pathlib import Path

_PROC = Path("/proc")


def descendants(process: int) -> list[int]:
    """The processes below `process`, parents first. Blocks for the time of a few small reads."""
    found: list[int] = []
    remaining = [process]
    while remaining:
        children = _children(remaining.pop())
        found += children
        remaining += children
    return found


def resident_bytes(processes: list[int]) -> int:
    """The memory of these processes; what several of them share counts once. Those that have ended count nothing."""
    return sum(map(_resident_bytes, processes))


def is_stopped(process: int) -> bool:
    try:
        stat = (_PROC / str(process) / "stat").read_text()
    except OSError:  # it has ended
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def _children(process: int) -> list[int]:
    try:
        threads = list((_PROC / str(process) / "task").iterdir())
    except OSError:  # it has ended
        return []
    children: list[int] = []
    for thread in threads:
        with contextlib.suppress(OSError):  # this thread has ended; others may have children
            children += map(int, (thread / "children").read_text().split())
    return children


def _resident_bytes(process: int) -> int:
    """Its proportional share, or all that is resident where the kernel does not tell that."""
    for file, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = (_PROC / str(process) / file).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith(field):
                return int(line.split()[1]) << 10
    return 0
