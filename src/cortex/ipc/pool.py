"""The program's side of a helper: `HelperPool` on a loop, `HelperOfThread` on a thread. `helper_process` is the other
side."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, TypeVar

import msgspec

from cortex.ipc.channel import ChannelError, FrameDecoder, PacketSocket, Unsendable, encode_frame
from cortex.ipc.helper import Function, FunctionCall, Helper, Rejected, Returned, error_of
from cortex.ipc.helper_process import Fork, Kill
from cortex.ipc.loop_channel import LoopChannel
from cortex.ipc.start import start_child, start_child_of_thread

log = logging.getLogger(__name__)

T = TypeVar("T")
Reply = Returned[Any] | Rejected

_MODULE: Final = "cortex.ipc.helper_process"
_POLL_S: Final = 0.05
_REST_AFTER_S: Final = 60.0


class PoolLost(Exception):
    """The process that workers are forked from has ended, or cannot be started."""


class CallLost(Exception):
    """The worker ended during the call and the pool did not: the call crashed it, or exceeded a limit."""


class HelperPool:
    """Calls the functions of a helper. Its process starts with the first call, and again when it has ended. Belongs to
    one loop. Each concurrent call has a worker, so callers bound their number, with a `FairQueue` where clients share
    them."""

    def __init__(self, helper: Helper) -> None:
        self.helper = helper
        """A change applies from the next start of the process."""
        self._starting = asyncio.Lock()
        self._process: HelperProcess | None = None
        self._is_closed = False
        self._num_calls = 0
        self._last_call_s = time.monotonic()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def process_id(self) -> int | None:
        """None while no process was started."""
        return self._process.process_id if self._process is not None else None

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 during a call."""
        return 0.0 if self._num_calls else time.monotonic() - self._last_call_s

    async def call(
        self,
        function: Function[T],
        *arguments: Any,
        body: bytes = b"",
        timeout_s: float | None = None,
        in_background: bool = False,
    ) -> T:
        """The function's result. `body` is its parameter of that name. `in_background`: runs at the lowest priority. A
        call that is lost with its process is retried once, in a new one.

        Raises the CortexError that the function raises; CallLost; TimeoutError after `timeout_s`, without the start of
        the process; Unsendable; and PoolLost. Cancelling this ends the call, wherever it is.
        """
        try:
            call = function.call(*arguments)
        except (OverflowError, ValueError) as error:  # a number beyond 64 bits, text that is not Unicode
            raise Unsendable(f"the arguments cannot be encoded: {error}") from error
        self._num_calls += 1
        try:
            reply = await self._run(call, function.reply_type, body, timeout_s, in_background)
        finally:
            self._num_calls -= 1
            self._last_call_s = time.monotonic()
        value: T = _value(reply)
        return value

    async def start(self) -> None:
        """Starts the process unless it runs, without waiting until it is ready. Raises OSError or PoolLost."""
        await self._running()

    async def rest(self) -> None:
        """Ends the process; the next call starts a new one."""
        async with self._starting:
            await self._stop()

    async def rest_idle(self) -> None:
        """Ends the process if it was not used for a while."""
        if self.idle_s > _REST_AFTER_S:
            await self.rest()

    async def close(self) -> None:
        """Ends the process for good; running and later calls raise PoolLost."""
        self._is_closed = True
        await self.rest()

    async def _run(
        self, call: FunctionCall, reply_type: Any, body: bytes, timeout_s: float | None, in_background: bool
    ) -> Reply:
        for is_last in (False, True):
            try:
                process = await self._running()
                async with asyncio.timeout(timeout_s):
                    return await process.run(call, reply_type, body, in_background=in_background)
            except PoolLost as error:
                if is_last or self._is_closed:
                    raise
                log.warning("lost %s: %s", self.helper.purpose, error)
            except TimeoutError:
                raise
            except OSError as error:
                raise PoolLost(f"no process can be started: {error}") from error
        raise AssertionError

    async def _running(self) -> HelperProcess:
        """The process, started if necessary. Raises OSError, or PoolLost once this is closed."""
        async with self._starting:
            if self._is_closed:
                raise PoolLost("it was closed")
            if self._process is None or self._process.has_ended:
                await self._stop()
                self._process = await HelperProcess.start(self.helper)
            return self._process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()


class HelperProcess:
    """One process of a helper, until it ends. A worker is forked when no idle one is left."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        control.setblocking(False)
        self._process = process
        self._control: PacketSocket[Any] = PacketSocket(control, Any)
        self._numbers = itertools.count()
        self._idle: list[_Worker] = []
        self._unsent: deque[tuple[Fork | Kill, socket.socket | None]] = deque()
        """Messages, each with its passed socket, for which the control socket had no room."""
        self._is_lost = False

    @classmethod
    async def start(cls, helper: Helper) -> HelperProcess:
        """Raises OSError."""
        return cls(*await start_child(_MODULE, *_arguments(helper), environment=helper.environment))

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is unusable. A call may notice that before the loop reaps the process."""
        return self._is_lost or self._process.returncode is not None

    async def run(self, call: FunctionCall, reply_type: Any, body: bytes, *, in_background: bool) -> Reply:
        """Runs one call. Raises PoolLost, CallLost or Unsendable. Cancelling this kills the worker."""
        worker = self._take_idle(in_background=in_background)
        connection = None
        if worker is None:
            worker, connection = self._fork(in_background=in_background)
        try:
            if connection is not None:
                await worker.attach(connection)
            reply = await worker.run(call, reply_type, body)
        except CallLost:
            self._kill(worker)  # raises PoolLost instead, if that is the reason
            raise
        except BaseException:
            with contextlib.suppress(PoolLost):
                self._kill(worker)
            raise
        self._idle.append(worker)
        return reply

    async def stop(self) -> None:
        """Kills the process and its workers; running calls raise PoolLost. Idempotent."""
        self._is_lost = True
        self._drop_unsent()
        self._control.connection.close()
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # it has no state to save
        await self._process.wait()

    def _take_idle(self, *, in_background: bool) -> _Worker | None:
        """The most recently used worker, whose caches are warmest."""
        self._idle = [worker for worker in self._idle if not worker.is_lost]
        for worker in reversed(self._idle):
            if worker.in_background is in_background:
                self._idle.remove(worker)
                return worker
        return None

    def _fork(self, *, in_background: bool) -> tuple[_Worker, socket.socket]:
        """A new worker, and the connection to it. Raises PoolLost."""
        worker = _Worker(next(self._numbers), in_background=in_background)
        ours, theirs = socket.socketpair()
        try:
            self._send(Fork(worker.number, in_background), theirs)
        except PoolLost:
            ours.close()
            raise
        return worker, ours

    def _kill(self, worker: _Worker) -> None:
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
        with contextlib.suppress(PoolLost):  # the workers' connections close, which ends the calls
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
        return PoolLost(f"its process has ended: {error}")


class _Worker:
    """One connection to one worker."""

    def __init__(self, number: int, *, in_background: bool) -> None:
        self.number = number
        self.in_background = in_background
        self.is_lost = False
        self._channel: LoopChannel[Reply] = LoopChannel(Rejected, self._received, self._closed)
        self._reply: asyncio.Future[Reply] | None = None

    async def attach(self, connection: socket.socket) -> None:
        await self._channel.attach(connection)

    async def run(self, call: FunctionCall, reply_type: Any, body: bytes) -> Reply:
        if self.is_lost:
            raise CallLost("the worker ended before its call")
        self._reply = asyncio.get_running_loop().create_future()
        self._channel.expect(reply_type)
        try:
            self._channel.send(call, body)
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
            self._reply.set_exception(CallLost(f"the worker ended during its call: {reason}"))


class HelperOfThread:
    """A helper for one thread, which waits for each call; its process forks nothing. A context manager: leaving the
    block ends the process at once."""

    def __init__(self, helper: Helper, environment: Mapping[str, str]) -> None:
        """`environment` is the whole environment of the process. Raises OSError."""
        self._process, self._control = start_child_of_thread(_MODULE, *_arguments(helper), environment=environment)
        self._control.settimeout(_POLL_S)
        self._decoder: FrameDecoder[Reply] = FrameDecoder(Rejected)

    def __enter__(self) -> HelperOfThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()

    def call(self, function: Function[T], *arguments: Any, meanwhile: Callable[[], None]) -> T:
        """The function's result. `meanwhile` is called at an interval; its exceptions end the wait. Raises the
        CortexError that the function raises, and PoolLost."""
        try:
            self._decoder.expect(function.reply_type)
            self._control.settimeout(None)
            self._control.sendall(encode_frame([function.call(*arguments)]))
            self._control.settimeout(_POLL_S)
            while True:
                meanwhile()
                for [reply] in self._decoder.feed(self._received()):
                    value: T = _value(reply)
                    return value
        except (OSError, ChannelError) as error:
            raise PoolLost(str(error)) from error

    def _received(self) -> bytes:
        try:
            data = self._control.recv(1 << 20)
        except TimeoutError:
            return b""
        if not data:
            raise ChannelError(f"exit status {self._process.wait()}")
        return data


def _arguments(helper: Helper) -> tuple[str, str]:
    # By the standard library, because the path of a model need not be UTF-8.
    return "--helper", json.dumps(msgspec.to_builtins(msgspec.structs.replace(helper, environment={})))


def _value(reply: Reply) -> Any:
    """Raises the CortexError that the function has raised."""
    if isinstance(reply, Rejected):
        raise error_of(reply)
    return reply.value
