"""What the workers of helpers run: a worker runs one call at a time, so ending a call is ending its process, whatever
native code it is in. `pool` is the other side.

The table of functions and what they need, such as a tokenizer, are made in the `fork_server`. The process of a
`HelperOfThread` is its only worker.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import logging
import math
import os
import resource
import socket
import time
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cortex.ipc.channel import BlockingChannel, ChannelError, Unsendable
from cortex.ipc.child import name_thread
from cortex.ipc.helper import FunctionCall, Helper, Rejected, Returned, rejected
from cortex.wire.errors import CortexError, InvalidValue

if TYPE_CHECKING:
    from cortex.ipc.fork_server import Serve  # which runs as `__main__`, where this is used

log = logging.getLogger(__name__)

_BACKGROUND_NICENESS = 10
IN_BACKGROUND: Final = b"in background"
"""The argument of a worker that runs at the lowest priority."""


def prepare(argument: str) -> Serve:
    """`argument` is the `Helper` as JSON. The argument of a worker is `IN_BACKGROUND` or nothing."""
    helper = msgspec.convert(json.loads(argument), Helper)
    name_thread(helper.name)
    module = importlib.import_module(helper.module)
    gc.freeze()
    gc.enable()
    if helper.memory_bytes is not None:
        limit_memory(helper.memory_bytes)
    if helper.start_cpu_s is not None:
        _limit_cpu(helper.start_cpu_s)
    calls = Calls(helper, module.functions(*helper.arguments))
    if helper.start_cpu_s is not None:
        _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
    return calls.serve_in_worker


class Calls:
    """Runs the calls that come over a connection, one after the other."""

    def __init__(self, helper: Helper, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._helper = helper
        self._functions = {name: _Callable(function) for name, function in functions.items()}

    def serve(self, connection: socket.socket) -> None:
        """Returns when the other side closes its end. A MemoryError ends it, so that the next call has all the
        memory."""
        channel: BlockingChannel[FunctionCall] = BlockingChannel(connection, FunctionCall)
        for calls in channel.receive():
            for call in calls:
                if self._helper.cpu_s is not None:
                    _limit_cpu(self._helper.cpu_s)
                channel.send([self._reply(call)])

    def serve_in_worker(self, connection: socket.socket, argument: bytes) -> int:
        """Within the limits of the helper; returns the exit code."""
        if argument == IN_BACKGROUND:
            with contextlib.suppress(OSError):  # a service manager may forbid it
                os.nice(_BACKGROUND_NICENESS)
        if self._helper.memory_bytes is not None:
            limit_memory(self._helper.memory_bytes)
        try:
            self.serve(connection)
        except (OSError, ChannelError, Unsendable) as error:
            log.error("connection of a worker failed: %s", error)
        except MemoryError:
            log.warning("a call needed more memory than workers of this helper may take")
        return 0

    def _reply(self, call: FunctionCall) -> Returned[Any] | Rejected:
        try:
            return Returned(self._functions[call.function].run(call))
        except CortexError as error:
            return rejected(error)
        except MemoryError:
            raise
        except RecursionError:
            return rejected(InvalidValue("The request is nested too deeply; flatten it."))
        except Exception:
            log.exception("%s: %s failed", self._helper.name, call.function)
            return rejected(CortexError(f"Internal error in {self._helper.purpose}; the log has the details."))


class _Callable:
    """A function, and how its arguments are decoded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        names, types = list(inspect.signature(function).parameters), typing.get_type_hints(function)
        self._takes_body = names[-1:] == ["body"]
        encoded = tuple(types[name] for name in names if name != "body")
        self._arguments: msgspec.msgpack.Decoder[tuple[Any, ...]] = msgspec.msgpack.Decoder(tuple[encoded])  # type: ignore[valid-type]
        self._function = function

    def run(self, call: FunctionCall) -> Any:
        arguments = self._arguments.decode(call.arguments)
        return self._function(*arguments, call.body) if self._takes_body else self._function(*arguments)


def limit_memory(additional_bytes: int) -> None:
    """Limits this process to its address space of now and `additional_bytes`: more raises MemoryError, or ends it in
    libraries that cannot raise it. Mapped files count."""
    try:
        num_pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    except (OSError, ValueError):
        return  # only Linux reports it
    _limit(resource.RLIMIT_AS, num_pages * resource.getpagesize() + additional_bytes)


def _limit_cpu(additional_s: int) -> None:
    """Ends this process when it has computed for `additional_s` from now on. Waits do not count."""
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + additional_s)


def _limit(kind: int, limit: int) -> None:
    """Sets the soft limit, which ends or stops a process as well as the hard one does, and can be raised again."""
    _, hard_limit = resource.getrlimit(kind)
    if hard_limit != resource.RLIM_INFINITY and (limit == resource.RLIM_INFINITY or limit > hard_limit):
        limit = hard_limit
    try:
        resource.setrlimit(kind, (limit, hard_limit))
    except (OSError, ValueError) as error:
        log.warning("a limit of this process cannot be set: %s", error)
