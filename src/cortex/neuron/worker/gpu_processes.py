"""The GPU memory of processes, as the driver counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pynvml
from pynvml import NVMLError

from cortex.wire.node.protocol import Device

_library: Any = pynvml


def used_bytes(devices: Sequence[Device], processes: Sequence[int]) -> int | None:
    """What `processes` hold on `devices`. None where the driver does not know: it reports the host's process ids, which
    a container does not see, and on some systems no memory of processes at all. Blocks."""
    wanted = set(processes)
    try:
        _library.nvmlInit()
    except NVMLError:
        return None
    try:
        found = [
            used
            for device in devices
            for used in _library.nvmlDeviceGetComputeRunningProcesses(_library.nvmlDeviceGetHandleByIndex(device.index))
            if used.pid in wanted
        ]
    except NVMLError:
        return None
    finally:
        _library.nvmlShutdown()
    if not found or any(used.usedGpuMemory is None for used in found):
        return None
    return sum(int(used.usedGpuMemory) for used in found)
