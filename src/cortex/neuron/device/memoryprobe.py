"""A worker's own view of its device's memory. Runs on the engine thread, inside the worker."""

from __future__ import annotations

import ctypes
import gc

from cortex.neuron.device.address import DeviceAddress
from cortex.neuron.device.protocol import DeviceMemory
from cortex.neuron.engine.hostmemory import anonymous_bytes, read_host_memory


def measure(device: DeviceAddress) -> DeviceMemory:
    if device.kind == "cpu":
        host = read_host_memory()
        return DeviceMemory(host.total_bytes, host.free_bytes, anonymous_bytes())
    import torch  # only a worker that owns a GPU needs it here

    free_bytes, total_bytes = torch.cuda.mem_get_info(device.torch_device)
    return DeviceMemory(total_bytes, free_bytes, torch.cuda.memory_reserved(device.torch_device))


def give_back(device: DeviceAddress) -> None:
    """Returns what is free inside this process to the device, so that others can have it and the numbers are true."""
    gc.collect()
    if device.kind == "cpu":
        malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own; other libcs do without
        if malloc_trim is not None:
            malloc_trim(0)
        return
    import torch

    torch.cuda.empty_cache()
