"""What a device has, and in which numbers it computes best."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

_CPU_SHARE = 0.5
"""Of the free memory of a host, what one model may take on its CPU."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    total_bytes: int
    free_bytes: int
    reserve_bytes: int
    """Kept for activations and for the libraries' own buffers."""


def device_memory(device: torch.device) -> DeviceMemory:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free, max(1 << 30, total // 16))
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return DeviceMemory(total, free, int(free * (1 - _CPU_SHARE)))


def numeric_format(wanted: str, device: torch.device) -> torch.dtype:
    """The dtype a model is computed in; `auto` takes what the device is fast at."""
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[wanted]
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if _cpu_multiplies_bfloat16() else torch.float32


def _cpu_multiplies_bfloat16() -> bool:
    """Whether the processor has bfloat16 dot products; without them float32 is faster."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})
