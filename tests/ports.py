"""Ports for the programs that tests start."""

from __future__ import annotations

import contextlib
import random
import socket

_PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to clients: one of them could take a port before its program listens there."""
_random = random.SystemRandom()  # the tests of other processes must not draw the same ports
_drawn: set[int] = set()


def free_port() -> int:
    """A port that nothing listens on. No two calls return the same one."""
    while True:
        port = _random.choice(_PORTS)
        if port in _drawn:
            continue
        _drawn.add(port)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
