"""The program's side of a helper: `HelperPool` on a loop, `HelperOfThread` on a thread. `helper_process` is the other
side."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, TypeVar

import msgspec

from cortex.ipc.channel import ChannelError, FrameDecoder, Unsendable, encode_frame
from cortex.ipc.fork_client import MODULE, ForkServer, ForkServerProcess, Program, Worker
from cortex.ipc.helper import Function, FunctionCall, Helper, Rejected, Returned, error_of
from cortex.ipc.helper_process import IN_BACKGROUND
from cortex.ipc.loop_channel import LoopChannel
from cortex.ipc.start import start_child_of_thread

T = TypeVar("T")
Reply = Returned[Any] | Rejected

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
        self._fork_server = ForkServer(lambda: _program(self.helper))
        self._idle: list[_Worker] = []
        self._num_calls = 0
        self._last_call_s = time.monotonic()

    @property
    def is_closed(self) -> bool:
        return self._fork_server.is_closed

    @property
    def process_id(self) -> int | None:
        """None while no process was started."""
        return self._fork_server.process_id

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
        try:
            await self._fork_server.start()
        except ConnectionError as error:
            raise PoolLost(str(error)) from error

    async def rest(self) -> None:
        """Ends the process; the next call starts a new one."""
        idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()
        await self._fork_server.stop()

    async def rest_idle(self) -> None:
        """Ends the process if it was not used for a while."""
        if self.idle_s > _REST_AFTER_S:
            await self.rest()

    async def close(self) -> None:
        """Ends the process for good; running and later calls raise PoolLost."""
        await self._fork_server.close()
        await self.rest()

    async def _run(
        self, call: FunctionCall, reply_type: Any, body: bytes, timeout_s: float | None, in_background: bool
    ) -> Reply:
        for is_last in (False, True):
            try:
                fork_server = await self._fork_server.start()
                async with asyncio.timeout(timeout_s):
                    return await self._run_in(fork_server, call, reply_type, body, in_background)
            except ConnectionError as error:
                if is_last or self.is_closed:
                    raise PoolLost(str(error)) from error
            except TimeoutError:
                raise
            except OSError as error:
                raise PoolLost(f"no process can be started: {error}") from error
        raise AssertionError

    async def _run_in(
        self, fork_server: ForkServerProcess, call: FunctionCall, reply_type: Any, body: bytes, in_background: bool
    ) -> Reply:
        """Raises CallLost or Unsendable, and ConnectionError if the process has ended. Cancelling this kills the
        worker."""
        worker = self._take_idle(in_background=in_background)
        if worker is None:
            worker = await _Worker.fork(fork_server, in_background=in_background)
        try:
            reply = await worker.run(call, reply_type, body)
        except BaseException as error:
            worker.kill()
            if isinstance(error, CallLost) and worker.process.fork_server.has_ended:
                raise ConnectionError("its process has ended") from error
            raise
        self._idle.append(worker)
        return reply

    def _take_idle(self, *, in_background: bool) -> _Worker | None:
        """The most recently used worker, whose caches are warmest."""
        self._idle = [worker for worker in self._idle if not worker.is_lost]
        for worker in reversed(self._idle):
            if worker.in_background is in_background:
                self._idle.remove(worker)
                return worker
        return None


class _Worker:
    """A worker that runs calls, and the connection to it."""

    def __init__(self, *, in_background: bool) -> None:
        self.process: Worker
        self.in_background = in_background
        self.is_lost = False
        self._channel: LoopChannel[Reply] = LoopChannel(Rejected, self._received, self._closed)
        self._reply: asyncio.Future[Reply] | None = None

    @classmethod
    async def fork(cls, fork_server: ForkServerProcess, *, in_background: bool) -> _Worker:
        """Raises OSError."""
        worker = cls(in_background=in_background)
        ours, theirs = socket.socketpair()
        with theirs:
            await worker._channel.attach(ours)
            try:
                worker.process = fork_server.fork(theirs, IN_BACKGROUND if in_background else b"")
            except BaseException:
                worker.close()
                raise
        return worker

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

    def kill(self) -> None:
        self.close()
        self.process.kill()

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
        self._process, self._control = start_child_of_thread(
            MODULE, *_program(helper).arguments(), environment=environment
        )
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


def _program(helper: Helper) -> Program:
    # By the standard library, because the path of a model need not be UTF-8.
    argument = json.dumps(msgspec.to_builtins(msgspec.structs.replace(helper, environment={})))
    return Program(helper.purpose, "cortex.ipc.helper_process", argument, helper.environment)


def _value(reply: Reply) -> Any:
    """Raises the CortexError that the function has raised."""
    if isinstance(reply, Rejected):
        raise error_of(reply)
    return reply.value
