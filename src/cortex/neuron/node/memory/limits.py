"""What the operator lets models take of a device, and what loads leave free on it, whatever runs the models. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cortex.neuron.config import NeuronConfig
from cortex.neuron.engine.memory.reserve import MemoryReserve
from cortex.neuron.node.loading.library import KnownModel
from cortex.neuron.node.memory.ceilings import Ceilings
from cortex.wire.node.host_splits import HostSplit
from cortex.wire.node.protocol import Device


@dataclass(frozen=True, slots=True)
class NodeLimits:
    config: NeuronConfig

    def reserve(self, device: Device) -> MemoryReserve:
        """The memory of the device that a load leaves free."""
        return MemoryReserve.on(device.kind, device.total_bytes, self.config.limits.min_free_vram_mb << 20)

    def share_bytes(self, model: KnownModel, device: Device) -> int | None:
        """What the operator's ceilings let the model take of the device while no other model is loaded."""
        return Ceilings.of(self.config).share_bytes(device.index, model.num_devices)

    def split(self, model: KnownModel, facts: Any, device: Device, lacking_bytes: int) -> HostSplit | str:  # noqa: ARG002
        """What of the model lies in host memory where the device lacks some; a text says why nothing does."""
        return "only the built-in engine divides weights between device and host memory"
