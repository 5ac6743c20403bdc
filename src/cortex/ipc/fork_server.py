"""`python -m cortex.ipc.fork_server`: the process from which workers are forked, of helpers and of devices.

It prepares one program, such as a tokenizer or the imports of an engine, and then only forks: workers share its memory,
and a lost one is replaced in milliseconds. It has one thread, because a fork copies no other, and touches no device: a
CUDA context does not survive a fork. Workers end with this process, and this process ends with its parent.
`fork_client` is the other side. With a stream as its control socket it forks nothing: it is the only worker.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import NoReturn

from cortex.ipc.channel import ChannelError, ChannelMessage, PacketSocket
from cortex.ipc.child import attach_to_parent, die_with_parent

log = logging.getLogger(__name__)

Serve = Callable[[socket.socket, bytes], int]
"""What a worker does: (its connection, the argument of its `Fork`) → its exit code. A program is a module whose
`prepare` returns this."""


class Fork(ChannelMessage, frozen=True):
    """Fork a worker; its connection comes with this packet, as a file descriptor."""

    worker: int
    argument: bytes


class Kill(ChannelMessage, frozen=True):
    """Kill a worker; ignored when it has ended."""

    worker: int


class Ready(ChannelMessage, frozen=True):
    """The program is prepared; from now on messages are read."""


class Forked(ChannelMessage, frozen=True):
    worker: int
    process_id: int


class Exited(ChannelMessage, frozen=True):
    worker: int
    return_code: int
    """Negative for a signal, as of `subprocess`."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="cortex.ipc.fork_server", description=__doc__)
    parser.add_argument("--program", required=True, help="the module of the program")
    parser.add_argument("--argument", required=True, help="the argument of its `prepare`")
    options, control = attach_to_parent(parser)
    gc.disable()  # imports leave little garbage, and its collection takes a seventh of the time
    serve: Serve = importlib.import_module(options.program).prepare(options.argument)
    # What exists now lives as long as the process. Frozen, no collection visits it, so its pages stay shared.
    gc.freeze()
    gc.enable()
    if control.type is socket.SOCK_STREAM:
        raise SystemExit(serve(control, b""))
    try:
        ForkServer(control, serve).run()
    except ConnectionError:
        pass  # the parent has died with messages unread
    except (OSError, ChannelError) as error:
        log.error("control socket to the parent failed: %s", error)
    os._exit(0)  # the kernel kills the remaining workers


class ForkServer:
    """Forks, kills and reaps workers as its parent commands."""

    def __init__(self, control: socket.socket, serve: Serve) -> None:
        self._control: PacketSocket[Fork | Kill] = PacketSocket(control, Fork | Kill)
        self._serve = serve
        self._process_ids: dict[int, int] = {}
        """By worker. An id stays here until the process is reaped, so it cannot belong to another process."""
        self._signals, self._signalled = socket.socketpair()
        """A byte arrives at the first when a worker has ended."""

    def run(self) -> None:
        """Runs until the parent closes the control socket. Raises OSError or ChannelError."""
        self._signals.setblocking(False)
        self._signalled.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wakeup needs a handler
        signal.set_wakeup_fd(self._signalled.fileno(), warn_on_full_buffer=False)
        ready = select.poll()
        for connection in (self._control.connection, self._signals):
            ready.register(connection, select.POLLIN)
        self._control.send(Ready())
        while True:
            for descriptor, _ in ready.poll():
                if descriptor == self._signals.fileno():
                    self._reap()
                elif not self._execute_command():
                    return

    def _execute_command(self) -> bool:
        """False when the parent has closed the socket."""
        received = self._control.receive()
        if received is None:
            return False
        match received:
            case Fork() as fork, int(descriptor):
                self._fork(fork, descriptor)
            case Kill(worker), _ if worker in self._process_ids:
                os.kill(self._process_ids[worker], signal.SIGKILL)
        return True

    def _fork(self, fork: Fork, descriptor: int) -> None:
        parent_id = os.getpid()
        try:
            process_id = os.fork()
        except OSError as error:  # no memory or process ids left; existing workers are not affected
            log.error("cannot fork a worker: %s", error)
            os.close(descriptor)
            self._control.send(Exited(fork.worker, os.EX_OSERR))
            return
        if process_id == 0:
            die_with_parent(parent_id)
            self._become_worker(descriptor, fork.argument)
        os.close(descriptor)
        self._process_ids[fork.worker] = process_id
        self._control.send(Forked(fork.worker, process_id))

    def _become_worker(self, descriptor: int, argument: bytes) -> NoReturn:
        """In the forked process: drops what belongs to the fork server, then serves. Ends with `os._exit`, so that a
        hanging device cannot delay the exit."""
        exit_code = os.EX_SOFTWARE
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for ours in (self._control.connection, self._signals, self._signalled):
                ours.close()
            connection = socket.socket(fileno=descriptor)  # stays open to the end, for the threads of the worker
            exit_code = self._serve(connection, argument)
        except Exception:
            log.exception("a worker failed")
        finally:
            os._exit(exit_code)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._signals.recv(1 << 10)
        for worker, process_id in list(self._process_ids.items()):
            ended_id, status = os.waitpid(process_id, os.WNOHANG)
            if ended_id:
                del self._process_ids[worker]
                self._control.send(Exited(worker, os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
