"""Ports for the programs that tests start."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to clients: one of them could take a port before its program listens there."""
_random = random.SystemRandom()  # the tests of other processes must not draw the same ports
_reserved: list[socket.socket] = []
"""A name for each port that was returned, which no other test process can have while this one runs."""


def free_port() -> int:
    """A port that nothing listens on. No two calls return the same one, in all test processes of this machine."""
    while True:
        port = _random.choice(_PORTS)
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0cortex-test-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            name.close()
            continue
        _reserved.append(name)
        return port
