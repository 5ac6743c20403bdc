"""The loads in progress on a node: the memory that each may still take, their turns in workers, and what others wait
for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cortex.neuron.node.memory.allocation import Reservation
from cortex.neuron.node.memory.ceilings import ModelHolding
from cortex.neuron.worker.discovery import DeviceReading
from cortex.wire.node.protocol import Device

_RECHECK_S = 1.0
"""Interval at which a waiting load looks for room, because a model may have been unloaded meanwhile."""

OnWait = Callable[[str | None], None]
"""Receives what a load waits for; None when it no longer waits."""


@dataclass(eq=False, slots=True)
class Turn:
    """A load that runs in its devices' workers, or waits to."""

    model_id: str
    indices: frozenset[int] = frozenset()
    """The devices that it takes, by the latest decision."""
    runs: bool = False


class LoadsInProgress:
    """Belongs to the daemon's loop. Iterates over the reservations, the first to begin first."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._reservations: list[Reservation] = []
        self._num_host_shares = sum(device.kind == "cpu" for device in devices)
        self._turns: list[Turn] = []
        """In the order of their arrival."""
        self.changed = asyncio.Event()
        """Set, and replaced, when a load has ended."""

    def __iter__(self) -> Iterator[Reservation]:
        return iter(self._reservations)

    def __len__(self) -> int:
        return len(self._reservations)

    # Memory

    def begin(self, reservation: Reservation) -> None:
        for other in self._reservations:
            if not other.device_bytes.keys().isdisjoint(reservation.device_bytes):
                other.was_alone = reservation.was_alone = False
        self._reservations.append(reservation)

    def end(self, reservation: Reservation) -> None:
        self._reservations.remove(reservation)
        self._notify()

    def affecting(self, indices: Collection[int]) -> list[Reservation]:
        """The loads that take memory from these devices. CPU devices share the host's memory."""
        if self._num_host_shares:
            return list(self._reservations)
        return [each for each in self._reservations if not each.device_bytes.keys().isdisjoint(indices)]

    def applied(
        self, readings: Mapping[int, DeviceReading], *, but: Reservation | None = None
    ) -> dict[int, DeviceReading]:
        """The readings after every load in progress, except `but`, has taken its memory."""
        others = [each for each in self._reservations if each is not but]
        return {
            index: replace(reading, free_bytes=max(0, reading.free_bytes - self._outstanding_bytes(index, others)))
            for index, reading in readings.items()
        }

    def _outstanding_bytes(self, index: int, loads: Sequence[Reservation]) -> int:
        if not self._num_host_shares:
            return sum(each.outstanding_bytes(index) for each in loads)
        # A CPU device has a share of the host's free memory, and loses the same share of what any load takes.
        whole = sum(each.outstanding_bytes(own) for each in loads for own in each.device_bytes)
        return whole // self._num_host_shares

    def holdings(self) -> list[ModelHolding]:
        """The loads in progress as models that hold all of their memory."""
        return [
            ModelHolding(each.model_id, tuple(each.device_bytes), tuple(each.device_bytes.values()))
            for each in self._reservations
        ]

    # Turns

    @contextlib.contextmanager
    def queued(self, model_id: str) -> Iterator[Turn]:
        """A place in the queue of loads in workers, which run in order of arrival."""
        turn = Turn(model_id)
        self._turns.append(turn)
        try:
            yield turn
        finally:
            self._turns.remove(turn)
            self._notify()

    def start(self, turn: Turn, indices: Collection[int]) -> str | None:
        """Starts the load in the workers of these devices, or returns what it waits for."""
        turn.indices = frozenset(indices)
        for other in self._ahead_of(turn):
            if shared := turn.indices & other.indices:
                return f"waits for the load of {other.model_id} on device {', '.join(map(str, sorted(shared)))}"
        turn.runs = True
        return None

    @contextlib.asynccontextmanager
    async def turn(self, model_id: str, indices: Collection[int], on_wait: OnWait) -> AsyncIterator[None]:
        """A context in which no other load runs in the workers of these devices."""
        with self.queued(model_id) as turn:
            while (reason := self.start(turn, indices)) is not None:
                on_wait(reason)
                await self.wait(self.changed)
            yield

    def busy_devices(self, turn: Turn) -> frozenset[int]:
        """The devices where the load would wait for others."""
        return frozenset[int]().union(*(other.indices for other in self._ahead_of(turn)))

    def _ahead_of(self, turn: Turn) -> list[Turn]:
        place = self._turns.index(turn)
        return [other for at, other in enumerate(self._turns) if at < place or (other.runs and at > place)]

    @property
    def devices(self) -> frozenset[int]:
        """Where any load runs, or waits."""
        turns = (turn.indices for turn in self._turns)
        return frozenset[int]().union(*turns, *(each.device_bytes for each in self._reservations))

    # Waiting

    def memory_awaited(self, indices: Collection[int]) -> str:
        """What a load must wait for that would fit these devices without others."""
        names = dict.fromkeys(each.model_id for each in self.affecting(indices))
        return f"waits for the load of {', '.join(names)}, which may take the memory that it needs"

    async def wait(self, changed: asyncio.Event, timeout_s: float = _RECHECK_S) -> None:
        """Returns when a load has ended since `changed` was read, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await changed.wait()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
