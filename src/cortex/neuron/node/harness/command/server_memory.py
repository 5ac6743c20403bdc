"""The memory of a server on its devices: what it holds, and what its end frees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from cortex.neuron.node.harness.command.server_process import ServerProcess
from cortex.neuron.worker.memory import Reclaimed

_RECLAIM_S = 5.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Where the server's memory is. Every method reads on a thread."""

    indices: tuple[int, ...]
    free_bytes: Callable[[], int] | None
    """Free memory of GPUs, all together; blocks. None: the server takes memory of the host, and its processes tell."""
    expected_bytes: int
    process_bytes: Callable[[list[int]], int | None] = lambda _: None
    """Memory of these processes on the GPUs; None: the driver does not know them, as in a container. Blocks."""
    took: Callable[[int], None] = lambda _: None
    """Gets what a server that starts holds by now."""
    was_alone: Callable[[], bool] = lambda: True
    """Whether no other load has run on the devices since that of this server began."""

    async def free(self) -> int:
        """Of its GPUs; 0 on a host without."""
        return 0 if self.free_bytes is None else await asyncio.to_thread(self.free_bytes)

    async def held(self, server: ServerProcess) -> int | None:
        """What the server holds; None where only the free memory of its devices tells."""
        if self.free_bytes is None:
            return await asyncio.to_thread(lambda: server.num_bytes)
        return await asyncio.to_thread(lambda: self.process_bytes(server.processes)) or None

    async def measured(self, server: ServerProcess, free_before: int) -> int:
        """What a server holds that has started: by its processes, else what is less free than `free_before`. Where
        other loads have taken memory meanwhile, that is no measure, and it counts as expected."""
        if (held := await self.held(server)) is not None:
            return held
        return max(0, free_before - await self.free()) if self.was_alone() else self.expected_bytes

    async def reclaimed(self, expected_bytes: int, free_before: int) -> Reclaimed:
        """Host memory is free when the processes have ended. The driver of a GPU may free it later."""
        if self.free_bytes is None:
            return Reclaimed(expected_bytes, expected_bytes)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _RECLAIM_S
        while True:
            reclaimed = Reclaimed(expected_bytes, max(0, await self.free() - free_before))
            if reclaimed.is_complete or loop.time() >= deadline_s:
                return reclaimed
            await asyncio.sleep(_POLL_S)
