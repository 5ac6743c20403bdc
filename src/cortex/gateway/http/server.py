"""Accepts client connections and hands out their requests."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import NamedTuple

from cortex.gateway.http.exchange import Exchange
from cortex.gateway.http.limits import ClientLimits
from cortex.gateway.http.request import Headers
from cortex.gateway.http.ticker import Ticker
from cortex.wire.errors import CortexError


class Answer(NamedTuple):
    """A whole response."""

    status: int
    headers: Headers
    body: bytes


Handler = Callable[[Exchange], None]
"""Called synchronously, on the loop's thread, when a request's body is complete; it may start a task.

An exception that leaves it is logged and becomes `Refuse`'s answer to a `CortexError`, or an abort if an answer had started.
"""

Refuse = Callable[[CortexError, bytes], Answer]
"""Words the answer to a request that never became an exchange: (what was wrong, its path or `b""`) -> answer."""


class Server:
    """The listener. Serial per connection: pipelined requests are answered one after the other."""

    def __init__(self, handler: Handler, refuse: Refuse, ticker: Ticker, limits: ClientLimits | None = None) -> None:
        raise NotImplementedError

    @property
    def num_connections(self) -> int:
        """Client connections open now."""
        raise NotImplementedError

    @property
    def num_exchanges(self) -> int:
        """Requests being answered now."""
        raise NotImplementedError

    async def listen(
        self, host: str, port: int, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> tuple[str, int]:
        """Bind and accept; returns the bound address (port 0 picks one). May be called for several addresses."""
        raise NotImplementedError

    async def listen_on(self, sock: socket.socket, *, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Accept on a socket that is already bound."""
        raise NotImplementedError

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop accepting, close idle connections, let running exchanges end within `grace_s`, then cut the rest."""
        raise NotImplementedError
