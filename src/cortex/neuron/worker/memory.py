"""A worker's memory: what it holds of its device, and whether an unload freed the memory.

`measure` and `give_back` run on the engine thread, inside the worker. `Reclaimed` is the daemon's conclusion from the
measurements: a worker's own claim that memory is free is not trusted.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cortex.formats.units import gib
from cortex.neuron.engine.memory.host import anonymous_bytes, read_host_memory
from cortex.neuron.worker.protocol import DeviceAddress, MemoryReading

_SLACK_BYTES = 64 * 1024 * 1024
"""A worker's size changes by this much on its own: caches, arenas, the interpreter."""
_MIN_FRACTION = 0.9
_PURGE_DELAY_S = 0.12
"""A little longer than mimalloc waits before it returns unused memory: its delay of 10 ms, times 10 in its arenas."""
_PURGING_BYTES = 64 << 20
_ARM_MACHINES = ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """The bytes that an unload freed, and the bytes that the load had taken."""

    expected_bytes: int
    freed_bytes: int
    shares_worker: bool = False
    """Whether other models use the worker, so that its size does not show what this model freed."""

    @classmethod
    def total(cls, parts: Sequence[Reclaimed]) -> Reclaimed:
        return cls(
            sum(part.expected_bytes for part in parts),
            sum(part.freed_bytes for part in parts),
            any(part.shares_worker for part in parts),
        )

    @property
    def is_complete(self) -> bool:
        return self.shares_worker or self.freed_bytes >= self.expected_bytes * _MIN_FRACTION - _SLACK_BYTES

    def __str__(self) -> str:
        return f"{gib(self.freed_bytes)} of {gib(self.expected_bytes)} came back"


def measure(device: DeviceAddress) -> MemoryReading:
    if device.kind == "cpu":
        host = read_host_memory()
        return MemoryReading(host.total_bytes, host.free_bytes, anonymous_bytes())
    import torch  # only a worker that owns a GPU needs it here

    free_bytes, total_bytes = torch.cuda.mem_get_info(device.torch_device)
    return MemoryReading(total_bytes, free_bytes, torch.cuda.memory_reserved(device.torch_device))


def give_back(device: DeviceAddress) -> None:
    """Returns this process's unused memory to the device, so that others can use it and measurements are true."""
    gc.collect()
    if device.kind == "cpu":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
        if malloc_trim is not None:
            malloc_trim(0)
        _purge_library()
        return
    import torch

    torch.cuda.empty_cache()


def _purge_library() -> None:
    """On ARM, torch has its own allocator (mimalloc), which `malloc_trim` does not reach. It returns unused memory
    after a moment, but only when something large is allocated or freed."""
    torch = sys.modules.get("torch")  # a worker that never used it has nothing to return
    if torch is not None and platform.machine() in _ARM_MACHINES:
        time.sleep(_PURGE_DELAY_S)
        torch.empty(_PURGING_BYTES, dtype=torch.uint8)
