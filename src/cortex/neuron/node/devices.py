"""The devices of this node: one worker supervisor each, the latest readings of their memory, and the extra replicas on
them, which use memory that nothing else needs."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from cortex.neuron.config import DeviceEntry, NeuronConfig
from cortex.neuron.engine.memory.reserve import MemoryReserve
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.node.memory.ceilings import Ceilings
from cortex.neuron.node.memory.host_budget import KvHostMemory
from cortex.neuron.node.power import PackagePower
from cortex.neuron.servers.ready_made import usable
from cortex.neuron.worker.discovery import DeviceReading, Inventory, discover, divided, with_amd_cards
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.hosts.device import DeviceHost
from cortex.neuron.worker.hosts.replica import HostReplica
from cortex.neuron.worker.hosts.replicated import ReplicatedHost
from cortex.neuron.worker.hosts.sharded import Backend, Rendezvous, ShardedHost
from cortex.neuron.worker.model_host import ModelHost
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.neuron.worker.protocol import DeviceAddress
from cortex.neuron.worker.supervisor import WorkerSupervisor
from cortex.system.engine_packages import missing_packages
from cortex.wire.node.protocol import Device, DeviceHealth, Fallback
from cortex.wire.words import os_error_in_words

log = logging.getLogger(__name__)


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


ReadDevices = Callable[[tuple[Device, ...]], dict[int, DeviceReading]]
"""Reads the devices' memory; blocks."""


class NodeDevices:
    """Belongs to the daemon's loop."""

    def __init__(
        self,
        inventory: Inventory,
        worker_factory: WorkerFactory,
        timeouts: WorkerTimeouts,
        read_devices: ReadDevices,
        reserve: Callable[[Device], MemoryReserve],
        ceilings: Ceilings,
        kv_host_mb: int | None = 0,
        *,
        boosts: bool = True,
    ) -> None:
        """`worker_factory` is closed with the devices. `reserve`: memory that loads leave free on a device.
        `kv_host_mb`: as `limits.kv_host_mb`. `boosts`: an idle GPU with a model keeps a high clock."""
        self.all = inventory.devices
        self.extras = ExtraReplicas(inventory.devices, ceilings)
        self._readings = dict(inventory.readings)
        self._read_devices = read_devices
        self._package_power = PackagePower()
        self.watts: dict[int, float] = {}
        """Power draw of each device, if readable; that of the CPU by its packages."""
        self.total_watts: float | None = None
        """Total power draw of devices and packages that can be read."""
        self._reserve = reserve
        self._ceilings = ceilings
        self._worker_factory = worker_factory
        self._locks: dict[int, int] = {}
        """Device index → an in-memory file. Workers open it by its path in this process, so a killed worker leaves
        nothing behind."""
        self.supervisors = {
            device.index: WorkerSupervisor(
                DeviceAddress.of(device, inventory.num_host_shares, boosts=boosts),
                self._worker_factory,
                timeouts=timeouts,
            )
            for device in inventory.devices
        }
        self.kv_host = KvHostMemory(kv_host_mb, self.supervisors.values())

    def host(self, indices: Sequence[int], spec: LoadSpec) -> ModelHost:
        """The host of a whole model on one device, or of a divided one on several."""
        if len(indices) == 1:
            return DeviceHost(self.supervisors[indices[0]], spec)
        devices = [device for device in self.all if device.index in indices]
        locks = tuple(self.lock_path(index) for index in sorted(indices))
        rendezvous = Rendezvous(len(indices), _backend_of(devices), locks)
        ranks = [replace(spec, rank=rendezvous.rank(number)) for number in range(len(indices))]
        hosts = [DeviceHost(self.supervisors[i], rank) for i, rank in zip(sorted(indices), ranks, strict=True)]
        return ShardedHost(hosts[0], hosts[1:], rendezvous)

    def lock_path(self, index: int) -> str:
        """The file that leaders of divided models lock for each step on this device."""
        if index not in self._locks:
            self._locks[index] = os.memfd_create(f"device-{index}")
        return f"/proc/{os.getpid()}/fd/{self._locks[index]}"

    def health(self) -> tuple[DeviceHealth, ...]:
        """As of the latest sample. The memory of extra replicas counts as free."""
        readings = self.extras.without(self._readings)
        return tuple(self._health(device, readings) for device in self.all)

    async def sample(self) -> None:
        """Reads the devices on a thread, so that a hanging driver does not block the loop."""
        self._readings, package_watts = await asyncio.to_thread(self._read)
        self.watts = {index: each.watts for index, each in self._readings.items() if each.watts is not None}
        on_host = [device.index for device in self.all if device.kind == "cpu"]
        if package_watts is not None:
            self.watts |= dict.fromkeys(on_host, package_watts / max(1, len(on_host)))
        known = [*self.watts.values(), *([] if on_host or package_watts is None else [package_watts])]
        self.total_watts = sum(known) if known else None

    def _read(self) -> tuple[dict[int, DeviceReading], float | None]:
        return self._read_devices(self.all), self._package_power.read()

    async def warm(self) -> None:
        """Imports the engine ahead of the first load."""
        try:
            await self._worker_factory.warm()
        except OSError as error:
            log.warning("the engine cannot be imported ahead of the first load: %s", os_error_in_words(error))

    async def close(self) -> None:
        """Ends all workers, whatever they run."""
        await asyncio.gather(*(supervisor.close() for supervisor in self.supervisors.values()))
        await self._worker_factory.close()
        while self._locks:
            os.close(self._locks.popitem()[1])

    def _health(self, device: Device, readings: Mapping[int, DeviceReading]) -> DeviceHealth:
        reading = readings.get(device.index, DeviceReading(device.total_bytes, 0))
        reserve, supervisor = self._reserve(device), self.supervisors[device.index]
        return DeviceHealth(
            index=device.index,
            total_bytes=reading.total_bytes,
            free_bytes=reading.free_bytes,
            utilisation=reading.utilisation,
            temperature_c=reading.temperature_c,
            watts=self.watts.get(device.index),
            worker=supervisor.state,
            kept_free_bytes=reserve.num_bytes,
            kept_free_share=reserve.share,
            kv_host_bytes=supervisor.kv_host_bytes,
            ceiling_bytes=self._ceilings.on(device.index),
            extra_replica_bytes=reading.free_bytes - self._readings.get(device.index, reading).free_bytes,
            fallbacks=tuple(Fallback(name=name, reason=why) for name, why in sorted(supervisor.fallbacks.items())),
        )


def _backend_of(devices: Sequence[Device]) -> Backend:
    """The communication backend for the ranks of a model on these devices."""
    return "nccl" if all(device.kind == "cuda" for device in devices) else "sockets"


def inventory_of(config: NeuronConfig, look: Callable[[], Inventory] = discover) -> Inventory:
    """The devices that a node with this configuration uses. Only servers can use AMD's cards: they replace the CPU if
    the node has a server, configured or on the PATH, or if nothing else could run. Blocks."""
    inventory = look()
    if usable(config.commands) or missing_packages():
        inventory = with_amd_cards(inventory)
    return divided(inventory, config.cpu_devices)


def warn_of_unknown_devices(entries: Sequence[DeviceEntry], inventory: Inventory) -> None:
    indices = [device.index for device in inventory.devices]
    for entry in entries:
        if entry.index not in indices:
            have = ", ".join(map(str, indices)) or "none"
            log.warning(
                "[[devices]] limits device %d, but this node has %s: the entry has no effect", entry.index, have
            )
