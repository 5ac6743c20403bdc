"""The host memory of slabs: page-locked if a GPU copies to it, and released when the host runs short."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from cortex.neuron.engine.errors import SleepError
from cortex.neuron.engine.memory.host import HostMemory, read_host_memory
from cortex.neuron.engine.memory.host_weights import HostBuffer

GROWTH_SHARE = 0.02
"""Page-locking memory delays steps: while a model has work, it takes at most this share of the time."""


class HostSlabs:
    """A `SlabMemory`. Belongs to the engine thread."""

    def __init__(self, device: torch.device, read: Callable[[], HostMemory] = read_host_memory) -> None:
        """`read`: the memory of the host; for tests."""
        self._is_locked = device.type == "cuda"
        self._read = read
        self._buffers: dict[int, HostBuffer] = {}
        self._next_growth_s = 0.0
        self.may_wait = False
        """Whether growth may block: the model has no work."""

    def allocate(self, slab: int, num_bytes: int) -> bool:
        started_s = time.monotonic()
        if not self.may_wait and started_s < self._next_growth_s:
            return False
        if self.num_missing_bytes(num_bytes):
            return False
        try:
            self._buffers[slab] = HostBuffer(num_bytes, pinned=self._is_locked)
        except SleepError:
            return False
        now_s = time.monotonic()
        self._next_growth_s = now_s + (now_s - started_s) / GROWTH_SHARE if self._is_locked else 0.0
        return True

    def free(self, slab: int) -> None:
        self._buffers.pop(slab).release()

    def num_missing_bytes(self, num_bytes: int = 0) -> int:
        """Bytes missing to keep the host's reserve free if `num_bytes` more are allocated."""
        return self._read().num_missing_bytes(num_bytes)

    def rows(self, slab: int, first: int, count: int, num_bytes: int) -> Tensor:
        """Consecutive blocks of `num_bytes` each: [count, num_bytes]"""
        return self._buffers[slab].bytes[first * num_bytes : (first + count) * num_bytes].view(count, num_bytes)
