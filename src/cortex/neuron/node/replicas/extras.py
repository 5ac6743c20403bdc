"""The extra replicas on the devices of a node. They use memory that nothing else needs, so their memory counts as
free."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from cortex.neuron.node.memory.ceilings import Ceilings
from cortex.neuron.worker.discovery import DeviceReading
from cortex.neuron.worker.hosts.replica import HostReplica
from cortex.neuron.worker.hosts.replicated import ReplicatedHost
from cortex.neuron.worker.model_host import ModelHost
from cortex.wire.node.protocol import Device


@dataclass(eq=False, slots=True)
class _Extra:
    device: int
    replicas: ReplicatedHost
    free_bytes: int
    """Free bytes of the device before its load."""
    load: asyncio.Task[HostReplica | None]

    @property
    def is_loading(self) -> bool:
        return not self.load.done()

    @property
    def replica(self) -> HostReplica | None:
        """None while it is being loaded, if its load failed, or once it is gone."""
        if self.is_loading or self.load.cancelled() or self.load.exception() is not None:
            return None
        replica = self.load.result()
        return replica if replica is not None and replica.host.resident is not None else None

    def num_bytes(self, free_bytes: int) -> int:
        """Bytes that it holds of its device, which has `free_bytes` now."""
        if self.is_loading:
            return max(0, self.free_bytes - free_bytes)
        resident = self.replica.host.resident if self.replica is not None else None
        return resident.process_bytes if resident is not None else 0


class ExtraReplicas:
    """Belongs to the daemon's loop."""

    def __init__(self, devices: Sequence[Device], ceilings: Ceilings) -> None:
        self._indices = frozenset(device.index for device in devices)
        self._num_host_shares = sum(device.kind == "cpu" for device in devices)
        self._has_node_ceiling = ceilings.node_bytes is not None
        self._all: list[_Extra] = []

    def sharing(self, indices: Collection[int]) -> frozenset[int]:
        """The devices whose extra replicas take memory that a load on `indices` could use."""
        return self._indices if self._num_host_shares or self._has_node_ceiling else frozenset(indices)

    def num_bytes(self, indices: Collection[int], readings: Mapping[int, DeviceReading]) -> int:
        """Bytes that extra replicas on these devices hold."""
        return sum(self._bytes_of(extra, readings) for extra in self._held() if extra.device in indices)

    def are_loading(self, indices: Collection[int]) -> bool:
        return any(extra.is_loading and extra.device in indices for extra in self._held())

    def without(self, readings: Mapping[int, DeviceReading]) -> dict[int, DeviceReading]:
        """The readings as they would be without extra replicas."""
        return {index: self._without(index, reading, readings) for index, reading in readings.items()}

    def _without(self, index: int, reading: DeviceReading, readings: Mapping[int, DeviceReading]) -> DeviceReading:
        held_bytes = self.num_bytes(self._indices if self._num_host_shares else (index,), readings)
        free_bytes = reading.free_bytes + held_bytes // (self._num_host_shares or 1)
        return replace(reading, free_bytes=min(reading.total_bytes, free_bytes))

    def _bytes_of(self, extra: _Extra, readings: Mapping[int, DeviceReading]) -> int:
        reading = readings.get(extra.device)
        # A CPU device has a share of the host's free memory, so it loses the same share of what a load takes.
        scale = self._num_host_shares if extra.is_loading and self._num_host_shares else 1
        return scale * extra.num_bytes(reading.free_bytes if reading is not None else extra.free_bytes)

    async def add(self, replicas: ReplicatedHost, host: ModelHost, free_bytes: int) -> bool:
        """Loads an extra replica on the device of `host`, which has `free_bytes`. False if the load was cancelled
        because its model is unloaded or another load needs the memory. Raises LoadRejected or WorkerLost."""
        load = asyncio.create_task(replicas.extras.add(host))
        self._all = [*self._held(), _Extra(host.device_indices[0], replicas, free_bytes, load)]
        try:
            await asyncio.wait({load})
        except asyncio.CancelledError:
            load.cancel()
            await asyncio.wait({load})
            raise
        return not load.cancelled() and load.result() is not None

    async def give_back(self, indices: Collection[int], drain_s: float, *, only_loading: bool = False) -> None:
        """Unloads the extra replicas on these devices; returns when their memory is free. Requests in them get
        `drain_s` to end, then a retryable error."""
        here = [extra for extra in self._held() if extra.device in indices]
        await asyncio.gather(*(_ended(extra, drain_s) for extra in here if extra.is_loading or not only_loading))

    def _held(self) -> list[_Extra]:
        return [extra for extra in self._all if extra.is_loading or extra.replica is not None]


async def _ended(extra: _Extra, drain_s: float) -> None:
    if extra.is_loading:
        extra.load.cancel()
        await asyncio.wait({extra.load})
    if (replica := extra.replica) is not None:
        await extra.replicas.extras.remove(replica, drain_s)
