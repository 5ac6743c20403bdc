"""The devices chosen for a load, and the memory reserved for it there."""

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
    """The stages of each replica, if the model is divided by layers."""
    limits: tuple[int | None, ...] = ()
    """Per device: bytes that other models leave under the operator's ceilings."""

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(device.index for device in self.devices)


@dataclass(eq=False, slots=True)
class Reservation:
    """The memory of one load, from the decision about its devices to its end."""

    model_id: str
    device_bytes: Mapping[int, int]
    """Device index → bytes that the load may take."""
    taken_bytes: int = 0
    """Bytes that the load already holds, over all devices."""
    was_alone: bool = True
    """No other load has run on its devices so far."""

    def outstanding_bytes(self, index: int) -> int:
        """Bytes that the load will still take of the device: a reading does not show them yet."""
        own, whole = self.device_bytes.get(index, 0), sum(self.device_bytes.values())
        return max(0, own - self.taken_bytes * own // whole) if whole else 0


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """The devices of one load, whose memory is reserved for it."""

    chosen: ChosenDevices
    lock_devices: LockDevices
    """Locks devices while the host reloads a part of the model."""
    _reservation: Reservation

    def took(self, num_bytes: int) -> None:
        """Reports the bytes that the load holds so far, over all devices."""
        self._reservation.taken_bytes = num_bytes

    @property
    def was_alone(self) -> bool:
        """No other load has run on its devices, so a change of their free memory is due to this one."""
        return self._reservation.was_alone
