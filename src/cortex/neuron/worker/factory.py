"""The daemon's side of the fork server: starts it, requests workers from it, and reports how they exit."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket

from cortex.ipc.channel import ChannelError, PacketSocket
from cortex.ipc.start import start_child
from cortex.neuron.worker.protocol import DeviceAddress, Exited, Forked, ForkServerEvent, ForkWorker, KillWorker, Warm
from cortex.system.tasks import run_once
from cortex.wire.words import plural

log = logging.getLogger(__name__)

ENGINE = "cortex.neuron.engine.parallel.ranks:load_engine"
"""The load function of the built-in engine; tests use a faulty engine instead."""

CLOSE_TIMEOUT_S = 2.0
"""How long the fork server may take to exit after its control socket is closed, before it is killed."""


class WorkerHandle:
    """A worker that was requested. `exited` becomes its return code, which is negative for a signal."""

    def __init__(self, fork_server: _ForkServerProcess, worker_number: int) -> None:
        self.process_id: int | None = None
        """None until the worker is forked, which waits for the engine's import."""
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._fork_server = fork_server
        self._worker_number = worker_number

    def kill(self) -> None:
        """Kills the worker, forked or not; `exited` follows. Idempotent."""
        if not self.exited.done():
            self._fork_server.kill(self._worker_number)

    def on_exited(self, return_code: int) -> None:
        if not self.exited.done():  # a cancelled waiter cancels the future too
            self.exited.set_result(return_code)


class WorkerFactory:
    """Creates workers for any number of devices. Belongs to one loop."""

    def __init__(self, engine: str = ENGINE) -> None:
        """`engine` names the workers' load function as `module:attribute`."""
        self._engine = engine
        self._fork_server: _ForkServerProcess | None = None
        self._starting = asyncio.Lock()
        self._worker_numbers = itertools.count(1)

    async def warm(self) -> None:
        """Starts the fork server, which imports the engine; does not wait for the import. Raises OSError."""
        await self._ensure_fork_server()

    async def fork(self, device: DeviceAddress, channel: socket.socket) -> WorkerHandle:
        """Requests a worker that serves the other end of `channel`. Raises OSError when none can be created."""
        fork_server = await self._ensure_fork_server()
        return fork_server.fork(next(self._worker_numbers), device, channel)

    async def close(self) -> None:
        """Ends the fork server and all its workers."""
        if self._fork_server is not None:
            await self._fork_server.close()

    async def _ensure_fork_server(self) -> _ForkServerProcess:
        async with self._starting:
            if self._fork_server is None or self._fork_server.has_ended:
                self._fork_server = await _ForkServerProcess.start(self._engine)
            return self._fork_server


class _ForkServerProcess:
    """One fork server process and its workers."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        control.setblocking(False)
        self.has_ended = False
        self._process = process
        self._control: PacketSocket[ForkServerEvent] = PacketSocket(control, ForkServerEvent)
        self._is_warm = False
        self._handles: dict[int, WorkerHandle] = {}
        asyncio.get_running_loop().add_reader(control.fileno(), self._receive)
        self._reaper = run_once(self._reap(), "reap the fork server")

    @classmethod
    async def start(cls, engine: str) -> _ForkServerProcess:
        process, control = await start_child(
            "cortex.neuron.worker.program.fork_server",
            *("--engine", engine),
            environment=_environment(),
        )
        return cls(process, control)

    def fork(self, worker_number: int, device: DeviceAddress, channel: socket.socket) -> WorkerHandle:
        self._control.send(ForkWorker(worker_number, device), channel.fileno())
        handle = self._handles[worker_number] = WorkerHandle(self, worker_number)
        return handle

    def kill(self, worker_number: int) -> None:
        if self._is_warm:
            with contextlib.suppress(ConnectionError):  # it has just died, which `_reap` reports
                self._control.send(KillWorker(worker_number))
        else:
            self._kill_process()  # before the import is over it reads no commands, and has no workers

    async def close(self) -> None:
        if not self._is_warm:
            self._kill_process()
        elif not self.has_ended:
            self._control.connection.shutdown(socket.SHUT_WR)
        await asyncio.wait({self._reaper}, timeout=CLOSE_TIMEOUT_S)
        self._kill_process()
        await asyncio.wait({self._reaper})

    def _kill_process(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _receive(self) -> None:
        """Handles all pending events; the loop calls it when the control socket is readable."""
        try:
            while (received := self._control.receive()) is not None:
                self._on_event(received[0])
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        except ChannelError as error:
            log.error("killing the fork server: %s", error)
            self._kill_process()
        asyncio.get_running_loop().remove_reader(self._control.connection.fileno())

    def _on_event(self, event: ForkServerEvent) -> None:
        match event:
            case Warm():
                self._is_warm = True
            case Forked(worker_number, process_id):
                self._handles[worker_number].process_id = process_id
            case Exited(worker_number, return_code):
                self._handles.pop(worker_number).on_exited(return_code)

    async def _reap(self) -> None:
        return_code = await self._process.wait()
        self.has_ended = True
        self._receive()
        asyncio.get_running_loop().remove_reader(self._control.connection.fileno())
        self._control.connection.close()
        if self._handles:
            log.error("fork server exited with %d; lost %s", return_code, plural(len(self._handles), "worker"))
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            # The kernel has killed forked workers; one that was not forked yet failed as the fork server did.
            handle.on_exited(return_code if handle.process_id is None else -signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Variables that the engine's libraries read at import, unless the operator has set them."""
    # OpenMP threads wait for each other by spinning, for milliseconds by default. On a busy core that makes a token ten
    # times as slow. A few microseconds are enough.
    chosen = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "1000"}
    # oneDNN writes a list of its compiled functions for profilers, /tmp/perf-PID.map, on ARM without being asked.
    chosen["ONEDNN_JIT_PROFILE"] = "0"
    return {name: value for name, value in chosen.items() if name not in os.environ}
