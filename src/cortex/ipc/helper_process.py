"""`python -m cortex.ipc.helper_process`: the process of any helper, from which workers are forked.

It makes the table of functions and what they need, such as a tokenizer, and then only forks: workers share its memory,
and a worker that was killed is replaced in milliseconds. It has one thread, because a fork copies no other. A worker
runs one call at a time, so ending a call is ending its process, whatever native code it is in. Workers end with this
process, and this process ends with its parent. `pool` is the other side. The process of a `HelperOfThread` forks
nothing: it runs the calls itself.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import inspect
import json
import logging
import math
import os
import resource
import signal
import socket
import time
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from cortex.ipc.channel import BlockingChannel, ChannelError, ChannelMessage, PacketSocket, Unsendable
from cortex.ipc.child import attach_to_parent, die_with_parent, name_thread
from cortex.ipc.helper import FunctionCall, Helper, Rejected, Returned, rejected
from cortex.wire.errors import CortexError, InvalidValue

log = logging.getLogger(__name__)

_BACKGROUND_NICENESS = 10


class Fork(ChannelMessage, frozen=True):
    """Fork a worker; its connection comes with this packet, as a file descriptor."""

    worker: int
    in_background: bool
    """Whether it runs at the lowest priority."""


class Kill(ChannelMessage, frozen=True):
    worker: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="cortex.ipc.helper_process", description=__doc__)
    parser.add_argument("--helper", required=True, help="the `Helper` as JSON")
    options, control = attach_to_parent(parser)
    helper = msgspec.convert(json.loads(options.helper), Helper)
    name_thread(helper.name)
    gc.disable()  # imports leave little garbage, and its collection takes a tenth of the time
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
    if control.type is socket.SOCK_STREAM:
        calls.serve(control)
        return
    # What exists now lives as long as the process, and little of it is garbage. Frozen, no collection visits it, so its
    # pages stay shared.
    gc.freeze()
    try:
        _ForkServer(PacketSocket(control, Fork | Kill), calls.serve_in_worker).run()
    except (OSError, ChannelError) as error:
        log.error("control socket to the parent failed: %s", error)
    os._exit(0)  # the kernel kills the remaining workers


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

    def serve_in_worker(self, connection: socket.socket) -> None:
        if self._helper.memory_bytes is not None:
            limit_memory(self._helper.memory_bytes)
        self.serve(connection)

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


class _ForkServer:
    def __init__(self, control: PacketSocket[Fork | Kill], serve: Callable[[socket.socket], None]) -> None:
        self._control = control
        self._serve = serve
        self._process_ids: dict[int, int] = {}
        """By worker. An id stays here until the process is reaped, so it cannot belong to another process."""

    def run(self) -> None:
        while (received := self._control.receive()) is not None:
            self._reap()
            match received:
                case Fork() as fork, int(descriptor):
                    self._fork(fork, descriptor)
                case Kill(worker), _ if worker in self._process_ids:
                    os.kill(self._process_ids[worker], signal.SIGKILL)
                    os.waitpid(self._process_ids.pop(worker), 0)

    def _fork(self, fork: Fork, descriptor: int) -> None:
        parent_id = os.getpid()
        try:
            process_id = os.fork()
        except OSError as error:  # no memory or process ids left; the parent sees a closed connection
            log.error("cannot fork a worker: %s", error)
            os.close(descriptor)
            return
        if process_id == 0:
            die_with_parent(parent_id)
            self._become_worker(descriptor, in_background=fork.in_background)
        os.close(descriptor)
        self._process_ids[fork.worker] = process_id

    def _become_worker(self, descriptor: int, *, in_background: bool) -> NoReturn:
        try:
            self._control.connection.close()
            if in_background:
                with contextlib.suppress(OSError):  # a service manager may forbid it
                    os.nice(_BACKGROUND_NICENESS)
            with socket.socket(fileno=descriptor) as connection:
                self._serve(connection)
        except (OSError, ChannelError, Unsendable) as error:
            log.error("connection of a worker failed: %s", error)
        except MemoryError:
            log.warning("a call needed more memory than workers of this helper may take")
        except Exception:
            log.exception("a worker failed")
        finally:
            os._exit(0)

    def _reap(self) -> None:
        for worker, process_id in list(self._process_ids.items()):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(process_id, os.WNOHANG) == (0, 0):
                    continue
            del self._process_ids[worker]


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


if __name__ == "__main__":
    main()
