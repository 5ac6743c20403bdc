"""Creates device workers, from a fork server that has imported the engine."""

from __future__ import annotations

import os
import socket

import msgspec

from cortex.ipc.fork_client import ForkServer, Program, Worker
from cortex.neuron.worker.protocol import DeviceAddress

ENGINE = "cortex.neuron.engine.parallel.ranks:load_engine"
"""The load function of the built-in engine; tests use a faulty engine instead."""


class WorkerFactory:
    """Creates workers for any number of devices. Belongs to one loop."""

    def __init__(self, engine: str = ENGINE) -> None:
        """`engine` names the workers' load function as `module:attribute`."""
        self._engine = engine
        self._fork_server = ForkServer(self._program)

    async def warm(self) -> None:
        """Starts the fork server, which imports the engine; does not wait for the import. Raises OSError."""
        await self._fork_server.start()

    async def fork(self, device: DeviceAddress, channel: socket.socket) -> Worker:
        """Requests a worker that serves the other end of `channel`. Raises OSError when none can be created."""
        return (await self._fork_server.start()).fork(channel, msgspec.msgpack.encode(device))

    async def close(self) -> None:
        """Ends the fork server and all its workers."""
        await self._fork_server.close()

    def _program(self) -> Program:
        module = "cortex.neuron.worker.program.worker"
        purpose = "the fork server of device workers"
        return Program(purpose, module, self._engine, _environment(), is_killed_unready=True)


def _environment() -> dict[str, str]:
    """Variables that the engine's libraries read at import, unless the operator has set them."""
    # OpenMP threads wait for each other by spinning, for milliseconds by default. On a busy core that makes a token ten
    # times as slow. A few microseconds are enough.
    chosen = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "1000"}
    # oneDNN writes a list of its compiled functions for profilers, /tmp/perf-PID.map, on ARM without being asked.
    chosen["ONEDNN_JIT_PROFILE"] = "0"
    return {name: value for name, value in chosen.items() if name not in os.environ}
