"""Accepts the connections of a node's clients, within limits that count a connection before its TLS handshake."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from cortex.http.connection_counts import ConnectionCounts
from cortex.http.server.accepting import accepted_from
from cortex.http.throttled_log import ThrottledLog
from cortex.neuron.api.connections.raw_response import raw_error
from cortex.wire.errors import CortexError

log = logging.getLogger(__name__)
_throttled_log = ThrottledLog(log)

Connect = Callable[[Callable[[], None]], asyncio.Protocol]
"""Makes the protocol of a connection, which calls its argument when the connection is lost."""


class Listener:
    """Accepts on a bound socket until `close`."""

    def __init__(
        self,
        listening: socket.socket,
        connect: Connect,
        counts: ConnectionCounts,
        tls: ssl.SSLContext | None,
        *,
        handshake_s: float,
    ) -> None:
        """A client may take `handshake_s` for the TLS handshake."""
        self.socket = listening
        self._connect = connect
        self._counts = counts
        self._tls = tls
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._accepting = self._loop.create_task(self._accept_from(listening), name="accept connections")

    def close(self) -> None:
        """Accept nothing more. Connections that have begun go on."""
        for task in (self._accepting, *self._beginning):
            task.cancel()
        self.socket.close()

    async def _accept_from(self, listening: socket.socket) -> None:
        async for accepted, client in accepted_from(listening):
            rejection = self._counts.enter(client)
            if rejection is None:
                connection = _Counted(self._counts, client)
                task = self._loop.create_task(self._begin(connection, accepted))
                self._beginning.add(task)
                task.add_done_callback(partial(self._began, connection, accepted))
            else:
                self._reject(accepted, rejection)

    async def _begin(self, connection: _Counted, accepted: socket.socket) -> None:
        await self._loop.connect_accepted_socket(
            partial(self._connect, connection.lost),
            accepted,
            ssl=self._tls,
            ssl_handshake_timeout=self._handshake_s if self._tls is not None else None,
        )

    def _began(self, connection: _Counted, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._beginning.discard(task)
        problem = None if task.cancelled() else task.exception()
        if task.cancelled() or problem is not None:
            connection.lost()
            accepted.close()
        if problem is not None and not isinstance(problem, OSError | EOFError):
            # Those are clients without TLS, with an old version, too slow, or disconnected: not worth a line each.
            log.error("a connection failed unexpectedly", exc_info=problem)

    def _reject(self, accepted: socket.socket, error: CortexError) -> None:
        """Closes at once: the limit exists so that such a client holds nothing. Without TLS it gets a response."""
        _throttled_log.warning(error.code, f"connection rejected: {error.message}")
        with accepted, contextlib.suppress(OSError):
            if self._tls is None:
                accepted.send(raw_error(error))


class _Counted:
    """One connection that was counted."""

    def __init__(self, counts: ConnectionCounts, client: str) -> None:
        self._counts = counts
        self._client = client
        self._is_open = True

    def lost(self) -> None:
        """The connection has ended. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._counts.leave(self._client)
