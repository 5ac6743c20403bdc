"""Room for models on the devices of the node: which devices a load gets, and who waits for whom."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from cortex.neuron.node.devices import NodeDevices, ReadDevices
from cortex.neuron.node.loading.device_choice import ChosenDevices, DeviceChoice
from cortex.neuron.node.loading.forecast import Forecast
from cortex.neuron.node.loading.library import KnownModel
from cortex.neuron.node.loading.preflight import ModelFacts
from cortex.neuron.node.memory.ceilings import MemoryCeilings
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import LoadRejected, ModelHost, Resident
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
    ceiling for the whole node, all loads do.
    """

    def __init__(
        self, devices: NodeDevices, forecast: Forecast, ceilings: MemoryCeilings, read_devices: ReadDevices
    ) -> None:
        self._devices = devices.all
        self._supervisors = devices.supervisors
        self._claims = devices.claims
        self._forecast = forecast
        self._ceilings = ceilings
        self._read_devices = read_devices
        self._device_locks = {device.index: asyncio.Lock() for device in devices.all}
        self._node_lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def for_load(self, model: KnownModel, facts: ModelFacts) -> AsyncIterator[ChosenDevices]:
        """The devices with room for the model, as many as it needs; no other load runs there meanwhile.
        Raises InsufficientCapacity."""
        async with self._alone_under_ceiling(), self._free_devices(model, facts) as chosen:
            yield chosen

    @contextlib.asynccontextmanager
    async def _free_devices(self, model: KnownModel, facts: ModelFacts) -> AsyncIterator[ChosenDevices]:
        without_load = tuple(device for device in self._devices if not self._device_locks[device.index].locked())
        try:
            chosen = await self._choose(model, facts, without_load)
        except InsufficientCapacity:
            chosen = await self._choose(model, facts, self._devices)
        async with self.locked(chosen.indices):
            # The load before this one may have taken the memory.
            yield await self._choose(model, facts, chosen.devices)

    @contextlib.asynccontextmanager
    async def locked(self, indices: tuple[int, ...]) -> AsyncIterator[None]:
        """No other load runs on these devices. Loads that need several of them wait in the same order."""
        async with contextlib.AsyncExitStack() as locked:
            for index in sorted(indices):
                await locked.enter_async_context(self._device_locks[index])
            yield

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
        async with self._alone_under_ceiling(), self.locked(host.device_indices):
            self._check_ceilings(model_id, host.device_indices, resident)
            yield

    async def has_room(self, model: KnownModel, facts: ModelFacts, need_bytes: int) -> bool:
        """Whether a load would find devices now. `need_bytes`: what they must give, if the layers are divided."""
        try:
            chosen = await self._choose(model, facts, self._devices)
        except (InsufficientCapacity, LoadFailed):
            return False
        return not chosen.free_bytes or sum(chosen.free_bytes) >= need_bytes

    def _check_ceilings(self, model_id: str, devices: tuple[int, ...], resident: Resident) -> None:
        """Raises InsufficientCapacity where a ceiling has no room for the model, awake."""
        for index, need_bytes in zip(devices, resident.device_bytes(len(devices)), strict=True):
            left_bytes = self._ceilings.left_bytes(index, len(devices), but=model_id)
            if left_bytes is not None and need_bytes > left_bytes:
                raise InsufficientCapacity(
                    f"{model_id} needs {need_bytes / 1e9:.2f} GB on device {index} to wake up, but other"
                    f" models leave {left_bytes / 1e9:.2f} GB of memory_mb; unload something, or raise it"
                )

    async def _choose(self, model: KnownModel, facts: ModelFacts, candidates: tuple[Device, ...]) -> ChosenDevices:
        """Waits a moment for memory that was just freed, then raises InsufficientCapacity."""
        while True:
            readings = await asyncio.to_thread(self._read_devices, self._devices)
            try:
                return DeviceChoice(
                    model,
                    facts,
                    candidates,
                    readings,
                    self._forecast,
                    excluded=self._claims.conflicts(spans=bool(model.nodes)) if model.is_divided else {},
                    left=lambda device: self.left_bytes(model, device),
                ).choose()
            except InsufficientCapacity:
                if not any(map(is_settling, self._supervisors.values())):
                    raise
            await asyncio.sleep(SETTLE_INTERVAL_S)

    def left_bytes(self, model: KnownModel, device: Device) -> int | None:
        return self._ceilings.left_bytes(device.index, model.num_devices, but=model.id)


async def wake_settled(host: ModelHost, resident: Resident) -> Resident:
    """Wakes a model, after waiting a moment for memory that was just freed. Raises as `ModelHost.wake` does."""
    # Of before: an attempt that fails frees memory itself.
    settled_at_s = host.freed_at_s + _SETTLE_S
    while True:
        try:
            return await host.wake(resident)
        except LoadRejected as error:
            if error.kind is not FaultKind.OUT_OF_MEMORY or asyncio.get_running_loop().time() > settled_at_s:
                raise
        await asyncio.sleep(SETTLE_INTERVAL_S)


def is_settling(host: ModelHost) -> bool:
    """Whether memory was freed there just now, so that a reading of it may be too low."""
    return asyncio.get_running_loop().time() - host.freed_at_s <= _SETTLE_S
