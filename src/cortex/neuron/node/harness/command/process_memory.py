"""The memory of a process and all its descendants, on the host and on GPUs, and whether they run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pynvml
from pynvml import NVMLError

from cortex.wire.node.protocol import Device

_PROC = Path("/proc")


def descendants(process: int, proc: Path = _PROC) -> list[int]:
    """The processes below `process`, parents first. Blocks for the time of a few small reads. `proc`: where the kernel
    describes processes."""
    found: list[int] = []
    remaining = [process]
    while remaining:
        children = _children(remaining.pop(), proc)
        found += children
        remaining += children
    return found


def resident_bytes(processes: list[int]) -> int:
    """The memory of these processes, with shared memory counted once and ended processes as 0."""
    return sum(map(_resident_bytes, processes))


def is_stopped(process: int) -> bool:
    try:
        stat = (_PROC / str(process) / "stat").read_text()
    except OSError:  # it has ended
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


def _children(process: int, proc: Path) -> list[int]:
    try:
        threads = list((proc / str(process) / "task").iterdir())
    except OSError:  # it has ended
        return []
    children: list[int] = []
    for thread in threads:
        with contextlib.suppress(OSError):  # this thread has ended; others may have children
            children += map(int, (thread / "children").read_text().split())
    return children


def _resident_bytes(process: int) -> int:
    """Its proportional share, or all resident memory if the kernel does not report that."""
    for file, field in (("smaps_rollup", "Pss:"), ("status", "VmRSS:")):
        try:
            lines = (_PROC / str(process) / file).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith(field):
                return int(line.split()[1]) << 10
    return 0


def gpu_bytes(devices: Sequence[Device], processes: Sequence[int], library: Any = pynvml) -> int | None:
    """Bytes that `processes` hold on `devices`, by the driver. None if unknown: it reports host process ids, which a
    container does not see, and on some systems no memory per process. Blocks."""
    wanted = set(processes)
    try:
        library.nvmlInit()
    except NVMLError:
        return None
    try:
        found = [
            used
            for device in devices
            for used in library.nvmlDeviceGetComputeRunningProcesses(library.nvmlDeviceGetHandleByIndex(device.index))
            if used.pid in wanted
        ]
    except NVMLError:
        return None
    finally:
        library.nvmlShutdown()
    if not found or any(used.usedGpuMemory is None for used in found):
        return None
    return sum(int(used.usedGpuMemory) for used in found)
