"""Connections between ranks, which authenticate each other before anything else is sent or stored.

Unauthenticated peers can reach a port. The side that listens sends a nonce. The rank that connects responds with a
nonce of its own and an HMAC of both, keyed with a secret that never travels over this connection. The side that
listens proves in the same way that it has the secret. Nothing else is read from a peer before that, and a peer that
sends nothing delays no other.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence

MAX_UNAUTHENTICATED = 64
"""Connections that may be open without being authenticated; the oldest are closed."""
STEP_PROTOCOL = 4
"""Raised with every change of `StepPlan` and of how ranks agree: a rank of another version would leave out what it does
not know, and compute something else. Ranks prove that they have the same."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HELLO_BYTES = _NONCE_BYTES + _PROOF_BYTES
_ATTEMPT_S = 1.0
_RETRY_S = 0.02
_POLL_S = 0.02


class NotAuthenticated(ConnectionError):
    """The other side of a connection ended the handshake, does not continue it, or does not have the secret."""


class Door:
    """Accepts the connections of one listener. Belongs to the thread of its selector."""

    def __init__(self, listener: socket.socket, keys: Sequence[bytes], selector: selectors.BaseSelector) -> None:
        """`keys`: the secret of each awaited rank; ranks that have the same one are in any order. Empty ones: only
        ranks can connect, and there is no handshake."""
        self._listener = listener
        self._selector = selector
        self._awaited = dict(enumerate(keys))
        self._unauthenticated: dict[socket.socket, tuple[bytes, bytes]] = {}
        """The nonce that each was sent, and what it has sent so far; oldest first."""
        selector.register(listener, selectors.EVENT_READ)

    @property
    def is_open(self) -> bool:
        """Whether ranks are awaited."""
        return bool(self._awaited)

    def advance(self, ready: object) -> tuple[int, socket.socket] | None:
        """Handles what the selector reports as ready to be read. Returns the index of a key and the connection that is
        authenticated by it, which blocks and is not registered. Raises OSError if nothing can be accepted."""
        if ready is self._listener:
            return self._accept()
        if isinstance(ready, socket.socket) and ready in self._unauthenticated:  # not disconnected for a newer one
            return self._read(ready)
        return None

    def close(self) -> None:
        """Disconnects unauthenticated peers and closes the listener. May be called twice."""
        for peer in list(self._unauthenticated):
            self._disconnect(peer)
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _accept(self) -> tuple[int, socket.socket] | None:
        peer, _ = self._listener.accept()
        number = next((number for number, key in self._awaited.items() if not key), None)
        if number is not None:
            del self._awaited[number]
            return number, peer
        peer.setblocking(False)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._selector.register(peer, selectors.EVENT_READ)
        self._unauthenticated[peer] = nonce, b""
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
            self._disconnect(next(iter(self._unauthenticated)))
        with contextlib.suppress(OSError):  # found when it is read
            peer.send(nonce)
        return None

    def _read(self, peer: socket.socket) -> tuple[int, socket.socket] | None:
        nonce, hello = self._unauthenticated[peer]
        try:
            received = peer.recv(_HELLO_BYTES - len(hello))
        except BlockingIOError:
            return None
        except OSError:
            received = b""
        hello += received
        self._unauthenticated[peer] = nonce, hello
        if received and len(hello) < _HELLO_BYTES:
            return None
        number = self._authenticated(nonce, hello)
        self._disconnect(peer, close=number is None)
        if number is None:
            return None
        key = self._awaited.pop(number)
        peer.setblocking(True)
        with contextlib.suppress(OSError):  # found when it is used
            peer.sendall(_proof(key, b"listener", nonce + hello[:_NONCE_BYTES]))
        return number, peer

    def _authenticated(self, nonce: bytes, hello: bytes) -> int | None:
        """The index of the key that the hello proves."""
        nonces, proof = nonce + hello[:_NONCE_BYTES], hello[_NONCE_BYTES:]
        for number, key in self._awaited.items():
            if hmac.compare_digest(proof, _proof(key, b"rank", nonces)):
                return number
        return None

    def _disconnect(self, peer: socket.socket, *, close: bool = True) -> None:
        self._selector.unregister(peer)
        del self._unauthenticated[peer]
        if close:
            peer.close()


def arrived(
    listener: socket.socket, keys: Sequence[bytes], timeout_s: float, poll: Callable[[], None]
) -> list[socket.socket]:
    """The connections of all awaited ranks, in the order of their keys; see `Door`. Closes the listener. `poll` is
    called while ranks are awaited; what it raises ends the wait. Raises OSError; nothing is connected then."""
    deadline_s = time.monotonic() + timeout_s
    ranks: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector, contextlib.closing(Door(listener, keys, selector)) as door:
        try:
            while door.is_open:
                poll()
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    raise TimeoutError(f"not all ranks have connected within {timeout_s:.0f} s")
                for ready, _ in selector.select(min(left_s, _POLL_S)):
                    if (rank := door.advance(ready.fileobj)) is not None:
                        ranks |= [rank]
        except BaseException:
            for connection in ranks.values():
                connection.close()
            raise
    return [ranks[number] for number in range(len(keys))]


def connected(
    address: tuple[str, int], key: bytes, deadline_s: float, poll: Callable[[], None] = lambda: None
) -> socket.socket:
    """A connection to a `Door` that has authenticated both sides. An attempt that takes long, or that the other side
    ends, as it does if many peers connect, is repeated until `deadline_s` of the monotonic clock. `poll` is called
    while this waits; what it raises ends the wait. Raises OSError."""
    while True:
        poll()
        left_s = max(deadline_s - time.monotonic(), 0.001)
        try:
            connection = socket.create_connection(address, min(left_s, _ATTEMPT_S))
            try:
                introduce(connection, key, deadline_s, poll)
            except BaseException:
                connection.close()
                raise
        except (TimeoutError, NotAuthenticated):
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(_RETRY_S)
        else:
            connection.settimeout(None)
            return connection


def introduce(connection: socket.socket, key: bytes, deadline_s: float, poll: Callable[[], None]) -> None:
    """Prove to the listener that this side has the secret, and have it prove the same. Raises NotAuthenticated."""
    connection.settimeout(_POLL_S)
    try:
        nonces = b"".join(_received(connection, _NONCE_BYTES, deadline_s, poll))
        own = secrets.token_bytes(_NONCE_BYTES)
        nonces += own
        connection.sendall(own + _proof(key, b"rank", nonces))
        proof = b"".join(_received(connection, _PROOF_BYTES, deadline_s, poll))
    except TimeoutError as error:
        raise NotAuthenticated(
            "it accepts connections and does not authenticate itself; are both nodes of the same version?"
        ) from error
    except ConnectionError as error:
        raise NotAuthenticated(f"the connection was closed before it was authenticated: {error}") from error
    if not hmac.compare_digest(proof, _proof(key, b"listener", nonces)):
        raise NotAuthenticated("the other side does not have the secret of this load")


def _received(
    connection: socket.socket, num_bytes: int, deadline_s: float, poll: Callable[[], None]
) -> Iterator[bytes]:
    while num_bytes:
        poll()
        try:
            data = connection.recv(num_bytes)
        except TimeoutError:
            if time.monotonic() >= deadline_s:
                raise
            continue
        if not data:
            raise ConnectionResetError("the other side has closed it")
        num_bytes -= len(data)
        yield data


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    """What only a holder of the key can send. `role`: so that no side can return the other's proof."""
    return hmac.digest(key, role + bytes([STEP_PROTOCOL]) + nonces, "sha256")
