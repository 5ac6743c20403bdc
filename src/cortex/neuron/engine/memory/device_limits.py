"""Measures how fast a device reads memory and multiplies matrices, the limits of a model's speed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cortex.neuron.engine.errors import SleepError
from cortex.neuron.engine.memory.device import compute_dtype
from cortex.neuron.engine.memory.host_weights import HostBuffer
from cortex.neuron.engine.roofline.step_work import DeviceLimits

_COLUMNS = 8192
_REPEATS = 20
_WARM_UP = 3
_CPU_S = 0.3
"""The best try within this time counts, because other programs use the CPU too."""
_CPU_READ_BYTES = 256 << 20
_CPU_SIDE = 1024
_BUS_BYTES = 64 << 20
_GPU_READ_BYTES = 2 << 30
_MIN_READ_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Smaller reads would measure a cache."""


def measure_limits(device: torch.device, free_bytes: int) -> DeviceLimits | None:
    """Takes about a second at most, and uses at most half of `free_bytes` meanwhile. None if that is too little."""
    read_bytes = free_bytes // 2
    if read_bytes < _MIN_READ_BYTES[device.type]:
        return None
    if device.type == "cpu":
        rate = _cpu_read_rate(min(_CPU_READ_BYTES, read_bytes))
        return DeviceLimits(rate, _cpu_product_rate(_CPU_SIDE), rate, rate)
    try:
        return DeviceLimits(
            read_rate(device, min(_GPU_READ_BYTES, read_bytes)),
            product_rate(device, 8192 if free_bytes > 2 << 30 else 2048),
            _cpu_read_rate(_CPU_READ_BYTES),
            _bus_rate(device),
        )
    finally:
        torch.cuda.empty_cache()


def read_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes per second of a matrix-vector product over about `num_bytes` on a GPU."""
    matrix = torch.randn(num_bytes // (2 * _COLUMNS), _COLUMNS, device=device, dtype=torch.bfloat16)
    vector = torch.randn(_COLUMNS, 1, device=device, dtype=torch.bfloat16)
    return matrix.nbytes / best_device_s(lambda: matrix @ vector)


def product_rate(device: torch.device, side: int) -> float:
    """Floating-point operations per second of a square bf16 product on a GPU."""
    left, right = torch.randn(2, side, side, device=device, dtype=torch.bfloat16)
    return 2.0 * side**3 / best_device_s(lambda: left @ right)


def _bus_rate(device: torch.device) -> float:
    """Bytes per second of a copy to a GPU; 0 if the host has no memory for a measurement."""
    try:
        source = HostBuffer(_BUS_BYTES, pinned=True)
    except SleepError:
        return 0.0
    try:
        target = torch.empty(_BUS_BYTES, dtype=torch.uint8, device=device)
        return _BUS_BYTES / best_device_s(lambda: target.copy_(source.bytes, non_blocking=True))
    finally:
        source.release()


def _cpu_read_rate(num_bytes: int) -> float:
    values = torch.ones(num_bytes // 4)
    return values.nbytes / _best_s(values.sum)


def _cpu_product_rate(side: int) -> float:
    left, right = torch.randn(2, side, side).to(compute_dtype("auto", torch.device("cpu")))
    return 2.0 * side**3 / _best_s(lambda: left @ right)


def best_device_s(function: Callable[[], object]) -> float:
    """Seconds of the fastest call on the GPU, after some to warm up: slower ones are not its limit."""
    times: list[float] = []
    for _ in range(_WARM_UP + _REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times[_WARM_UP:])


def _best_s(function: Callable[[], object]) -> float:
    """Seconds of the fastest call, after one to warm up."""
    function()
    times: list[float] = []
    until_s = time.perf_counter() + _CPU_S
    while not times or time.perf_counter() < until_s:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)
