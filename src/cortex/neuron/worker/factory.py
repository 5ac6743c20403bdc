"""The daemon's end of the process that workers are forked from: starts it, orders workers, hears how they end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket

import msgspec

from cortex.ipc.child import start_child
from cortex.neuron.worker.address import DeviceAddress
from cortex.neuron.worker.protocol import PACKET_BYTES, Ended, Fork, Forked, Kill, Notice, Order, Warm

log = logging.getLogger(__name__)

ENGINE = "cortex.neuron.worker.torch_harness:load"
"""The engine that workers run; tests put a faulty one in its place."""

CLOSE_S = 2.0
"""How long the process may take to leave once nothing is wanted from it."""


class WorkerHandle:
    """A worker that was ordered. `exited` has its return code once it is gone; negative for a signal."""

    def __init__(self, fork_server: _ForkServerProcess, worker_number: int) -> None:
        self.process_id: int | None = None
        """None until it is forked, which waits for the engine's import."""
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._fork_server = fork_server
        self._worker_number = worker_number

    def kill(self) -> None:
        """Ends it now, born or not; `exited` follows. Idempotent."""
        if not self.exited.done():
            self._fork_server.kill(self._worker_number)

    def ended(self, return_code: int) -> None:
        if not self.exited.done():  # else who waited was cancelled, and the future with it
            self.exited.set_result(return_code)


class WorkerFactory:
    """Makes workers for any number of devices. Belongs to one loop."""

    def __init__(self, engine: str = ENGINE) -> None:
        """`engine` names the load function of the workers as `module:attribute`."""
        self._engine = engine
        self._fork_server: _ForkServerProcess | None = None
        self._starting = asyncio.Lock()
        self._worker_numbers = itertools.count(1)

    async def warm(self) -> None:
        """Starts importing the engine in the process that workers come from; returns at once. Raises OSError."""
        await self._ensure_fork_server()

    async def fork(self, device: DeviceAddress, channel: socket.socket) -> WorkerHandle:
        """Orders a worker that serves the other end of `channel`. Raises OSError where none can be made."""
        fork_server = await self._ensure_fork_server()
        return fork_server.fork(next(self._worker_numbers), device, channel)

    async def close(self) -> None:
        """Ends the process and whatever was forked from it."""
        if self._fork_server is not None:
            await self._fork_server.close()

    async def _ensure_fork_server(self) -> _ForkServerProcess:
        async with self._starting:
            if self._fork_server is None or self._fork_server.is_gone:
                self._fork_server = await _ForkServerProcess.start(self._engine)
            return self._fork_server


class _ForkServerProcess:
    """One incarnation of the process, and the workers it has."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        control.setblocking(False)
        self.is_gone = False
        self._process = process
        self._control = control
        self._warm = False
        self._handles: dict[int, WorkerHandle] = {}
        self._notices: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)
        asyncio.get_running_loop().add_reader(control.fileno(), self._hear)
        self._watch = asyncio.create_task(self._await_end())

    @classmethod
    async def start(cls, engine: str) -> _ForkServerProcess:
        process, control = await start_child(
            "cortex.neuron.worker.fork_server", "--engine", engine, environment=_spinning_little()
        )
        return cls(process, control)

    def fork(self, worker_number: int, device: DeviceAddress, channel: socket.socket) -> WorkerHandle:
        order = Fork(worker_number, device.kind, device.index, device.uuid)
        socket.send_fds(self._control, [msgspec.msgpack.encode(order)], [channel.fileno()])
        handle = self._handles[worker_number] = WorkerHandle(self, worker_number)
        return handle

    def kill(self, worker_number: int) -> None:
        if self._warm:
            self._order(Kill(worker_number))
        else:
            # It takes no orders before the import is over, which may never come; and it has no workers yet.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        if not self._warm:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        elif not self.is_gone:
            self._control.shutdown(socket.SHUT_WR)
        await asyncio.wait({self._watch}, timeout=CLOSE_S)
        if not self.is_gone:
            self._process.kill()
            await asyncio.wait({self._watch})

    def _order(self, order: Order) -> None:
        with contextlib.suppress(ConnectionError):  # it has just died, which `_await_end` tells
            self._control.send(msgspec.msgpack.encode(order))

    def _hear(self) -> None:
        """Takes what it has to say; on the loop, whenever there is something."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while packet := self._control.recv(PACKET_BYTES):
                self._heard(self._notices.decode(packet))
            asyncio.get_running_loop().remove_reader(self._control.fileno())

    def _heard(self, notice: Notice) -> None:
        match notice:
            case Warm():
                self._warm = True
            case Forked(worker_number, process_id):
                self._handles[worker_number].process_id = process_id
            case Ended(worker_number, return_code):
                self._handles.pop(worker_number).ended(return_code)

    async def _await_end(self) -> None:
        return_code = await self._process.wait()
        self.is_gone = True
        self._hear()
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        if self._handles:
            log.error("the process that workers are forked from ended with %d, and its workers with it", return_code)
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            # Where it was never forked it ended as its maker did; else the kernel has killed it.
            handle.ended(return_code if handle.process_id is None else -signal.SIGKILL)


def _spinning_little() -> dict[str, str]:
    """Threads of a parallel loop wait for each other by spinning. By default that goes on for milliseconds, and where
    another program wants the same core, a token takes ten times as long. A few microseconds are enough."""
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return {}
    return {"GOMP_SPINCOUNT": "1000"}
