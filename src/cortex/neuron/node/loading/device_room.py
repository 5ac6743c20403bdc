"""Room for models on the devices of the node: which devices a load gets, and which load waits for which."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from cortex.neuron.node.devices import NodeDevices, ReadDevices
from cortex.neuron.node.harness.estimates import Estimates, FileFacts
from cortex.neuron.node.loading.device_choice import ChosenDevices, DeviceChoice
from cortex.neuron.node.loading.library import KnownModel
from cortex.neuron.node.loading.preflight import usable_now
from cortex.neuron.node.memory.ceilings import MemoryCeilings
from cortex.neuron.node.memory.limits import NodeLimits
from cortex.neuron.worker.discovery import DeviceReading
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import LoadRejected, ModelHost, Resident
from cortex.neuron.worker.supervisor import WorkerSupervisor
from cortex.units import gib
from cortex.wire.errors import InsufficientCapacity, LoadFailed
from cortex.wire.node.protocol import Device

_SETTLE_S = 2.0
"""A device may report memory as used for this long after it was freed."""
SETTLE_INTERVAL_S = 0.2


class RoomElsewhere(InsufficientCapacity):
    """A sleeping model has no room on its devices, but has on others."""


class DeviceRoom:
    """Belongs to the daemon's loop.

    Loads onto one device run one after another, so that each sees the memory that the previous one left free. With a
    ceiling for the whole node, all loads do. Loads choose devices as if there were no extra replicas, which then give
    way.
    """

    def __init__(
        self,
        devices: NodeDevices,
        limits: NodeLimits,
        estimates_of: Callable[[KnownModel], Estimates],
        ceilings: MemoryCeilings,
        read_devices: ReadDevices,
    ) -> None:
        """`estimates_of`: those of the model's harness."""
        self._devices = devices.all
        self._supervisors = devices.supervisors
        self._claims = devices.claims
        self._extras = devices.extras
        self._limits = limits
        self._estimates_of = estimates_of
        self._ceilings = ceilings
        self._read_devices = read_devices
        self._device_locks = {device.index: asyncio.Lock() for device in devices.all}
        self._node_lock = asyncio.Lock()
        self._wanted: Counter[int] = Counter()
        """Devices that a load runs on, or waits for."""

    @contextlib.asynccontextmanager
    async def for_load(self, model: KnownModel, facts: FileFacts) -> AsyncIterator[ChosenDevices]:
        """The devices with room for the model, as many as it needs; no other load runs there meanwhile.
        Raises InsufficientCapacity."""
        async with self._alone_under_ceiling(), self._free_devices(model, facts) as chosen:
            yield chosen

    @contextlib.asynccontextmanager
    async def _free_devices(self, model: KnownModel, facts: FileFacts) -> AsyncIterator[ChosenDevices]:
        without_load = tuple(device for device in self._devices if not self._device_locks[device.index].locked())
        try:
            chosen = await self._choose(model, facts, without_load)
        except InsufficientCapacity:
            chosen = await self._choose(model, facts, self._devices)
        async with self._locked(chosen.indices):
            # The load before this one may have taken the memory.
            chosen = await self._choose(model, facts, chosen.devices)
            estimates = self._estimates_of(model)
            expected = [estimates.expected_bytes(model, facts, device) for device in chosen.devices]
            await self._take_back(model.id, chosen.indices, None if model.is_divided else expected)
            yield chosen

    @contextlib.asynccontextmanager
    async def locked(self, indices: tuple[int, ...]) -> AsyncIterator[None]:
        """No other load runs on these devices, and they have no extra replicas."""
        async with self._locked(indices):
            await self._extras.give_back(indices, self._drain_s)
            yield

    @contextlib.asynccontextmanager
    async def _locked(self, indices: tuple[int, ...]) -> AsyncIterator[None]:
        """No other load runs on these devices. Loads that need several of them wait in the same order."""
        self._wanted.update(indices)
        try:
            async with contextlib.AsyncExitStack() as locked:
                for index in sorted(indices):
                    await locked.enter_async_context(self._device_locks[index])
                yield
        finally:
            self._wanted.subtract(indices)

    async def _take_back(self, model_id: str, indices: tuple[int, ...], expected: Sequence[int] | None) -> None:
        """Has extra replicas give way where a device has less than the `expected` bytes left. None: anywhere."""
        readings = await self._read()
        sharing = self._extras.sharing(indices)
        held_bytes = self._extras.num_bytes(sharing, readings)
        if held_bytes == 0 and not self._extras.are_loading(sharing):
            return
        has_room = expected is not None
        for index, need_bytes in zip(indices, expected or (), strict=has_room):
            device = next(device for device in self._devices if device.index == index)
            left_bytes = self._ceilings.left_bytes(index, len(indices), but=model_id)
            left_bytes = None if left_bytes is None else max(0, left_bytes - held_bytes)
            has_room &= usable_now(readings.get(index), self._limits.reserve(device), left_bytes) >= need_bytes
        # Two loads at once would both count on what is free.
        await self._extras.give_back(sharing, self._drain_s, only_loading=has_room)

    async def for_extra(
        self, model: KnownModel, facts: FileFacts, taken: tuple[int, ...]
    ) -> tuple[ChosenDevices, int] | None:
        """A device with room for an extra replica next to everything else, and its free bytes; None if there is none.
        `taken`: see `ReplicatedHost.taken_devices`. The load must start before the loop does anything else."""
        readings = await self._read()
        busy = {
            device.index
            for device in self._devices
            if any(self._wanted[index] for index in self._extras.sharing((device.index,)))
            or self._extras.are_loading(self._extras.sharing((device.index,)))
        }
        excluded = dict.fromkeys(taken, "it has a replica") | dict.fromkeys(busy, "it has a load")

        def left(device: Device) -> int | None:
            left_bytes = self._ceilings.left_bytes(device.index, 1, but="")
            held_bytes = self._extras.num_bytes(self._extras.sharing((device.index,)), readings)
            return None if left_bytes is None else max(0, left_bytes - held_bytes)

        choice = DeviceChoice(model, facts, self._devices, readings, self._estimates_of(model), excluded, left)
        try:
            chosen = choice.choose()
        except InsufficientCapacity:
            return None
        return chosen, readings[chosen.indices[0]].free_bytes

    @property
    def _drain_s(self) -> float:
        return self._limits.config.drain_s

    async def _read(self) -> dict[int, DeviceReading]:
        return await asyncio.to_thread(self._read_devices, self._devices)

    @contextlib.asynccontextmanager
    async def _alone_under_ceiling(self) -> AsyncIterator[None]:
        """With a ceiling for the whole node, no other load runs, so that two cannot exceed it together."""
        if self._ceilings.configured.node_bytes is None:
            yield
        else:
            async with self._node_lock:
                yield

    @contextlib.asynccontextmanager
    async def for_wake(self, model_id: str, host: ModelHost, resident: Resident) -> AsyncIterator[None]:
        """No other load runs on the devices of the sleeping model. Raises InsufficientCapacity."""
        async with self._alone_under_ceiling(), self._locked(host.device_indices):
            self._check_ceilings(model_id, host.device_indices, resident)
            need = resident.device_bytes(len(host.device_indices))
            await self._take_back(model_id, host.device_indices, need)
            yield

    async def has_room_elsewhere(
        self,
        error: InsufficientCapacity | LoadRejected,
        model: KnownModel,
        facts: FileFacts,
        host: ModelHost,
        resident: Resident,
    ) -> bool:
        """Whether a sleeping model that did not wake because of `error` would find other devices if it were loaded."""
        if isinstance(error, LoadRejected):
            if error.has_room_elsewhere is not None:
                return error.has_room_elsewhere
            if error.kind is not FaultKind.OUT_OF_MEMORY:
                return False
        try:
            chosen = await self._choose(model, facts, self._devices)
        except (InsufficientCapacity, LoadFailed):
            return False
        if chosen.free_bytes and sum(chosen.free_bytes) < resident.measured_bytes:  # its layers are divided
            return False
        return set(chosen.indices) != set(host.device_indices)

    def _check_ceilings(self, model_id: str, devices: tuple[int, ...], resident: Resident) -> None:
        """Raises InsufficientCapacity where a ceiling has no room for the model, awake."""
        for index, need_bytes in zip(devices, resident.device_bytes(len(devices)), strict=True):
            left_bytes = self._ceilings.left_bytes(index, len(devices), but=model_id)
            if left_bytes is not None and need_bytes > left_bytes:
                raise InsufficientCapacity(
                    f"{model_id} needs {gib(need_bytes)} on device {index} to wake up, but other"
                    f" models leave {gib(left_bytes)} of memory_mb; unload something, or raise it"
                )

    async def _choose(self, model: KnownModel, facts: FileFacts, candidates: tuple[Device, ...]) -> ChosenDevices:
        """Waits a moment for memory that was just freed, then raises InsufficientCapacity."""
        while True:
            readings = self._extras.without(await self._read())
            try:
                return DeviceChoice(
                    model,
                    facts,
                    candidates,
                    readings,
                    self._estimates_of(model),
                    excluded=self._claims.conflicts(spans=bool(model.nodes)) if model.is_divided else {},
                    left=lambda device: self._ceilings.left_bytes(device.index, model.num_devices, but=model.id),
                ).choose()
            except InsufficientCapacity:
                if not any(map(is_settling, self._supervisors.values())):
                    raise
            await asyncio.sleep(SETTLE_INTERVAL_S)


async def wake_settled(host: ModelHost) -> None:
    """Wakes a model, after waiting a moment for memory that was just freed. Raises as `ModelHost.wake` does."""
    # Read before the first attempt: an attempt that fails frees memory itself.
    settled_at_s = host.freed_at_s + _SETTLE_S
    while True:
        try:
            await host.wake()
        except LoadRejected as error:
            if error.kind is not FaultKind.OUT_OF_MEMORY or asyncio.get_running_loop().time() > settled_at_s:
                raise
        else:
            return
        await asyncio.sleep(SETTLE_INTERVAL_S)


def is_settling(supervisor: WorkerSupervisor) -> bool:
    """Whether memory was freed there just now, so that a reading of it may be too low."""
    return asyncio.get_running_loop().time() - supervisor.freed_at_s <= _SETTLE_S
