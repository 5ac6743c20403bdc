"""Allocates the node's devices and their memory to loads, which may have to wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from cortex.formats.units import gib
from cortex.neuron.node.devices import NodeDevices, ReadDevices
from cortex.neuron.node.harness.estimates import Estimates, FileMetadata, NodeLimits
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.loading.device_choice import DeviceChoice, usable_now
from cortex.neuron.node.loading.loads_in_progress import LoadsInProgress, OnWait, Turn
from cortex.neuron.node.memory.allocation import ChosenDevices, DeviceAllocation, Reservation
from cortex.neuron.node.memory.ceilings import MemoryCeilings, ModelHolding, smallest
from cortex.neuron.worker.discovery import DeviceReading
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import LoadRejected, ModelHost, Resident
from cortex.neuron.worker.supervisor import WorkerSupervisor
from cortex.wire.errors import InsufficientCapacity, LoadFailed
from cortex.wire.node.host_splits import HostSplit
from cortex.wire.node.protocol import Device

_SETTLE_S = 2.0
"""A device may report memory as used for this long after it was freed."""
SETTLE_INTERVAL_S = 0.2


class MemoryElsewhere(InsufficientCapacity):
    """A sleeping model no longer fits on its devices, but fits on others."""


class DeviceAllocator:
    """Belongs to the daemon's loop.

    A load is decided alone and reserves the memory that it may take. Then it runs concurrently with others, up to
    `limits.max_loads`; only loads in the same worker take turns, in order of arrival. A load that would fit without the
    reservations of others waits until one of them ends. Loads choose devices as if there were no extra replicas, which
    are then unloaded.
    """

    def __init__(
        self,
        devices: NodeDevices,
        limits: NodeLimits,
        estimates_of: Callable[[KnownModel], Estimates],
        ceilings: MemoryCeilings,
        read_devices: ReadDevices,
        leaving: Callable[[bool], list[ModelHolding]] = lambda _: [],
    ) -> None:
        """`estimates_of`: the estimates of the model's harness. `leaving`: the models that are being unloaded, given
        whether sleep frees the devices."""
        self._devices = devices.all
        self._supervisors = devices.supervisors
        self._extras = devices.extras
        self._limits = limits
        self._estimates_of = estimates_of
        self._ceilings = ceilings
        self._read_devices = read_devices
        self.sleep_frees = devices.all[0].kind != "cpu"
        """Whether sleeping models free the devices; not on a CPU, whose memory is the host's."""
        self._leaving = partial(leaving, self.sleep_frees)
        self._loads = LoadsInProgress(devices.all)
        self._deciding = asyncio.Lock()
        """Held while the devices are read and a load is decided, so that no two loads count on the same memory."""

    @contextlib.asynccontextmanager
    async def for_load(
        self, model: KnownModel, metadata: FileMetadata, on_wait: OnWait = lambda _: None
    ) -> AsyncIterator[DeviceAllocation]:
        """The devices with room for the model, as many as it needs. Raises InsufficientCapacity."""
        async with contextlib.AsyncExitStack() as held:
            in_worker = self._estimates_of(model).loads_in_worker
            turn = held.enter_context(self._loads.queued(model.id)) if in_worker else None
            chosen, reservation = await self._reserve(model, metadata, turn, on_wait)
            held.callback(self._loads.end, reservation)
            await self._take_back(reservation, is_whole=not model.is_divided)
            on_wait(None)
            yield DeviceAllocation(chosen, partial(self._for_reload, model, metadata), reservation)

    async def split(self, model: KnownModel, metadata: FileMetadata, host_bytes: int) -> HostSplit | str:
        """The weights that a load may put into the `host_bytes` of free host memory, next to the loads in progress; or
        why that is impossible."""
        readings = self._extras.without(await self._read())
        return self._choice(model, metadata, self._devices, readings, counts_loads=True).split(host_bytes)

    async def _reserve(
        self, model: KnownModel, metadata: FileMetadata, turn: Turn | None, on_wait: OnWait
    ) -> tuple[ChosenDevices, Reservation]:
        """Decides when the load can start, from the state of the devices then. Raises InsufficientCapacity if the model
        would have no room even without other loads and after the unloads in progress."""
        while True:
            async with self._deciding:
                is_settling = any(map(_is_settling, self._supervisors.values()))
                reason = None
                if len(self._loads) >= (most := self._limits.config.limits.max_loads):
                    reason = f"waits for one of {most} loads to end (limits.max_loads)"
                else:
                    readings = self._extras.without(await self._read())
                    choice = self._choice(model, metadata, self._devices, readings, counts_loads=True)
                    try:
                        chosen = self._best(choice, turn)
                    except InsufficientCapacity:
                        if not is_settling:
                            reason = self._awaited(model, metadata, readings, turn)
                    else:
                        reason = None if turn is None else self._loads.start(turn, chosen.indices)
                        if reason is None:
                            return chosen, self._begin(model, metadata, choice, chosen)
                changed = self._loads.changed
            if reason is not None:
                on_wait(reason)
            await self._loads.wait(changed, *((SETTLE_INTERVAL_S,) if is_settling else ()))

    def _best(self, choice: DeviceChoice, turn: Turn | None) -> ChosenDevices:
        """Prefers devices where no other load runs. Raises InsufficientCapacity."""
        if turn is not None and (busy := self._loads.busy_devices(turn)):
            idle = tuple(device for device in self._devices if device.index not in busy)
            with contextlib.suppress(InsufficientCapacity):
                return replace(choice, devices=idle).choose()
        return choice.choose()

    def _begin(
        self, model: KnownModel, metadata: FileMetadata, choice: DeviceChoice, chosen: ChosenDevices
    ) -> Reservation:
        """Reserves the expected size of the load on its devices. Reserves the maximum if its parts or its size are
        unknown."""
        estimates = self._estimates_of(model)
        sizes = {device.index: choice.usable_bytes(device) for device in chosen.devices}
        if not model.is_divided:
            expected = {each.index: estimates.expected_bytes(model, metadata, each) for each in chosen.devices}
            sizes = {index: min(size, expected[index] or size) for index, size in sizes.items()}
        reservation = Reservation(model.id, sizes)
        self._loads.begin(reservation)
        return reservation

    @contextlib.asynccontextmanager
    async def _for_reload(
        self, model: KnownModel, metadata: FileMetadata, indices: tuple[int, ...]
    ) -> AsyncIterator[None]:
        """Reserves memory for a lost part of a loaded model on the same devices, after unloading their extra
        replicas."""
        estimates = self._estimates_of(model)
        need = {each.index: estimates.expected_bytes(model, metadata, each) for each in self._devices}
        async with (
            self._loads.turn(model.id, indices, lambda _: None),
            self._reserved(Reservation(model.id, {index: need[index] for index in indices}), lambda _: None),
        ):
            await self._extras.give_back(indices, self._drain_s)
            yield

    @contextlib.asynccontextmanager
    async def _reserved(self, reservation: Reservation, on_wait: OnWait) -> AsyncIterator[None]:
        """Reserves memory of given devices once the loads and unloads in progress leave enough. If they never do, the
        load itself fails."""
        indices = reservation.device_bytes.keys()
        while True:
            async with self._deciding:
                free = self._extras.without(await self._read())
                left, soon = self._loads.applied(free), self._after_unloads(free, self._leaving())
                needs = {index: reservation.outstanding_bytes(index) for index in indices & free.keys()}
                changed = self._loads.changed
                if not any(left[index].free_bytes < need <= soon[index].free_bytes for index, need in needs.items()):
                    self._loads.begin(reservation)
                    break
                is_free = all(need <= free[index].free_bytes for index, need in needs.items())
            on_wait(self._loads.memory_awaited(indices) if is_free else self._unloads_awaited())
            await self._loads.wait(changed, *(() if is_free else (SETTLE_INTERVAL_S,)))
        try:
            on_wait(None)
            yield
        finally:
            self._loads.end(reservation)

    async def _take_back(self, reservation: Reservation, *, is_whole: bool = True) -> None:
        """Unloads extra replicas if a device has less free memory than reserved; for a divided model, on all its
        devices."""
        own = reservation.device_bytes
        readings = await self._read()
        sharing = self._extras.sharing(own)
        held_bytes = self._extras.num_bytes(sharing, readings)
        if held_bytes == 0 and not self._extras.are_loading(sharing):
            return
        others = self._loads.applied(readings, but=reservation)
        has_room = is_whole
        for device in self._devices:
            if device.index not in own:
                continue
            left_bytes = self._left_bytes(device, len(own), reservation.model_id)
            left_bytes = None if left_bytes is None else max(0, left_bytes - held_bytes)
            usable_bytes = usable_now(others.get(device.index), self._limits.reserve(device), left_bytes)
            has_room &= usable_bytes >= reservation.outstanding_bytes(device.index)
        # Two loads at once would both count on the same free memory.
        await self._extras.give_back(sharing, self._drain_s, only_loading=has_room)

    async def for_extra(
        self, model: KnownModel, metadata: FileMetadata, taken: tuple[int, ...]
    ) -> tuple[ChosenDevices, int] | None:
        """A device with room for an extra replica next to everything else, and its free bytes; None if there is none.
        `taken`: see `ReplicatedHost.taken_devices`. The load must start before the loop does anything else."""
        readings = await self._read()
        loading = self._loads.devices
        busy = {
            device.index
            for device in self._devices
            if not loading.isdisjoint(sharing := self._extras.sharing((device.index,)))
            or self._extras.are_loading(sharing)
        }
        excluded = dict.fromkeys(taken, "it has a replica") | dict.fromkeys(busy, "it has a load")

        def left(device: Device) -> int | None:
            left_bytes = self._left_bytes(device, 1, "")
            held_bytes = self._extras.num_bytes(self._extras.sharing((device.index,)), readings)
            return None if left_bytes is None else max(0, left_bytes - held_bytes)

        choice = DeviceChoice(model, metadata, self._devices, readings, self._estimates_of(model), excluded, left)
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
    async def for_wake(
        self, model: KnownModel, host: ModelHost, resident: Resident, on_wait: OnWait = lambda _: None
    ) -> AsyncIterator[None]:
        """Reserves memory for the sleeping model on its devices. Raises InsufficientCapacity."""
        indices = host.device_indices
        sizes = dict(zip(indices, resident.device_bytes(len(indices)), strict=True))
        async with contextlib.AsyncExitStack() as held:
            if self._estimates_of(model).loads_in_worker:
                await held.enter_async_context(self._loads.turn(model.id, indices, on_wait))
            reservation = Reservation(model.id, sizes, taken_bytes=resident.process_bytes)
            await held.enter_async_context(self._reserved(reservation, on_wait))
            self._check_ceilings(model.id, sizes)
            await self._take_back(reservation)
            yield

    async def has_room_elsewhere(
        self,
        error: InsufficientCapacity | LoadRejected,
        model: KnownModel,
        metadata: FileMetadata,
        host: ModelHost,
    ) -> bool:
        """Whether a sleeping model that did not wake because of `error` would find other devices if it were loaded."""
        if isinstance(error, LoadRejected):
            if error.has_room_elsewhere is not None:
                return error.has_room_elsewhere
            if error.kind is not FaultKind.OUT_OF_MEMORY:
                return False
        try:
            chosen = await self._choose_alone(model, metadata)
        except (InsufficientCapacity, LoadFailed):
            return False
        return set(chosen.indices) != set(host.device_indices)

    async def fits_without(self, model: KnownModel, metadata: FileMetadata, leaving: Sequence[ModelHolding]) -> bool:
        """Whether a load would find room if these models were unloaded first."""
        readings = self._after_unloads(self._extras.without(await self._read()), leaving)
        gone = {holding.model_id for holding in leaving}
        try:
            self._choice(model, metadata, self._devices, readings, gone=gone).choose()
        except InsufficientCapacity:
            return False
        return True

    def _check_ceilings(self, model_id: str, sizes: Mapping[int, int]) -> None:
        """Raises InsufficientCapacity where a ceiling has no room for the model, awake."""
        for device in self._devices:
            need_bytes = sizes.get(device.index, 0)
            left_bytes = self._left_bytes(device, len(sizes), model_id)
            if left_bytes is not None and need_bytes > left_bytes:
                raise InsufficientCapacity(
                    f"{model_id} needs {gib(need_bytes)} on device {device.index} to wake up, but other"
                    f" models leave {gib(left_bytes)} of memory_mb; unload something, or raise it"
                )

    def _left_bytes(self, device: Device, num_devices: int, model_id: str) -> int | None:
        """Bytes under the operator's ceilings that other models and loads in progress leave to the model."""
        loading = self._loads.holdings()
        return self._ceilings.left_bytes(device.index, num_devices, but=model_id, loading=loading)

    def _choice(
        self,
        model: KnownModel,
        metadata: FileMetadata,
        candidates: tuple[Device, ...],
        readings: Mapping[int, DeviceReading],
        *,
        counts_loads: bool = False,
        gone: Collection[str] = (),
    ) -> DeviceChoice:
        """`counts_loads`: the memory that loads in progress may still take is not free. `gone`: models that count as
        unloaded."""
        estimates = self._estimates_of(model)
        after_loads = self._loads.applied(readings) if counts_loads else readings

        def left(device: Device) -> int | None:
            if not counts_loads:
                return self._ceilings.left_bytes(device.index, model.num_devices, but=model.id, gone=gone)
            left_bytes = self._left_bytes(device, model.num_devices, model.id)
            if not self._loads.affecting((device.index,)):
                return left_bytes
            # Its own reading during the load would show more.
            return smallest(left_bytes, usable_now(after_loads.get(device.index), estimates.reserve(device), None))

        return DeviceChoice(model, metadata, candidates, after_loads, estimates, left=left)

    async def _choose_alone(self, model: KnownModel, metadata: FileMetadata) -> ChosenDevices:
        """Choose as if no other load were in progress. Waits for memory that is being freed, or was a moment ago,
        before it raises InsufficientCapacity."""
        while True:
            readings = self._extras.without(await self._read())
            try:
                return self._choice(model, metadata, self._devices, readings).choose()
            except InsufficientCapacity:
                if not any(map(_is_settling, self._supervisors.values())):
                    self._awaited(model, metadata, readings, None)
            await asyncio.sleep(SETTLE_INTERVAL_S)

    def _awaited(
        self, model: KnownModel, metadata: FileMetadata, readings: Mapping[int, DeviceReading], turn: Turn | None
    ) -> str:
        """What a load that does not fit must wait for. Sets the devices of `turn` to those that the load will take.
        Raises InsufficientCapacity if nothing in progress frees enough."""
        try:
            indices = self._choice(model, metadata, self._devices, readings).choose().indices
            reason = self._loads.memory_awaited(indices)
        except InsufficientCapacity as error:
            gone = {holding.model_id for holding in self._leaving()}
            try:
                soon = self._after_unloads(readings, self._leaving())
                indices = self._choice(model, metadata, self._devices, soon, gone=gone).choose().indices
            except InsufficientCapacity:
                raise error from None
            reason = self._unloads_awaited()
        if turn is not None:
            turn.indices = frozenset(indices)
        return reason

    def _unloads_awaited(self) -> str:
        names = dict.fromkeys(holding.model_id for holding in self._leaving())
        return f"waits for the unload of {', '.join(names)}"

    def _after_unloads(
        self, readings: Mapping[int, DeviceReading], leaving: Sequence[ModelHolding]
    ) -> dict[int, DeviceReading]:
        """The readings as they will be once these models are unloaded, at most."""
        shares = sum(device.kind == "cpu" for device in self._devices)

        def freed(index: int) -> int:
            if shares:
                return sum(sum(holding.freed_bytes) for holding in leaving) // shares
            return sum(dict(zip(each.devices, each.freed_bytes, strict=True)).get(index, 0) for each in leaving)

        return {
            index: replace(reading, free_bytes=min(reading.total_bytes, reading.free_bytes + freed(index)))
            for index, reading in readings.items()
        }


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


def _is_settling(supervisor: WorkerSupervisor) -> bool:
    """Whether memory was freed there just now, so that a reading of it may be too low."""
    return asyncio.get_running_loop().time() - supervisor.freed_at_s <= _SETTLE_S
