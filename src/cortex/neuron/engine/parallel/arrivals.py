"""Connections from other ranks.

Unauthenticated peers can reach a port. A connection there belongs to a rank once it has sent its hello; a connection
that sends nothing delays no other.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Callable, Sequence

MAX_UNAUTHENTICATED = 64
"""Connections that may be open without having sent a hello; the oldest are closed."""
_POLL_S = 0.02


class Arrivals:
    """Takes the connections of one listener."""

    def __init__(self, listener: socket.socket, hellos: Sequence[bytes]) -> None:
        """`hellos`: what a connection of each awaited rank begins with, all of one length; ranks that have the same one
        are in any order. Empty ones: only ranks can connect."""
        self._listener = listener
        self._hellos = hellos
        self._ranks: dict[int, socket.socket] = {}
        """Index of the hello → connection."""
        self._unauthenticated: dict[socket.socket, bytes] = {}
        """What each has sent so far; oldest first."""

    def ranks(self, timeout_s: float, poll: Callable[[], None] = lambda: None) -> list[socket.socket]:
        """The connections of all awaited ranks, in the order of the hellos. `poll` is called while they are awaited;
        what it raises ends the wait. Raises OSError; nothing is connected then."""
        deadline_s = time.monotonic() + timeout_s
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                while len(self._ranks) < len(self._hellos):
                    poll()
                    if (left_s := deadline_s - time.monotonic()) <= 0:
                        raise TimeoutError(f"not all ranks have connected within {timeout_s:.0f} s")
                    for key, _ in selector.select(min(left_s, _POLL_S)):
                        self._advance(key.fileobj, selector)
        except BaseException:
            for connection in self._ranks.values():
                connection.close()
            raise
        finally:
            for connection in self._unauthenticated:
                connection.close()
        return [self._ranks[number] for number in range(len(self._hellos))]

    def _advance(self, ready: object, selector: selectors.BaseSelector) -> None:
        if ready is self._listener:
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
            self._unauthenticated[connection] = b""
            if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
                self._disconnect(next(iter(self._unauthenticated)), selector)
            self._recognise(connection, selector)  # without a hello it is a rank already
        elif isinstance(ready, socket.socket) and ready in self._unauthenticated:  # not disconnected for a newer one
            try:
                received = ready.recv(len(self._hellos[0]) - len(self._unauthenticated[ready]))
            except OSError:
                received = b""
            self._unauthenticated[ready] += received
            is_complete = len(self._unauthenticated[ready]) == len(self._hellos[0])
            if not self._recognise(ready, selector) and (is_complete or not received):
                self._disconnect(ready, selector)

    def _recognise(self, peer: socket.socket, selector: selectors.BaseSelector) -> bool:
        """Whether the peer has sent the hello of an awaited rank."""
        for number, hello in enumerate(self._hellos):
            if number not in self._ranks and hmac.compare_digest(self._unauthenticated[peer], hello):
                selector.unregister(peer)
                del self._unauthenticated[peer]
                peer.setblocking(True)
                self._ranks[number] = peer
                return True
        return False

    def _disconnect(self, peer: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(peer)
        del self._unauthenticated[peer]
        peer.close()
