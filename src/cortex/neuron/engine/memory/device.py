"""The memory of a device, and the dtype that it computes in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cortex.neuron.engine.memory.dtypes import dtype_name
from cortex.neuron.engine.memory.host import read_host_memory
from cortex.neuron.engine.memory.reserve import MemoryReserve


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    total_bytes: int
    free_bytes: int
    reserve_bytes: int
    """Kept free for activations and for the libraries' own buffers."""


def device_memory(device: torch.device, num_host_shares: int = 1) -> DeviceMemory:
    """`num_host_shares`: how many CPU devices divide the host's memory equally."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        host = read_host_memory()
        total, free = host.total_bytes // num_host_shares, host.free_bytes // num_host_shares
    return DeviceMemory(total, free, MemoryReserve.on(device.type, total).bytes_of(free))


def compute_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The dtype that a model computes in; `auto` is the fastest on the device."""
    found: torch.dtype = getattr(torch, dtype_name(wanted, device.type))
    return found
