"""How many cores this process may use: its affinity, and the quota of its container.

Reads a few small files under /proc and /sys, of cgroup v1 and v2. Threads beyond the quota are stopped in the middle of
an operation, while the others wait for them.
"""

from __future__ import annotations

import os
from pathlib import Path

from cortex.neuron.engine.memory.host import cgroup_folders


def usable_cores(root: Path = Path("/")) -> int:
    """At least 1. A part of a core counts as one. `root` is for tests."""
    cores = float(len(os.sched_getaffinity(0)))
    quotas = map(_quota, cgroup_folders("cpu", root))
    limits = (quota / period for quota, period in quotas if quota > 0 and period > 0)
    return max(1, -int(-min([cores, *limits]) // 1))


def _quota(folder: Path) -> tuple[int, int]:
    """Microseconds of all cores per period, and the period; (0, 0): no quota."""
    try:
        if (folder / "cpu.max").exists():
            words = (folder / "cpu.max").read_text().split()
        else:
            words = [(folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        return int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):  # not mounted, or "max"
        return 0, 0
