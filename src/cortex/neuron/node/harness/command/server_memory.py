"""The device memory of a server: held at its start and while it serves, and freed at its end."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cortex.formats.units import gib
from cortex.neuron.node.harness.command.estimates import quantile
from cortex.neuron.node.harness.command.server_process import ServerProcess
from cortex.neuron.worker.memory import Reclaimed
from cortex.system.tasks import run_once

log = logging.getLogger(__name__)

_WATCH_SHARE = 0.02
"""Maximum share of time for measurements: the kernel needs some time per GiB."""
_MAX_SAMPLES = 720
_GROWTH = 1.25
"""A server that has grown by this factor is reported."""
_NOISE_BYTES = 16 << 20
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The places of the server's memory. Every method reads on a thread."""

    indices: tuple[int, ...]
    free_bytes: Callable[[], int] | None
    """Total free memory of the GPUs; blocks. None if the server uses host memory, which its processes show."""
    expected_bytes: int
    process_bytes: Callable[[list[int]], int | None] = lambda _: None
    """GPU memory of these processes; None if the driver does not know them, as in a container. Blocks."""
    took: Callable[[int], None] = lambda _: None
    """Receives the bytes that a starting server holds."""
    was_alone: Callable[[], bool] = lambda: True
    """Whether no other load has run on the devices since this server's load began."""

    async def free(self) -> int:
        """Bytes on its GPUs; 0 on a host without any."""
        return 0 if self.free_bytes is None else await asyncio.to_thread(self.free_bytes)

    async def held(self, server: ServerProcess) -> int | None:
        """Bytes that the server holds; None if only the devices' free memory shows it."""
        if self.free_bytes is None:
            return await asyncio.to_thread(lambda: server.num_bytes)
        return await asyncio.to_thread(lambda: self.process_bytes(server.processes)) or None

    async def measured(self, server: ServerProcess, free_before: int) -> int:
        """Bytes that a started server holds: from its processes, otherwise the drop from `free_before`. If other loads
        have taken memory meanwhile, the expected size counts instead of the drop."""
        if (held := await self.held(server)) is not None:
            return held
        return max(0, free_before - await self.free()) if self.was_alone() else self.expected_bytes

    async def reclaimed(self, expected_bytes: int, free_before: int, within_s: float) -> Reclaimed:
        """Host memory is freed when the processes end; a GPU's driver may free memory later, within `within_s`."""
        if self.free_bytes is None:
            return Reclaimed(expected_bytes, expected_bytes)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + within_s
        while True:
            reclaimed = Reclaimed(expected_bytes, max(0, await self.free() - free_before))
            if reclaimed.is_complete or loop.time() >= deadline_s:
                return reclaimed
            await asyncio.sleep(_POLL_S)


class MemoryWatch:
    """Measures a server while it serves, because it may grow after its start. Belongs to the loop."""

    def __init__(
        self,
        name: str,
        memory: ServerMemory,
        server: ServerProcess,
        started_bytes: int,
        on_held: Callable[[int], None],
        *,
        every_s: float,
    ) -> None:
        """`on_held`: called with the bytes that it holds each time they change. `every_s`: minimum interval of
        measurements."""
        self._name = name
        self._memory = memory
        self._server = server
        self._on_held = on_held
        self._every_s = every_s
        self._told_bytes = started_bytes
        self._reported_bytes = max(started_bytes, memory.expected_bytes)
        self.is_paused = False
        """Paused while the model sleeps."""
        self._held: deque[int] = deque([started_bytes], maxlen=_MAX_SAMPLES)
        self._task = run_once(self._run(), f"memory of {name}")

    async def look(self) -> None:
        """Measures it now."""
        held = await self._memory.held(self._server)
        if held is None or (not held and self._server.has_ended):
            return
        self._held.append(held)
        if held > _GROWTH * self._reported_bytes + _NOISE_BYTES:
            expected, self._reported_bytes = self._reported_bytes, held
            log.warning("%s: the server has grown to %s, %s were expected", self._name, gib(held), gib(expected))
        if abs(held - self._told_bytes) > _NOISE_BYTES:
            self._told_bytes = held
            self._on_held(held)

    def end(self) -> int:
        """Returns the bytes that the server held for most of the time."""
        self._task.cancel()
        return quantile(self._held)

    async def _run(self) -> None:
        loop, pause_s = asyncio.get_running_loop(), self._every_s
        while True:
            await asyncio.sleep(pause_s)
            began_s = loop.time()
            if not self.is_paused:
                await self.look()
            pause_s = max(self._every_s, (loop.time() - began_s) / _WATCH_SHARE)
