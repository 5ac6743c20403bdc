"""Where a worker runs: one device, named the way each side of the process boundary needs it."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.wire.node import Device, DeviceKind


@dataclass(frozen=True, slots=True)
class DeviceAddress:
    kind: DeviceKind
    index: int
    uuid: str | None = None

    @classmethod
    def of(cls, device: Device) -> DeviceAddress:
        return cls(device.kind, device.index, device.uuid)

    @property
    def thread_name(self) -> str:
        """The name of the engine thread that owns this device."""
        return "cpu" if self.kind == "cpu" else f"cuda-dev-{self.index}"

    @property
    def torch_device(self) -> str:
        """The device as the worker's torch knows it: a worker sees only its own GPU."""
        return "cpu" if self.kind == "cpu" else "cuda:0"

    def environment(self) -> dict[str, str]:
        """What the worker's environment must say so that it cannot touch another worker's device."""
        if self.kind == "cpu":
            return {"CUDA_VISIBLE_DEVICES": ""}
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": self.uuid or str(self.index)}
