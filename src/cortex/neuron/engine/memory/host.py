"""The memory and the cores of this host, or of its container, and the memory of a process.

Reads only a few small files under /proc and /sys, of cgroup v1 and v2.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2^63."""
_RESERVE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class HostMemory:
    total_bytes: int
    free_bytes: int
    """Available to new allocations: free pages, and page cache that can be dropped."""

    @property
    def reserve_bytes(self) -> int:
        """Bytes that models leave free, so that the host never swaps."""
        return int(self.total_bytes * _RESERVE_SHARE)

    def num_missing_bytes(self, num_bytes: int = 0) -> int:
        """Bytes missing to keep the host's reserve free if `num_bytes` more are allocated."""
        return max(0, num_bytes + self.reserve_bytes - self.free_bytes)


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """The host's memory, limited by the tightest cgroup of this process. `root` is for tests."""
    fields = _fields(f"{root}/proc/meminfo")
    total_bytes = fields["MemTotal:"] * 1024
    free_bytes = fields.get("MemAvailable:", fields.get("MemFree:", 0)) * 1024
    for limit_bytes, used_bytes in _cgroup_limits(root):
        total_bytes = min(total_bytes, limit_bytes)
        free_bytes = min(free_bytes, max(0, limit_bytes - used_bytes))
    return HostMemory(total_bytes, free_bytes)


def anonymous_bytes(process_id: int | None = None) -> int:
    """The memory of a process, by default this one, that no file backs; 0 if the process does not exist.

    Code and weights that are mapped from files do not count: the kernel can drop them.
    """
    try:
        statm = Path(f"/proc/{process_id or 'self'}/statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(statm[1]) - int(statm[2])) * _PAGE_BYTES


def usable_cores(root: Path = Path("/")) -> int:
    """How many cores this process may use by its affinity and the quotas of its cgroups, at least 1. A part of a core
    counts as one. Threads beyond a quota are stopped in the middle of an operation, while the others wait for them.
    `root` is for tests."""
    cores = float(len(os.sched_getaffinity(0)))
    quotas = map(_core_quota, _cgroup_folders("cpu", root))
    limits = (quota / period for quota, period in quotas if quota > 0 and period > 0)
    return max(1, -int(-min([cores, *limits]) // 1))


def _core_quota(folder: Path) -> tuple[int, int]:
    """Microseconds of all cores per period, and the period; (0, 0): no quota."""
    try:
        if (folder / "cpu.max").exists():
            words = (folder / "cpu.max").read_text().split()
        else:
            words = [(folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        return int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):  # not mounted, or "max"
        return 0, 0


def _cgroup_folders(controller: str, root: Path) -> tuple[Path, ...]:
    """The folders of every cgroup this process is under that may limit what `controller` is for (`cpu`, `memory`)."""
    memberships = _text(f"{root}/proc/self/cgroup")
    return () if memberships is None else _folders_of(controller, memberships, root)


@functools.lru_cache(16)
def _folders_of(controller: str, memberships: str, root: Path) -> tuple[Path, ...]:
    """Kept: a worker reads the memory of its host at each growth of its cache, and processes seldom change cgroups."""
    folders: list[Path] = []
    for membership in memberships.splitlines():
        _, controllers, path = membership.split(":", 2)
        if controllers == "":  # v2
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the path may name folders of the host that are not mounted here: nothing can be read there.
        folder = base / path.lstrip("/")
        folders += (level for level in (folder, *folder.parents) if level.is_relative_to(base))
    return tuple(folders)


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, unreclaimable use) of every cgroup this process is under that has a limit."""
    for folder in _cgroup_folders("memory", root):
        limit = _number(f"{folder}/memory.max", f"{folder}/memory.limit_in_bytes")
        if limit is not None and limit < _UNLIMITED_BYTES:
            used = _number(f"{folder}/memory.current", f"{folder}/memory.usage_in_bytes") or 0
            statistics = _fields(f"{folder}/memory.stat")
            dropped = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))  # v1, v2
            yield limit, max(0, used - dropped)


def _number(*paths: str) -> int | None:
    """The number in the first of these files that exists."""
    for path in paths:
        if (text := _text(path)) is not None:
            return int(text) if text.strip().isdigit() else None
    return None


def _fields(path: str) -> dict[str, int]:
    lines = (_text(path) or "").splitlines()
    return {words[0]: int(words[1]) for line in lines if len(words := line.split()) >= 2 and words[1].isdigit()}


def _text(path: str) -> str | None:
    """None: there is no such file that can be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode()
    except OSError:
        return None
