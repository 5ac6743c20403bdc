"""The ports of the rendezvous of a model's ranks if they are on several hosts.

The daemon of the leader chooses them and holds them until the load has ended, so that no other program gets one before
the leader's worker listens there. The sockets of both share their port; only the worker's takes connections.
"""

from __future__ import annotations

import socket


def held(host: str) -> socket.socket:
    """A socket with a free port of `host`, which nobody else gets until it is closed. Raises OSError."""
    return _bound(host, 0)


def listening(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    listener = _bound(host, port)
    listener.listen()
    return listener


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # Not SO_REUSEADDR: it would let others bind the port while nobody listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound
