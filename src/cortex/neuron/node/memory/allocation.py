"""The devices that a load has been given, and the memory of them that is reserved for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cortex.neuron.engine.request import StageSpec
from cortex.neuron.worker.hosts.replicated import LockDevices
from cortex.wire.node.protocol import Device


@dataclass(frozen=True, slots=True)
class ChosenDevices:
    devices: tuple[Device, ...]
    """By index."""
    stages: tuple[StageSpec, ...] = ()
    """Those of each replica, if the model is divided by layers."""
    free_bytes: tuple[int, ...] = ()
    """What each device can give, if the layers are divided among nodes: their lead decides."""
    limits: tuple[int | None, ...] = ()
    """What other models leave of the operator's ceilings on each device."""

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(device.index for device in self.devices)


@dataclass(eq=False, slots=True)
class Reservation:
    """The memory of one load, from the decision about its devices to its end."""

    model_id: str
    device_bytes: Mapping[int, int]
    """What it may take, by device index."""
    taken_bytes: int = 0
    """The part that it is known to hold already, over all its devices."""
    was_alone: bool = True
    """No other load ran on its devices meanwhile."""

    def outstanding_bytes(self, index: int) -> int:
        """What it will take of the device beyond what a reading shows."""
        own, whole = self.device_bytes.get(index, 0), sum(self.device_bytes.values())
        return max(0, own - self.taken_bytes * own // whole) if whole else 0


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """The devices of one load, whose memory is reserved for it."""

    chosen: ChosenDevices
    lock_devices: LockDevices
    """For later loads of a part of the model by its host."""
    _reservation: Reservation

    def took(self, num_bytes: int) -> None:
        """The load holds this much by now, over all its devices."""
        self._reservation.taken_bytes = num_bytes

    @property
    def was_alone(self) -> bool:
        """No other load has run on its devices meanwhile, so that a change of their free memory is due to this one."""
        return self._reservation.was_alone
