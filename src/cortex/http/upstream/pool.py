"""The connections to one node, kept open and reused."""

from __future__ import annotations

import asyncio
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from cortex.http.composed_body import Body
from cortex.http.head import encode_passed_on
from cortex.http.limits import UpstreamLimits
from cortex.http.request import Headers
from cortex.http.ticker import Ticker
from cortex.http.upstream.call import SilenceLimits, Sink, UpstreamCall
from cortex.http.upstream.connection import UpstreamConnection
from cortex.http.upstream.faults import ConnectFailed, ResponseTooLarge, UpstreamFault, UpstreamSilent
from cortex.wire.words import os_error_in_words

__all__ = ["Pool", "Sink", "UpstreamCall", "UpstreamResponse"]

_SPACE = 0x20
"""As a number: to search bytes for bytes raises and drops an error first."""


class UpstreamResponse(NamedTuple):
    """A whole response from a node, collected by `Pool.fetch`."""

    status: int
    headers: Headers
    body: bytes


class Pool:
    """The connections to one origin, such as `http://node:13131` or `https://api.example/base/path`."""

    def __init__(
        self,
        origin: str,
        ticker: Ticker,
        limits: UpstreamLimits | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        place: tuple[str, int] | None = None,
    ) -> None:
        """`tls` verifies the certificate of an https origin; absent: against the authorities of the system. `place`:
        the address and port to connect to; absent: those that the host of `origin` resolves to.

        Raises ValueError when `origin` is not an http(s) URL. Does not connect yet.
        """
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError(f"{origin!r} is not a node's address; write it like http://host:13131")
        self.origin = origin
        self.ticker = ticker
        self.limits = limits or UpstreamLimits()
        self.num_calls = 0
        """Running calls, including those that are connecting; updated by the calls."""
        self.connections: set[UpstreamConnection] = set()
        """Open connections; updated by themselves."""
        self.is_down = False
        """The node is known to be down: its calls may be silent for `limits.silence_when_down_s` only."""
        self._host = parts.hostname
        self._place = place or (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._host_line = b"host: %b\r\n" % parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
        self._base_path = parts.path.rstrip("/").encode()
        self._idle: list[UpstreamConnection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_idle(self) -> int:
        """Connections kept for reuse."""
        return len(self._idle)

    def send(
        self,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: Body,
        sink: Sink,
        silence_s: float | None = None,
        silence_when_down_s: float | None = None,
    ) -> UpstreamCall:
        """Send a request on the most recently used idle connection, or on a new one. HEAD is not supported.

        `host`, `content-length`, `accept-encoding` and hop-by-hop headers are not passed on. When a reused connection
        turns out to be dead before a byte came back, the request is sent once more on a new one. `silence_s` overrides
        both limits of silence for this call, and `silence_when_down_s` that of a node which is down. Raises
        ValueError when the request cannot be encoded.
        """
        if method == b"HEAD" or _SPACE in method or _SPACE in target:
            raise ValueError(f"cannot send {method!r} {target!r} to a node")
        framing = b"%bcontent-length: %d\r\n" % (self._host_line, len(body))
        start_line = b"%b %b%b HTTP/1.1" % (method, self._base_path, target)
        head = encode_passed_on(start_line, headers, framing)
        limits = self.limits
        silence = SilenceLimits(
            limits.silence_s if silence_s is None else silence_s,
            limits.begin_s or limits.silence_s if silence_s is None else silence_s,
            limits.silence_when_down_s if silence_when_down_s is None else silence_when_down_s,
        )
        call = UpstreamCall(head, body, sink, silence, self)
        if self._idle:
            self._idle.pop().carry(call)
        else:
            self.send_on_new_connection(call)
        return call

    async def fetch(
        self, method: bytes, target: bytes, headers: Headers = (), body: Body = b"", *, timeout_s: float
    ) -> UpstreamResponse:
        """A whole response within `timeout_s`, for control traffic. Raises `UpstreamFault`; cancelling aborts it."""
        collector = _Collector(self.origin, self.limits.fetch_body_bytes)
        call = self.send(method, target, headers, body, collector, silence_s=timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await collector.response
        except TimeoutError:
            path = target.partition(b"?")[0].decode()
            raise UpstreamSilent(f"{self.origin} did not respond to {path} within {timeout_s:g} s") from None
        finally:
            call.abort()

    def has_heard_since(self, then: float) -> bool:
        """Whether some of any response has arrived since the loop's time was `then`."""
        return any(connection.has_heard_since(then) for connection in self.connections)

    def close(self) -> None:
        """Close the idle connections and keep none from now on; running calls go on to their end."""
        self._closed = True
        for connection in self._idle:
            connection.transport.abort()
        self._idle.clear()

    # --- for the connections

    def keep(self, connection: UpstreamConnection) -> None:
        """The connection is free for another call."""
        if self._closed or len(self._idle) >= self.limits.num_kept:
            connection.transport.abort()
        else:
            connection.is_reused = True
            self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """The connection has closed."""
        if connection in self._idle:
            self._idle.remove(connection)

    def send_on_new_connection(self, call: UpstreamCall) -> None:
        """Send `call` on a new connection."""
        task = asyncio.get_running_loop().create_task(self._connect(call))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, call: UpstreamCall) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.limits.connect_s):
                name = self._host if self._tls is not None else None
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self), *self._place, ssl=self._tls, server_hostname=name
                )
        except TimeoutError:
            call.fail(ConnectFailed(f"no connection to {self.origin} within {self.limits.connect_s:g} s"))
        except OSError as error:
            call.fail(ConnectFailed(f"no connection to {self.origin}: {os_error_in_words(error)}"))
        except UnicodeError as error:
            call.fail(ConnectFailed(f"no connection to {self.origin}: its host name is invalid: {error}"))
        else:
            if call.done:
                self.keep(connection)
            else:
                connection.carry(call)


class _Collector:
    """The sink of `fetch`: collects the whole response in a future."""

    def __init__(self, origin: str, max_body_bytes: int) -> None:
        self.response: asyncio.Future[UpstreamResponse] = asyncio.get_running_loop().create_future()
        self._origin = origin
        self._max_body_bytes = max_body_bytes
        self._status = 0
        self._headers: Headers = ()
        self._body = bytearray()

    def on_head(self, status: int, headers: Headers, content_length: int | None) -> None:  # noqa: ARG002 - as Sink has it
        self._status = status
        self._headers = headers

    def chunk_receiver(self) -> None:
        """Every read is parsed."""

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._max_body_bytes:
            self.on_fault(ResponseTooLarge(f"{self._origin} sent more than {self._max_body_bytes} bytes"))

    def on_end(self) -> None:
        if not self.response.done():
            self.response.set_result(UpstreamResponse(self._status, self._headers, bytes(self._body)))

    def on_fault(self, fault: UpstreamFault) -> None:
        if not self.response.done():
            self.response.set_exception(fault)
