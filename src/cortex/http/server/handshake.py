"""Accepts TLS connections within the limits of a server, which count a connection before its handshake has ended."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from functools import partial

from cortex.http.server.accepting import accepted_from
from cortex.http.server.connection import ClientConnection, ServerContext

log = logging.getLogger(__name__)


class Handshake:
    """A connection whose TLS handshake is running. Counted like any other connection."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.task: asyncio.Task[None] | None = None

    def retire(self) -> None:
        """Nothing was requested yet: close."""
        self.abort()

    def abort(self) -> None:
        if self.task is not None:
            self.task.cancel()


class TLSListener:
    """Accepts on bound sockets until `close`.

    The loop's own TLS servers report a connection only after its handshake, so that clients which never end it would
    escape every limit. A connection over a limit is closed without a response: there is no encryption to send it with.
    """

    def __init__(self, server: ServerContext, context: ssl.SSLContext, sockets: Sequence[socket.socket]) -> None:
        self._server = server
        self._context = context
        self._loop = asyncio.get_running_loop()
        self.sockets = tuple(sockets)
        self._accepting = [self._loop.create_task(self._accept_from(listening)) for listening in sockets]

    def close(self) -> None:
        for task in self._accepting:
            task.cancel()
        for listening in self.sockets:
            listening.close()

    async def _accept_from(self, listening: socket.socket) -> None:
        async for accepted, client in accepted_from(listening):
            handshake = Handshake(client)
            if self._server.enter(handshake) is not None:
                accepted.close()
                continue
            handshake.task = self._loop.create_task(self._shake_hands(handshake, accepted))
            handshake.task.add_done_callback(partial(self._ended, handshake, accepted))

    async def _shake_hands(self, handshake: Handshake, accepted: socket.socket) -> None:
        await self._loop.connect_accepted_socket(
            partial(_EncryptedConnection, self._server, self._loop, handshake),
            accepted,
            ssl=self._context,
            ssl_handshake_timeout=self._server.limits.head_s,
        )

    def _ended(self, handshake: Handshake, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._server.leave(handshake)
        problem = None if task.cancelled() else task.exception()
        if task.cancelled() or problem is not None:
            accepted.close()
        if problem is not None and not isinstance(problem, OSError | EOFError):
            # Those are clients without TLS, with an old version, too slow, or disconnected: not worth a line each.
            log.error("a TLS handshake failed unexpectedly", exc_info=problem)


class _EncryptedConnection(ClientConnection):
    """A connection that was counted as its handshake until now."""

    __slots__ = ("_handshake",)

    def __init__(self, server: ServerContext, loop: asyncio.AbstractEventLoop, handshake: Handshake) -> None:
        super().__init__(server, loop)
        self._handshake = handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._server.leave(self._handshake)
        super().connection_made(transport)


def bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Listening sockets for every address of `host`, as the loop's own servers bind them. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            listening = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # A host with two addresses and port 0 gets one port for both.
            chosen = sockets[0].getsockname()[1] if port == 0 and len(sockets) > 1 else address[1]
            listening.bind((address[0], chosen, *address[2:]))
            listening.listen(backlog)
            listening.setblocking(False)
    except OSError:
        for listening in sockets:
            listening.close()
        raise
    return sockets
