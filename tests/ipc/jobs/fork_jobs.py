"""A program of a fork server, whose workers do what a test asks."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec


class Begun(msgspec.Struct):
    """The state of a new worker."""

    argument: bytes
    num_descriptors: int
    num_threads_of_server: int
    is_reaping_usual: bool


def prepare(argument: str) -> Callable[[socket.socket, bytes], int]:
    kind, _, path = argument.partition(" ")
    match kind:
        case "hang":
            Path(path).touch()
            time.sleep(3600)
        case "exit":
            os._exit(7)
        case "reject":
            _reject_first_fork()
    return serve


def serve(connection: socket.socket, argument: bytes) -> int:
    begun = Begun(
        argument,
        len(os.listdir("/proc/self/fd")) - 1,  # less that of the listing
        len(os.listdir(f"/proc/{os.getppid()}/task")),
        signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL,
    )
    connection.sendall(msgspec.json.encode(begun))
    order = connection.recv(16)
    if order == b"fail":
        raise ZeroDivisionError
    return int(order or 0)


def _reject_first_fork() -> None:
    fork: Any = os.fork

    def reject() -> int:
        os.fork = fork
        raise OSError(errno.EAGAIN, "no more processes")

    os.fork = reject
