"""The process that the workers of a pool are forked from.

It prepares what all jobs need, such as a tokenizer, and then only forks: workers share its memory, and a worker that
was killed is replaced in milliseconds. It has one thread, because a fork copies no other. A worker runs one job at a
time, so ending a job is ending its process, whatever native code it is in. Workers end with this process, and this
process ends with its parent. `pool` is the other side.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgspec

from cortex.ipc.channel import BlockingChannel, ChannelError, ChannelMessage, Unsendable
from cortex.ipc.child import die_with_parent
from cortex.ipc.limits import limit_cpu, limit_memory
from cortex.ipc.packets import PacketSocket

log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT")

_BACKGROUND_NICENESS = 10


class Fork(ChannelMessage, frozen=True):
    """Fork a worker; its connection comes with this packet, as a file descriptor."""

    worker: int
    in_background: bool
    """Whether it yields the cores to all other work of the host."""


class Kill(ChannelMessage, frozen=True):
    worker: int


def serve_pool(
    control: socket.socket,
    request_type: Any,
    run_job: Callable[[RequestT], msgspec.Struct],
    *,
    memory_bytes: int | None = None,
    cpu_s: int | None = None,
) -> NoReturn:
    """Forks workers as the parent commands, until it closes the socket; never returns. `run_job` runs in the workers.
    Each may allocate `memory_bytes` beyond what it shares with this process; more raises MemoryError or ends it. A job
    that computes for longer than `cpu_s` ends its worker."""

    def serve(connection: socket.socket) -> None:
        if memory_bytes is not None:
            limit_memory(memory_bytes)
        channel: BlockingChannel[RequestT] = BlockingChannel(connection, request_type)
        for requests in channel.receive():
            for request in requests:
                if cpu_s is not None:
                    limit_cpu(cpu_s)
                channel.send([run_job(request)])

    # What exists now lives as long as the process, and little of it is garbage. Frozen, no collection visits it, so its
    # pages stay shared.
    gc.freeze()
    try:
        _ForkServer(PacketSocket(control, Fork | Kill), serve).run()
    except (OSError, ChannelError) as error:
        log.error("control socket to the parent failed: %s", error)
    os._exit(0)  # the kernel kills the remaining workers


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
            log.warning("a job needed more memory than workers of this pool may take")
        except Exception:
            log.exception("a job failed")
        finally:
            os._exit(0)

    def _reap(self) -> None:
        for worker, process_id in list(self._process_ids.items()):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(process_id, os.WNOHANG) == (0, 0):
                    continue
            del self._process_ids[worker]
