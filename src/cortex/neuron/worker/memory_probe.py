"""A worker's own view of its device's memory. Runs on the engine thread, inside the worker."""

from __future__ import annotations

import ctypes
import gc

from cortex.neuron.engine.memory.host import anonymous_bytes, read_host_memory
from cortex.neuron.worker.address import DeviceAddress
from cortex.neuron.worker.protocol import MemoryReading


def measure(device: DeviceAddress) -> MemoryReading:
    if device.kind == "cpu":
        host = read_host_memory()
        return MemoryReading(host.total_bytes, host.free_bytes, anonymous_bytes())
    import torch  # only a worker that owns a GPU needs it here

    free_bytes, total_bytes = torch.cuda.mem_get_info(device.torch_device)
    return MemoryReading(total_bytes, free_bytes, torch.cuda.memory_reserved(device.torch_device))


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
