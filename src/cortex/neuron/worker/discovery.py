"""The devices of this host and their current state: GPUs through NVML, AMD's for harnesses, otherwise the CPU.

Nothing here creates a CUDA context or imports torch. NVML calls may block on a failing GPU, so the daemon makes them on
a thread and serves the last readings.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import pynvml
from pynvml import NVMLError

from cortex.neuron.engine.memory.host import read_host_memory
from cortex.neuron.worker import amd
from cortex.wire.node.protocol import Device

_library: Any = pynvml
"""As Any: the module is untyped and creates its error classes at import."""


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """The state of a device at one moment."""

    total_bytes: int
    free_bytes: int
    utilisation: float | None = None
    """0 to 1."""
    temperature_c: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices that were found. Never empty: without a usable GPU the CPU is the only device."""

    devices: tuple[Device, ...]
    driver: str | None = None
    driver_problem: str | None = None
    """Why a GPU is not used, if there may be one."""
    readings: Mapping[int, DeviceReading] = field(default_factory=dict)
    cuda_version: str | None = None
    """The latest CUDA version that the driver supports."""

    @property
    def num_host_shares(self) -> int:
        """How many devices share the host's cores and memory."""
        return sum(device.kind == "cpu" for device in self.devices) or 1


def discover(env: Mapping[str, str] = os.environ) -> Inventory:
    """Finds the devices and reads their state. A driver error becomes `driver_problem`, never an exception."""
    try:
        with _Nvml() as nvml:
            inventory = nvml.inventory()
    except NVMLError as error:
        return _cpu_inventory(driver_problem=_reason(error))
    visible = visible_devices(inventory.devices, env.get("CUDA_VISIBLE_DEVICES"))
    problem = inventory.driver_problem
    if not visible:
        problem = problem or ("CUDA_VISIBLE_DEVICES hides every GPU" if inventory.devices else None)
        return _cpu_inventory(driver=inventory.driver, driver_problem=problem)
    readings = {gpu.index: inventory.readings[gpu.index] for gpu in visible}
    return replace(inventory, devices=visible, driver_problem=problem, readings=readings)


def with_amd_cards(inventory: Inventory, env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> Inventory:
    """The inventory with AMD's cards, if any, in place of the CPU, for the servers of harnesses."""
    if inventory.devices[0].kind != "cpu":
        return inventory
    cards = amd.cards(root)
    devices = tuple(
        Device(
            index=card.index,
            kind="rocm",
            name=card.name,
            total_bytes=card.total_bytes,
            uuid=f"GPU-{card.unique_id}" if card.unique_id else None,
        )
        for card in cards
    )
    settings = (env[name] for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in env)
    visible = visible_devices(devices, next(settings, None))
    if not visible:
        return replace(inventory, driver_problem="ROCR_VISIBLE_DEVICES hides every GPU") if devices else inventory
    readings = _amd_readings(visible, root)
    return Inventory(visible, amd.driver_version(root), inventory.driver_problem, readings)


def divided(inventory: Inventory, cpu_devices: int) -> Inventory:
    """The inventory with the CPU as `cpu_devices` devices of equal size. GPUs are not divided."""
    cpu = inventory.devices[0]
    if cpu.kind != "cpu" or cpu_devices == 1:
        return inventory
    devices = tuple(
        msgspec.structs.replace(
            cpu,
            index=index,
            name=f"{cpu.name} ({index + 1} of {cpu_devices})",
            total_bytes=cpu.total_bytes // cpu_devices,
        )
        for index in range(cpu_devices)
    )
    reading = inventory.readings[cpu.index]
    return replace(inventory, devices=devices, readings=_shares(reading, cpu_devices))


def read_devices(devices: tuple[Device, ...]) -> dict[int, DeviceReading]:
    """Current readings of `devices` (all of this host), without those that do not respond."""
    if devices and devices[0].kind == "cpu":
        return _shares(_cpu_inventory().readings[0], len(devices))
    if devices and devices[0].kind == "rocm":
        return _amd_readings(devices)
    readings: dict[int, DeviceReading] = {}
    with contextlib.suppress(NVMLError), _Nvml() as nvml:
        for gpu in devices:
            with contextlib.suppress(NVMLError):
                readings[gpu.index] = nvml.reading(nvml.handle(gpu.index))
    return readings


def visible_devices(devices: tuple[Device, ...], setting: str | None) -> tuple[Device, ...]:
    """The devices in `setting`, as of CUDA_VISIBLE_DEVICES: indices or UUID prefixes up to the first unknown one."""
    if setting is None:
        return devices
    visible: list[Device] = []
    for name in (part.strip() for part in setting.split(",")):
        found = [
            device
            for device in devices
            if name == str(device.index) or (name.startswith("GPU-") and (device.uuid or "").startswith(name))
        ]
        if len(found) != 1:
            break
        visible.extend(found)
    return tuple(visible)


def _amd_readings(devices: tuple[Device, ...], root: Path = Path("/")) -> dict[int, DeviceReading]:
    wanted = {device.index for device in devices}
    readings = {}
    for card in amd.cards(root):
        if card.index in wanted:
            free_bytes = max(0, card.total_bytes - card.used_bytes)
            if card.is_integrated:  # programs of the host use the same memory
                free_bytes = min(free_bytes, card.set_aside_bytes + read_host_memory(root).free_bytes)
            readings[card.index] = DeviceReading(card.total_bytes, free_bytes, card.utilisation, card.temperature_c)
    return readings


class _Nvml:
    """An NVML session; a context manager because NVML counts inits and shutdowns."""

    def __enter__(self) -> _Nvml:
        _library.nvmlInit()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _library.nvmlShutdown()

    def inventory(self) -> Inventory:
        """All GPUs that respond; the others are named in `driver_problem`."""
        devices: list[Device] = []
        readings: dict[int, DeviceReading] = {}
        problems: list[str] = []
        for index in range(_library.nvmlDeviceGetCount()):
            try:
                handle = self.handle(index)
                readings[index] = self.reading(handle)
                devices.append(self._device(index, handle, readings[index].total_bytes))
            except NVMLError as error:
                problems.append(f"GPU {index} is not used: {error}; see nvidia-smi and dmesg")
        driver = _text(_library.nvmlSystemGetDriverVersion())
        return Inventory(tuple(devices), driver, "; ".join(problems) or None, readings, _cuda_version())

    def handle(self, index: int) -> Any:
        return _library.nvmlDeviceGetHandleByIndex(index)

    def reading(self, handle: Any) -> DeviceReading:
        total_bytes, free_bytes = _memory(handle)
        return DeviceReading(
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            utilisation=_optional(lambda: _library.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            temperature_c=_optional(
                lambda: float(_library.nvmlDeviceGetTemperature(handle, _library.NVML_TEMPERATURE_GPU))
            ),
            watts=_optional(lambda: _library.nvmlDeviceGetPowerUsage(handle) / 1000),
        )

    def _device(self, index: int, handle: Any, total_bytes: int) -> Device:
        major, minor = _library.nvmlDeviceGetCudaComputeCapability(handle)
        return Device(
            index=index,
            kind="cuda",
            name=_text(_library.nvmlDeviceGetName(handle)),
            total_bytes=total_bytes,
            compute_capability=f"{major}.{minor}",
            uuid=_text(_library.nvmlDeviceGetUUID(handle)),
        )


def _memory(handle: Any) -> tuple[int, int]:
    """(total, free) bytes; the host's for a GPU that has no memory of its own."""
    try:
        memory = _library.nvmlDeviceGetMemoryInfo(handle)
    except _library.NVMLError_NotSupported:
        host = read_host_memory()
        return host.total_bytes, host.free_bytes
    return int(memory.total), int(memory.free)


def _cuda_version() -> str | None:
    try:
        version = int(_library.nvmlSystemGetCudaDriverVersion())  # 12040 is 12.4
    except NVMLError:  # of a driver that is too old to report it
        return None
    return f"{version // 1000}.{version % 1000 // 10}"


def _cpu_inventory(*, driver: str | None = None, driver_problem: str | None = None) -> Inventory:
    memory = read_host_memory()
    device = Device(index=0, kind="cpu", name=_cpu_name(), total_bytes=memory.total_bytes)
    return Inventory((device,), driver, driver_problem, {0: DeviceReading(memory.total_bytes, memory.free_bytes)})


def _shares(reading: DeviceReading, count: int) -> dict[int, DeviceReading]:
    """Equal shares of the host's memory, so that concurrent loads do not overcommit."""
    share = replace(reading, total_bytes=reading.total_bytes // count, free_bytes=reading.free_bytes // count)
    return dict.fromkeys(range(count), share)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            for line in cpuinfo:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return os.uname().machine


def _reason(error: NVMLError) -> str | None:
    """Why NVML does not start and what to do; None if no driver is installed."""
    if isinstance(error, _library.NVMLError_LibraryNotFound):
        return None
    if isinstance(error, _library.NVMLError_LibRmVersionMismatch):
        return "the NVIDIA kernel module and its library have different versions; reboot, or reload the nvidia module"
    if isinstance(error, _library.NVMLError_DriverNotLoaded):
        return "the NVIDIA kernel module is not loaded; run `modprobe nvidia` and see dmesg"
    if isinstance(error, _library.NVMLError_NoPermission):
        return "no permission to use the NVIDIA driver; check the permissions of /dev/nvidia*"
    return f"NVML does not start: {error}; run nvidia-smi for the driver's message"


def _optional(read: Any) -> float | None:
    """A reading that some GPUs do not support."""
    try:
        return float(read())
    except NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
