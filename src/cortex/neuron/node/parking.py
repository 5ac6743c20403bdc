"""Room in host memory for the weights of sleeping models: how much there is, and who leaves for a newcomer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from cortex.neuron.engine.memory.host import HostMemory
from cortex.wire.node import Device

HOST_SHARE = 0.5
"""Of the host memory that nobody else uses, what sleeping models may take unless the operator says otherwise."""


@dataclass(frozen=True, slots=True)
class Parked:
    """A model whose weights are in host memory for its sleep."""

    model_id: str
    host_bytes: int
    idle_s: float
    """Since its last request ended."""
    may_leave: bool
    """False while it wakes: somebody wants it now."""


@dataclass(frozen=True, slots=True)
class Room:
    """Whether a newcomer fits, and who has to leave for it first."""

    fits: bool
    leaving: tuple[str, ...] = ()


def make_room(need_bytes: int, budget_bytes: int, parked: Sequence[Parked]) -> Room:
    """The coldest leave until the newcomer fits; nobody does where it would not even then."""
    held_bytes = sum(each.host_bytes for each in parked)
    leaving: list[str] = []
    for each in sorted((each for each in parked if each.may_leave), key=lambda each: (-each.idle_s, each.model_id)):
        if held_bytes + need_bytes <= budget_bytes:
            break
        leaving.append(each.model_id)
        held_bytes -= each.host_bytes
    fits = held_bytes + need_bytes <= budget_bytes
    return Room(fits, tuple(leaving) if fits else ())


def budget_bytes(parked_mb: int | None, devices: Sequence[Device], host: HostMemory, held_bytes: int) -> int:
    """What sleeping models may take of host memory, `held_bytes` of which they have already."""
    if parked_mb is not None:
        return parked_mb << 20
    if not any(device.kind == "cuda" for device in devices):
        return 0  # weights that are in host memory anyway gain nothing by staying there
    return int((host.free_bytes + held_bytes) * HOST_SHARE)


class Parking:
    """One for all models of the node, on the daemon's loop. Models are parked one after another."""

    def __init__(
        self,
        budget: Callable[[int], int],
        parked: Callable[[], Sequence[Parked]],
        dismiss: Callable[[str], Awaitable[None]],
    ) -> None:
        """`budget`: the bytes there are, from those held. `dismiss` unloads a model unless it has left its sleep."""
        self._budget = budget
        self._parked = parked
        self._dismiss = dismiss
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def room(self, need_bytes: int) -> AsyncIterator[bool]:
        """Whether there is room for so many bytes, kept for as long as this is entered; the coldest made it."""
        async with self._lock:
            budget = await asyncio.to_thread(self._budget, sum(each.host_bytes for each in self._parked()))
            room = make_room(need_bytes, budget, self._parked())
            for model_id in room.leaving:
                await self._dismiss(model_id)
            # One of those may have been woken instead of leaving.
            yield room.fits and make_room(need_bytes, budget, self._parked()) == Room(fits=True)
