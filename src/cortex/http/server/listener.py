"""Accepts connections within the limits of a server, which count a connection before anything is read from it. Logs
what clients can cause as often as they like only now and then."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cortex.http.server.connection import ClientConnection, encode_rejection
from cortex.wire.errors import CortexError

if TYPE_CHECKING:
    from cortex.http.server.server import Server

INTERVAL_S = 10.0


class ThrottledLog:
    """Logs one warning of each kind per interval, with the number of those that it left out since the last one."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}
        """When each kind was logged last, and how often it occurred since."""

    def warning(self, kind: str, message: str) -> None:
        """`kind` is one of a few constants, never something that a client sent."""
        now = self._clock()
        logged_at, num_left_out = self._logged.get(kind, (-INTERVAL_S, 0))
        if now - logged_at < INTERVAL_S:
            self._logged[kind] = logged_at, num_left_out + 1
            return
        self._logged[kind] = now, 0
        self._log.warning("%s%s", message, f" ({num_left_out} more since the last line)" if num_left_out else "")


_ATTACH_FILTER = 26
"""`SO_ATTACH_FILTER` of Linux, which Python does not name."""
_FLAGS_AT = 13
"""The offset of the flags in a TCP header."""
_SYN, _SYN_AND_ACK = 0x02, 0x12
_INSTRUCTIONS = (
    (0x30, 0, 0, _FLAGS_AT),  # load a byte
    (0x54, 0, 0, _SYN_AND_ACK),  # keep these bits
    (0x15, 0, 1, _SYN),  # continue if that remains, else skip one
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # pass all of it
)
_PROGRAM = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _INSTRUCTIONS))


def hold_arrivals(listening: socket.socket) -> None:
    """Drop new connection attempts on this socket; connections made before can still be accepted. A dropped client
    resends its packet after a second, to a successor on the same address if there is one. No effect if the platform has
    no filters. The socket must not be shared with another process."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            program = struct.pack("HP", len(_INSTRUCTIONS), ctypes.addressof(_PROGRAM))
            listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)


log = logging.getLogger(__name__)

_throttled_log = ThrottledLog(log)

_BACKLOG = 1024
_AT_ONCE = 32
"""Connections of a burst that are accepted in one turn of the loop: other clients wait for a millisecond or two."""
_PAUSE_S = 0.2
"""How long accepting pauses when the process has no room for another connection."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ArrivingConnection:
    """A connection that was accepted and has no protocol yet: its TLS handshake may be running. Its server counts it
    and ends it like a `ClientConnection`."""

    is_idle = True

    def __init__(self, client: str) -> None:
        self.client = client
        self.task: asyncio.Task[None] | None = None
        self.is_aborted = False

    def announce_end(self) -> None:
        """There is no response yet that could say so."""

    def retire(self) -> None:
        """Nothing was requested yet: close."""
        self.abort()

    def abort(self) -> None:
        self.is_aborted = True
        if self.task is not None:
            self.task.cancel()


class Listener:
    """Accepts on bound sockets until `close`.

    The loop's own servers report a connection only after its TLS handshake, so that clients which never end it would
    escape every limit; and they do not report that a process has no descriptor left for a connection. With TLS, a
    connection over a limit is closed without a response: there is no encryption to send it with.
    """

    def __init__(
        self,
        server: Server,
        sockets: Sequence[socket.socket],
        tls: ssl.SSLContext | None,
        *,
        is_shared: bool = False,
    ) -> None:
        """`is_shared`: another process has the same sockets and accepts what this one leaves."""
        self._server = server
        self._is_shared = is_shared
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self.sockets = tuple(sockets)
        self._accepting = [self._loop.create_task(self._accept_from(listening)) for listening in sockets]

    def hold(self) -> None:
        """Accept only clients that have begun to connect, until `close`; none of a socket that is shared."""
        for listening, task in zip(self.sockets, self._accepting, strict=True):
            if self._is_shared:
                task.cancel()
            else:
                hold_arrivals(listening)

    def close(self) -> None:
        """Accept nothing more than what has connected already: closing the socket would reset it. Connections that
        have begun go on."""
        self.hold()
        for listening, task in zip(self.sockets, self._accepting, strict=True):
            task.cancel()
            self._take_waiting(listening, _BACKLOG + 1)
            listening.close()

    async def _accept_from(self, listening: socket.socket) -> None:
        while True:
            try:
                accepted, address = await self._loop.sock_accept(listening)
            except OSError as problem:
                if problem.errno in _NO_ROOM:
                    reason = f"cannot accept connections: {problem.strerror}; raise the limit of open files"
                    _throttled_log.warning("no room", reason)
                    await asyncio.sleep(_PAUSE_S)
                continue  # else the client was gone before it was accepted
            self._take(accepted, address)
            self._take_waiting(listening, _AT_ONCE)

    def _take_waiting(self, listening: socket.socket, most: int) -> None:
        """Takes up to `most` connections that have arrived already, without turns of the loop for each of them. Leaves
        them to another process that has the same socket."""
        for _ in range(0 if self._is_shared else most):
            try:
                accepted, address = listening.accept()
            except OSError:
                return  # there is none, or no room for it
            accepted.setblocking(False)
            self._take(accepted, address)

    def _take(self, accepted: socket.socket, address: Any) -> None:
        arriving = ArrivingConnection(str(address[0]) if isinstance(address, tuple) else "")
        rejection = self._server.enter(arriving)
        if rejection is not None:
            self._reject(accepted, rejection)
            return
        arriving.task = self._loop.create_task(self._begin(arriving, accepted))
        arriving.task.add_done_callback(partial(self._began, arriving, accepted))

    async def _begin(self, arriving: ArrivingConnection, accepted: socket.socket) -> None:
        await self._loop.connect_accepted_socket(
            partial(_AcceptedConnection, self._server, self._loop, arriving),
            accepted,
            ssl=self._tls,
            ssl_handshake_timeout=self._server.limits.head_s if self._tls is not None else None,
        )

    def _began(self, arriving: ArrivingConnection, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._server.leave(arriving)
        problem = None if task.cancelled() else task.exception()
        if task.cancelled() or problem is not None:
            accepted.close()
        if problem is not None and not isinstance(problem, OSError | EOFError):
            # Those are clients without TLS, with an old version, too slow, or disconnected: not worth a line each.
            log.error("a connection failed unexpectedly", exc_info=problem)

    def _reject(self, accepted: socket.socket, error: CortexError) -> None:
        """Closes at once: the limit exists so that such a client holds nothing."""
        with accepted, contextlib.suppress(OSError):
            if self._tls is None:
                accepted.setblocking(False)
                accepted.send(encode_rejection(self._server, error))


class _AcceptedConnection(ClientConnection):
    """A connection that was counted as an arriving one until now."""

    __slots__ = ("_arriving",)

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop, arriving: ArrivingConnection) -> None:
        super().__init__(server, loop)
        self._arriving = arriving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._server.leave(self._arriving)
        super().connection_made(transport)
        if self._arriving.is_aborted:  # uvloop reports the start of a connection cancelled meanwhile, not its end
            self._server.leave(self)
            self._server.ticker.discard(self)
            self.transport.abort()


def listen(host: str, port: int, *, shares_port: bool = False) -> list[socket.socket]:
    """Listening sockets for every address of `host`. `shares_port`: see `bind`. Raises OSError."""
    sockets = bind(host, port, shares_port=shares_port)
    try:
        for bound in sockets:
            bound.listen(_BACKLOG)
    except OSError:
        for bound in sockets:
            bound.close()
        raise
    return sockets


def bind(host: str, port: int, *, shares_port: bool = False) -> list[socket.socket]:
    """Sockets for every address of `host`, bound as the loop's own servers bind them. `shares_port`: other sockets that
    were bound so may have the same address. Raises OSError, also where another program listens."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            bound = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # A host with two addresses and port 0 gets one port for both.
            chosen = sockets[0].getsockname()[1] if port == 0 and len(sockets) > 1 else address[1]
            bound.bind((address[0], chosen, *address[2:]))
            bound.setblocking(False)
    except OSError:
        for bound in sockets:
            bound.close()
        raise
    return sockets
