"""Host memory for the weights of sleeping models: how much they may use, and which are unloaded for another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from cortex.neuron.engine.memory.host import HostMemory
from cortex.wire.node.protocol import Device

HOST_SHARE = 0.5
"""The share of free host memory that sleeping models may use, unless `limits.sleep_mb` is set."""


@dataclass(frozen=True, slots=True)
class SleepingModel:
    """A model whose weights are in host memory: it is asleep, or waking."""

    model_id: str
    host_bytes: int
    idle_s: float
    """Seconds since its last request ended."""
    can_be_unloaded: bool
    """False while it wakes."""


@dataclass(frozen=True, slots=True)
class SleepPlan:
    """Whether another model fits, and which sleeping models must be unloaded for it first."""

    fits: bool
    to_unload: tuple[str, ...] = ()


def make_room(need_bytes: int, budget_bytes: int, sleeping: Sequence[SleepingModel]) -> SleepPlan:
    """Unloads the longest idle models first, and none where `need_bytes` would not fit even then."""
    held_bytes = sum(each.host_bytes for each in sleeping)
    to_unload: list[str] = []
    candidates = (each for each in sleeping if each.can_be_unloaded)
    for each in sorted(candidates, key=lambda each: (-each.idle_s, each.model_id)):
        if held_bytes + need_bytes <= budget_bytes:
            break
        to_unload.append(each.model_id)
        held_bytes -= each.host_bytes
    fits = held_bytes + need_bytes <= budget_bytes
    return SleepPlan(fits, tuple(to_unload) if fits else ())


def can_sleep(sleep_mb: int | None, devices: Sequence[Device]) -> bool:
    """Whether any model of the node may sleep. On a CPU the weights are in host memory anyway: sleep frees little."""
    return any(device.kind == "cuda" for device in devices) if sleep_mb is None else sleep_mb > 0


def sleep_budget_bytes(sleep_mb: int | None, devices: Sequence[Device], host: HostMemory, held_bytes: int) -> int:
    """Host memory that sleeping models may use in all; they hold `held_bytes` of it already."""
    if not can_sleep(sleep_mb, devices):
        return 0
    if sleep_mb is not None:
        return sleep_mb << 20
    return int((host.free_bytes + held_bytes) * HOST_SHARE)


class SleepBudget:
    """One for all models of the node, on the daemon's loop. Models fall asleep one after another."""

    def __init__(
        self,
        budget_bytes: Callable[[int], int],
        sleeping: Callable[[], Sequence[SleepingModel]],
        unload: Callable[[str], Awaitable[None]],
        leave: Callable[[int], None],
    ) -> None:
        """`budget_bytes`: the budget, given the bytes held. `unload`: unloads a model if it is still asleep. `leave`:
        gets what sleeping models leave of the budget: others, who give way to them, may use it."""
        self._budget_bytes = budget_bytes
        self._sleeping = sleeping
        self._unload = unload
        self._leave = leave
        self._lock = asyncio.Lock()
        self._taken_bytes = 0
        """What sleeping models took of the budget when others were last given the rest."""

    @contextlib.asynccontextmanager
    async def reserve(self, need_bytes: int) -> AsyncIterator[bool]:
        """Makes room for `need_bytes` and keeps it while the context is open. Yields whether there is room."""
        async with self._lock:
            budget = await asyncio.to_thread(self._budget_bytes, sum(each.host_bytes for each in self._sleeping()))
            room = make_room(need_bytes, budget, self._sleeping())
            for model_id in room.to_unload:
                await self._unload(model_id)
            if room.fits:
                self._leave_rest(budget, need_bytes + sum(each.host_bytes for each in self._sleeping()))
            # One of them may have been woken instead of unloaded.
            yield room.fits and make_room(need_bytes, budget, self._sleeping()) == SleepPlan(fits=True)

    def settle(self) -> None:
        """Others get what models took that have woken, were unloaded, or did not fall asleep after all."""
        taken_bytes = sum(each.host_bytes for each in self._sleeping())
        if taken_bytes < self._taken_bytes and not self._lock.locked():
            self._leave_rest(self._budget_bytes(taken_bytes), taken_bytes)

    def _leave_rest(self, budget_bytes: int, taken_bytes: int) -> None:
        self._taken_bytes = taken_bytes
        self._leave(budget_bytes - taken_bytes)
