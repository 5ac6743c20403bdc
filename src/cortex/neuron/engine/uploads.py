"""Copies a step's arrays from the host to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16
"""Bytes. The kernels load vectors of this size from the beginning of a tensor."""
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.bool_): torch.bool,
}
_pinned = partial(torch.empty, dtype=torch.uint8, pin_memory=True)


def upload(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """The arrays on the device, in one copy, because each copy has a high fixed cost on the host. Does not wait for the
    device. On a CPU the tensors share the memory of contiguous arrays."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    memory, views = packed(arrays, _pinned)
    return views(memory.to(device, non_blocking=True))


def host_memory_for(memory: Tensor) -> Tensor:
    """Memory on the host with the shape and type of `memory`. Copies between the two do not wait for the device."""
    return torch.empty(memory.shape, dtype=memory.dtype, pin_memory=memory.is_cuda)


def fill(memory: Tensor, array: NDArray[Any]) -> None:
    """Copies an array to memory on the device without waiting."""
    host = host_memory_for(memory)
    host.numpy()[:] = array
    memory.copy_(host, non_blocking=True)


def packed(
    arrays: Sequence[NDArray[Any]], new_memory: Callable[[int], Tensor]
) -> tuple[Tensor, Callable[[Tensor], list[Tensor]]]:
    """The arrays, concatenated in new memory, and a function that finds them in a copy of it."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = new_memory(size)
    host = memory.numpy()
    for start, array in zip(starts, arrays, strict=True):
        host[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)

    def views(copied: Tensor) -> list[Tensor]:
        return [
            copied[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    return memory, views
