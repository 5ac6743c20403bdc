"""Accepts connections one by one, so that they can be counted before anything is read from them."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator

from cortex.http.throttled_log import ThrottledLog

log = logging.getLogger(__name__)
_throttled_log = ThrottledLog(log)

_PAUSE_S = 0.2
"""How long accepting pauses when the process has no room for another connection."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


async def accepted_from(listening: socket.socket) -> AsyncIterator[tuple[socket.socket, str]]:
    """Connections and the addresses of their clients, empty for a Unix socket; never ends."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, address = await loop.sock_accept(listening)
        except OSError as problem:
            if problem.errno in _NO_ROOM:
                reason = f"cannot accept connections: {problem.strerror}; raise the limit of open files"
                _throttled_log.warning("no room", reason)
                await asyncio.sleep(_PAUSE_S)
            continue  # else the client was gone before it was accepted
        yield accepted, str(address[0]) if isinstance(address, tuple) else ""
