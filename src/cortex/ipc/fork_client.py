"""The program's side of a fork server: starts it, requests workers from it, and reports how they exit. `fork_server` is
the other side."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cortex.ipc.channel import ChannelError, PacketSocket
from cortex.ipc.fork_server import Exited, Fork, Forked, Kill, Ready
from cortex.ipc.start import start_child
from cortex.system.tasks import run_once
from cortex.wire.words import plural

log = logging.getLogger(__name__)

MODULE = "cortex.ipc.fork_server"


class Program(NamedTuple):
    """What workers run, for the program that starts their fork server."""

    purpose: str
    """Its description in the log, such as "the process that decodes pictures"."""
    module: str
    argument: str
    """What the module's `prepare` is called with."""
    environment: Mapping[str, str]
    """Added to that of this process."""
    is_killed_unready: bool = False
    """Whether killing a worker that waits for the process to become ready kills the process, which may never do so."""

    def arguments(self) -> tuple[str, ...]:
        return "--program", self.module, "--argument", self.argument


class Worker:
    """A worker that was requested. `exited` becomes its return code, which is negative for a signal."""

    def __init__(self, fork_server: ForkServerProcess, number: int) -> None:
        self.fork_server = fork_server
        self.process_id: int | None = None
        """None until the worker is forked, which waits until the program is prepared."""
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._number = number

    def kill(self) -> None:
        """Kills the worker, forked or not; `exited` follows. Idempotent."""
        if not self.exited.done():
            self.fork_server.kill(self._number)

    def on_exited(self, return_code: int) -> None:
        if not self.exited.done():  # a cancelled waiter cancels the future too
            self.exited.set_result(return_code)


class ForkServer:
    """Starts its process on first use, and again when it has ended. Belongs to one loop."""

    def __init__(self, program: Callable[[], Program]) -> None:
        """`program` is called at each start."""
        self._program = program
        self._process: ForkServerProcess | None = None
        self._starting = asyncio.Lock()
        self.is_closed = False

    @property
    def process_id(self) -> int | None:
        """None while no process was started."""
        return self._process.process_id if self._process is not None else None

    async def start(self) -> ForkServerProcess:
        """The process, started if necessary; does not wait until it is ready. Raises OSError, or ConnectionError once
        this is closed."""
        async with self._starting:
            if self.is_closed:
                raise ConnectionError("it was closed")
            if self._process is None or self._process.has_ended:
                await self._stop()
                program = self._program()
                child = await start_child(MODULE, *program.arguments(), environment=program.environment)
                self._process = ForkServerProcess(*child, program)
            return self._process

    async def stop(self) -> None:
        """Kills the process and its workers; the next use starts a new one."""
        async with self._starting:
            await self._stop()

    async def close(self) -> None:
        """Kills the process and its workers for good."""
        self.is_closed = True
        await self.stop()

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()


class ForkServerProcess:
    """One process of a fork server, and its workers, until it ends."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket, program: Program) -> None:
        control.setblocking(False)
        self._process = process
        self._control: PacketSocket[Any] = PacketSocket(control, Ready | Forked | Exited)
        self._program = program
        self._is_ready = False
        self._is_lost = False
        self._is_stopped = False
        self._numbers = itertools.count(1)
        self._workers: dict[int, Worker] = {}
        self._unsent: deque[tuple[Fork | Kill, socket.socket | None]] = deque()
        """Messages, each with its passed socket, for which the control socket had no room."""
        asyncio.get_running_loop().add_reader(control.fileno(), self._receive)
        self._reaper = run_once(self._reap(), f"reap {program.purpose}")

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is unusable. A message may notice that before the loop reaps the process."""
        return self._is_lost or self._process.returncode is not None

    def fork(self, connection: socket.socket, argument: bytes = b"") -> Worker:
        """Requests a worker that serves `connection`, of which it gets its own copy. Raises OSError, of which a
        ConnectionError means that the process has ended."""
        number = next(self._numbers)
        self._send(Fork(number, argument), connection.dup())
        worker = self._workers[number] = Worker(self, number)
        return worker

    def kill(self, number: int) -> None:
        """Kills a worker. It has been killed already if the process has ended."""
        if self._program.is_killed_unready and not self._is_ready:
            self._kill_process()
        else:
            with contextlib.suppress(ConnectionError):  # `_reap` reports it
                self._send(Kill(number))

    async def stop(self) -> None:
        """Kills the process, which has no state to save; the kernel kills its workers. Idempotent."""
        self._is_stopped = self._is_stopped or not self.has_ended  # an earlier end is a failure
        self._is_lost = True
        self._kill_process()
        await asyncio.wait({self._reaper})

    def _kill_process(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _send(self, message: Fork | Kill, passed: socket.socket | None = None) -> None:
        """Sends now, or when the process has read what it was sent before. Owns `passed`. Raises ConnectionError."""
        self._unsent.append((message, passed))
        if len(self._unsent) == 1:
            self._send_unsent()

    def _send_unsent(self) -> None:
        """Raises ConnectionError."""
        loop = asyncio.get_running_loop()
        while self._unsent:
            message, passed = self._unsent[0]
            try:
                self._control.send(message, passed.fileno() if passed is not None else None)
            except BlockingIOError:
                loop.add_writer(self._control.connection.fileno(), self._send_rest)
                return
            except OSError as error:
                self._drop_unsent()
                self._is_lost = True
                self._kill_process()  # it may live: dropped messages and its workers end with it
                raise ConnectionError(f"its process has ended: {error}") from error
            self._unsent.popleft()
            if passed is not None:
                passed.close()

    def _send_rest(self) -> None:
        asyncio.get_running_loop().remove_writer(self._control.connection.fileno())
        with contextlib.suppress(ConnectionError):  # `_reap` reports it
            self._send_unsent()

    def _drop_unsent(self) -> None:
        for _, passed in self._unsent:
            if passed is not None:
                passed.close()
        self._unsent.clear()

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
            log.error("killing %s: %s", self._program.purpose, error)
            self._kill_process()
        self._is_lost = True
        asyncio.get_running_loop().remove_reader(self._control.connection.fileno())

    def _on_event(self, event: Ready | Forked | Exited) -> None:
        match event:
            case Ready():
                self._is_ready = True
            case Forked(number, process_id):
                self._workers[number].process_id = process_id
            case Exited(number, return_code):
                self._workers.pop(number).on_exited(return_code)

    async def _reap(self) -> None:
        return_code = await self._process.wait()
        self._receive()
        loop, control = asyncio.get_running_loop(), self._control.connection
        self._is_lost = True
        loop.remove_reader(control.fileno())
        loop.remove_writer(control.fileno())
        self._drop_unsent()
        control.close()
        if not self._is_stopped:
            lost = plural(len(self._workers), "worker")
            log.error("%s exited with %d; lost %s", self._program.purpose, return_code, lost)
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            # The kernel has killed forked workers; one that was not forked yet failed as its fork server did.
            worker.on_exited(return_code if worker.process_id is None else -signal.SIGKILL)
