"""Connections between the ranks of a divided model: sockets in the private directory of its load.

Only processes of the same user can open the directory, so that the ranks need not authenticate each other.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL_MS = 20


def listening(directory: str, name: str, backlog: int) -> socket.socket:
    """Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _short_path(directory, name) as path:
            listener.bind(path)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def connected(directory: str, name: str) -> socket.socket:
    """A connection to a rank that listens. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _short_path(directory, name) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def accepted(listener: socket.socket, deadline_s: float, poll: Callable[[], None]) -> socket.socket:
    """The next connection. `poll` is called while this waits; what it raises ends the wait. Raises OSError:
    TimeoutError at `deadline_s` of the monotonic clock."""
    waiting = select.poll()
    waiting.register(listener, select.POLLIN)
    while not waiting.poll(_POLL_MS):
        poll()
        if time.monotonic() >= deadline_s:
            raise TimeoutError("not all ranks have connected in time")
    return listener.accept()[0]


@contextlib.contextmanager
def _short_path(directory: str, name: str) -> Iterator[str]:
    """The path of a socket may have only 107 bytes, which a temporary directory may exceed."""
    opened = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield str(Path(f"/proc/self/fd/{opened}") / name)
    finally:
        os.close(opened)
