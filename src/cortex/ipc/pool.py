"""A pool of worker processes that run one job each, as the parent sees it. `pool_process` is the other side."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from cortex.ipc.loop_channel import LoopChannel
from cortex.ipc.packets import PacketSocket
from cortex.ipc.pool_process import Fork, Kill
from cortex.ipc.start import start_child

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")


class PoolLost(Exception):
    """The process that workers are forked from has ended. Start another pool."""


class JobLost(Exception):
    """The worker ended during the job and the pool did not: the job crashed it or took too much memory."""


class WorkerPool(Generic[Reply]):
    """Belongs to one loop. A worker is forked when no idle one is left, so callers bound the number of jobs."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket, reply_type: Any) -> None:
        control.setblocking(False)
        self._process = process
        self._control: PacketSocket[Any] = PacketSocket(control, Any)
        self._reply_type = reply_type
        self._numbers = itertools.count()
        self._idle: list[_Worker[Reply]] = []
        self._unsent: deque[tuple[Fork | Kill, socket.socket | None]] = deque()
        """Messages, each with the socket that is passed along, for which the control socket had no room."""
        self._is_lost = False

    @classmethod
    async def start(
        cls, module: str, *arguments: str, reply_type: Any, environment: Mapping[str, str] | None = None
    ) -> WorkerPool[Reply]:
        """Starts `module`, which ends in `serve_pool`. `reply_type` is the union `Reply`. Raises OSError."""
        process, control = await start_child(module, *arguments, environment=environment)
        return cls(process, control, reply_type)

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the pool is unusable. A job may notice that before the loop reaps the process."""
        return self._is_lost or self._process.returncode is not None

    async def run(self, request: msgspec.Struct, payload: bytes = b"", *, in_background: bool = False) -> Reply:
        """Runs one job; `payload` is as for `LoopChannel.send`. Raises PoolLost, JobLost or Unsendable. Cancelling
        this call kills the worker."""
        worker = self._take_idle(in_background=in_background)
        connection = None
        if worker is None:
            worker, connection = self._fork(in_background=in_background)
        try:
            if connection is not None:
                await worker.attach(connection)
            reply = await worker.run(request, payload)
        except JobLost:
            self._kill(worker)  # raises PoolLost instead, if that is the reason
            raise
        except BaseException:
            with contextlib.suppress(PoolLost):
                self._kill(worker)
            raise
        self._idle.append(worker)
        return reply

    async def stop(self) -> None:
        """Kills the process and its workers; running jobs raise PoolLost. Idempotent."""
        self._is_lost = True
        self._drop_unsent()
        self._control.connection.close()
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # it has no state to save
        await self._process.wait()

    def _take_idle(self, *, in_background: bool) -> _Worker[Reply] | None:
        """The worker that was used last: its caches are the warmest."""
        self._idle = [worker for worker in self._idle if not worker.is_lost]
        for worker in reversed(self._idle):
            if worker.in_background is in_background:
                self._idle.remove(worker)
                return worker
        return None

    def _fork(self, *, in_background: bool) -> tuple[_Worker[Reply], socket.socket]:
        """A new worker, and the connection to it. Raises PoolLost."""
        worker = _Worker[Reply](next(self._numbers), self._reply_type, in_background=in_background)
        ours, theirs = socket.socketpair()
        try:
            self._send(Fork(worker.number, in_background), theirs)
        except PoolLost:
            ours.close()
            raise
        return worker, ours

    def _kill(self, worker: _Worker[Reply]) -> None:
        """Raises PoolLost if the process that would kill it has ended: then its workers have, too."""
        worker.close()
        self._send(Kill(worker.number))

    def _send(self, message: Fork | Kill, passed: socket.socket | None = None) -> None:
        """Sends now, or when the process has read what it was sent before. Owns `passed`. Raises PoolLost."""
        self._unsent.append((message, passed))
        if len(self._unsent) == 1:
            self._send_unsent()

    def _send_unsent(self) -> None:
        """Raises PoolLost."""
        while self._unsent:
            message, passed = self._unsent[0]
            try:
                self._control.send(message, passed.fileno() if passed is not None else None)
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._control.connection, self._continue)
                return
            except OSError as error:
                self._drop_unsent()
                raise self._lost(error) from error
            self._unsent.popleft()
            if passed is not None:
                passed.close()

    def _continue(self) -> None:
        asyncio.get_running_loop().remove_writer(self._control.connection)
        with contextlib.suppress(PoolLost):  # the workers' connections close, which ends the jobs
            self._send_unsent()

    def _drop_unsent(self) -> None:
        if self._control.connection.fileno() >= 0:
            asyncio.get_running_loop().remove_writer(self._control.connection)
        for _, passed in self._unsent:
            if passed is not None:
                passed.close()
        self._unsent.clear()

    def _lost(self, error: OSError) -> PoolLost:
        self._is_lost = True
        return PoolLost(f"the pool's process has ended: {error}")


class RestartedPool(Generic[Reply]):
    """A pool that starts with its first job, and again when its process has ended. Belongs to one loop."""

    def __init__(self, name: str, start: Callable[[], Awaitable[WorkerPool[Reply]]]) -> None:
        """`name` is for the log."""
        self._name = name
        self._start = start
        self._starting = asyncio.Lock()
        self._pool: WorkerPool[Reply] | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def process_id(self) -> int | None:
        """None while no process was started."""
        return self._pool.process_id if self._pool is not None else None

    async def run(self, request: msgspec.Struct, payload: bytes = b"", *, in_background: bool = False) -> Reply:
        """As `WorkerPool.run`, but a job that is lost with its pool runs once more, in a new one. Raises OSError, too,
        when no pool can be started."""
        pool = await self.running()
        try:
            return await pool.run(request, payload, in_background=in_background)
        except PoolLost as error:
            log.warning("lost %s: %s", self._name, error)
        return await (await self.running()).run(request, payload, in_background=in_background)

    async def running(self) -> WorkerPool[Reply]:
        """The pool, started if necessary. Raises OSError, or PoolLost once this is closed."""
        async with self._starting:
            if self._is_closed:
                raise PoolLost("it was closed")
            if self._pool is None or self._pool.has_ended:
                await self._stop()
                self._pool = await self._start()
            return self._pool

    async def rest(self) -> None:
        """Ends the pool; the next job starts a new one."""
        async with self._starting:
            await self._stop()

    async def close(self) -> None:
        """Ends the pool for good; running and later jobs raise PoolLost."""
        self._is_closed = True
        await self.rest()

    async def _stop(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.stop()


class _Worker(Generic[Reply]):
    """One connection to one worker."""

    def __init__(self, number: int, reply_type: Any, *, in_background: bool) -> None:
        self.number = number
        self.in_background = in_background
        self.is_lost = False
        self._channel: LoopChannel[Reply] = LoopChannel(reply_type, self._received, self._closed)
        self._reply: asyncio.Future[Reply] | None = None

    async def attach(self, connection: socket.socket) -> None:
        await self._channel.attach(connection)

    async def run(self, request: msgspec.Struct, payload: bytes) -> Reply:
        if self.is_lost:
            raise JobLost("the worker ended before its job")
        self._reply = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(request, payload)
            return await self._reply
        finally:
            self._reply = None

    def close(self) -> None:
        self._channel.close()

    def _received(self, reply: Reply) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)

    def _closed(self, reason: str) -> None:
        self.is_lost = True
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(JobLost(f"the worker ended during its job: {reason}"))
