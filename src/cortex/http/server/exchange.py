"""One request on a client connection, and the response to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from cortex.http import chunks
from cortex.http.head import date_line, encode_head, status_line
from cortex.http.request import Headers, Request


class _Body(Enum):
    """How the end of a response is marked."""

    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"
    NONE = "none"


# A module global is looked up faster than a member of its class.
_LENGTH, _CHUNKED, _CLOSE, _NONE = _Body


class ResponseTransport(Protocol):
    """What an exchange needs of its connection's transport."""

    def write(self, data: bytes, /) -> None:
        """Send soon; never blocks."""

    def abort(self) -> None:
        """Close at once."""


class SwitchedConnection(asyncio.Protocol):
    """A client's connection that speaks another protocol than HTTP. It stays counted by its server."""

    transport: asyncio.Transport
    """Set before the first call."""
    on_lost: Callable[[Exception | None], None]
    """So is this, which is called when the transport has ended."""

    @property
    def is_idle(self) -> bool:
        """Whether it may close without a loss for its client."""
        raise NotImplementedError

    def retire(self) -> None:
        """The server ends: close when idle. Called more than once."""
        raise NotImplementedError

    def on_tick(self, now: float) -> None:
        """Check deadlines."""
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_lost(exc)


class ExchangeConnection(Protocol):
    """What an exchange needs of its connection."""

    @property
    def transport(self) -> ResponseTransport:
        """The transport to the client."""

    def exchange_ended(self, keep_alive: bool) -> None:
        """The response is complete: serve the next request, or close once everything is sent."""

    def upgrade(self, headers: Headers, switched: SwitchedConnection) -> None:
        """Switch to another protocol, which `switched` speaks."""


class ExchangeListener(Protocol):
    """What an exchange reports while its response is not complete."""

    def on_client_full(self) -> None:
        """The client's buffer is full: write no more for now."""

    def on_client_ready(self) -> None:
        """The client's buffer has room again."""

    def on_client_disconnected(self) -> None:
        """The client disconnected; called once, within one turn of the event loop."""


class Exchange:
    """Responds to one request: with `respond`, or with `start`, any number of `write`, and `finish`.

    The server creates it and passes it to its handler. Used on the loop's thread only. After the client has
    disconnected every method is a no-op, so callers need not check before each write. Calls out of order (two starts, a
    write before start) raise `RuntimeError`. A header with a line break raises `ValueError`, and nothing is sent. The
    exchange writes `content-length`, `transfer-encoding`, `connection` and `date`; callers must not pass them.
    """

    __slots__ = (
        "_body",
        "_keep_alive",
        "_listener",
        "_num_bytes_due",
        "_on_disconnect",
        "_on_status",
        "added_headers",
        "closed",
        "connection",
        "disconnected",
        "on_end",
        "paused",
        "request",
        "started",
    )

    def __init__(self, request: Request, connection: ExchangeConnection) -> None:
        self.request = request
        self.added_headers: Headers = ()
        """Added to the response, in place of headers of the same names."""
        self.started = False
        """The head of the response has been written."""
        self.closed = False
        """The response is complete or was aborted, or the client disconnected."""
        self.disconnected = False
        """The client disconnected before the response was complete."""
        self.paused = False
        """The client reads more slowly than we write: write no more until `resume` is called."""
        self.on_end: Callable[[], None] | None = None
        """Called once, when the exchange is closed for whatever reason."""
        self.connection = connection
        """Where the response goes; a `DeferredEnd` may stand before it."""
        self._keep_alive = request.keeps_alive
        self._body = _NONE
        self._num_bytes_due = 0
        self._on_disconnect: Callable[[], object] | None = None
        self._on_status: Callable[[int], None] | None = None
        self._listener: ExchangeListener | None = None

    def on_status(self, call: Callable[[int], None] | None) -> None:
        """Call this with the status of the response when it begins, also if the client has disconnected by then. None:
        call nothing, whatever was set before."""
        self._on_status = call

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response with its Content-Length. For HEAD the body is counted but not sent."""
        self.start(status, headers, len(body), body)
        self.finish()

    def start(self, status: int, headers: Headers, content_length: int | None = None, first: bytes = b"") -> None:
        """Begin a response of a known length, or (None) one whose end is marked by chunking or by closing.

        `first` is written together with the head, in one packet.
        """
        if self._on_status is not None:
            self._on_status(status)
        if self.closed:
            return
        if self.started:
            raise RuntimeError("the response has already been started")
        body, framing = self._frame(status, content_length)
        keep_alive = self._keep_alive and body is not _CLOSE
        if not keep_alive:
            framing += b"connection: close\r\n"
        elif self.request.is_http_10:
            framing += b"connection: keep-alive\r\n"
        if self.added_headers:
            added = {name for name, _ in self.added_headers}
            headers = [*(pair for pair in headers if pair[0] not in added), *self.added_headers]
        head = encode_head(status_line(status), headers, date_line() + framing)
        self.started = True
        self._keep_alive = keep_alive
        self._body = body
        self._num_bytes_due = content_length or 0
        self.connection.transport.write(head + self._framed(first) if first else head)

    def _frame(self, status: int, content_length: int | None) -> tuple[_Body, bytes]:
        bodiless_status = status in (204, 304) or status < 200
        if self.request.method == b"HEAD" or bodiless_status:
            if content_length is None or bodiless_status:
                return _NONE, b""
            return _NONE, b"content-length: %d\r\n" % content_length
        if content_length is not None:
            return _LENGTH, b"content-length: %d\r\n" % content_length
        if self.request.is_http_10:
            return _CLOSE, b""
        return _CHUNKED, b"transfer-encoding: chunked\r\n"

    def write(self, data: bytes) -> None:
        """Send a part of the body. Never blocks; `paused` and a listener report whether the client keeps up."""
        if self.closed or not data:
            return
        if self._body is _CHUNKED:
            self.connection.transport.write(chunks.frame(data))
            return
        if not self.started:
            raise RuntimeError("start the response before writing to it")
        if framed := self._framed(data):
            self.connection.transport.write(framed)

    def chunk_writer(self) -> Callable[[bytes], None] | None:
        """Sends parts of the body that `chunks.frame` has framed; None when the body is not chunked.

        It checks nothing, so it must not be called after the exchange has closed.
        """
        return self.connection.transport.write if self._body is _CHUNKED and not self.closed else None

    def _framed(self, data: bytes) -> bytes:
        """A part of the body with its framing."""
        body = self._body
        if body is _CHUNKED:
            return chunks.frame(data)
        if body is _LENGTH:
            self._num_bytes_due -= len(data)
            if self._num_bytes_due < 0:
                self.abort()
                raise RuntimeError("more bytes were written than the response's Content-Length announced")
        return data if body is not _NONE else b""

    def finish(self, keep_alive: bool = True) -> None:
        """End the response. The connection then serves the next request, unless `keep_alive` is False or a side asked
        to close.

        A response shorter than its Content-Length is aborted instead, so that the client cannot take it for complete.
        """
        if self.closed:
            return
        if not self.started:
            raise RuntimeError("start the response before finishing it")
        if self._body is _CHUNKED:
            self.connection.transport.write(chunks.LAST)
        elif self._body is _LENGTH and self._num_bytes_due:
            self.abort()
            return
        self._end()
        self.connection.exchange_ended(keep_alive and self._keep_alive)

    def abort(self) -> None:
        """Close the connection at once, so that the client sees a broken response, not a short one."""
        if not self.closed:
            self._end()
            self.connection.transport.abort()

    def upgrade(self, headers: Headers, switched: SwitchedConnection) -> None:
        """Switch the connection to the protocol that the client requested with an `Upgrade` header. `headers`: of the
        101 response.

        The exchange ends with that. Raises MalformedHTTP when the client did not wait for the response.
        """
        self.connection.upgrade((*headers, *self.added_headers), switched)
        self.started = True
        self._end()

    def on_disconnect(self, callback: Callable[[], object]) -> None:
        """Call `callback` once if the client disconnects before the response is complete, within one loop turn.

        A later callback replaces an earlier one. It is called immediately when the client has already disconnected, and
        never after `finish`, `respond` or `abort`. A client that closes its sending side counts as disconnected.
        """
        self._on_disconnect = callback
        if self.disconnected:
            callback()

    def listen(self, listener: ExchangeListener) -> None:
        """Report to `listener` what the client does, until the response ends.

        A later listener replaces an earlier one. It is called immediately when the client has already disconnected.
        """
        self._listener = listener
        if self.disconnected:
            listener.on_client_disconnected()

    def disable_keep_alive(self) -> None:
        """For the connection: it serves no further request after this one."""
        self._keep_alive = False

    def client_disconnected(self) -> None:
        """For the connection: the client has disconnected."""
        if not self.closed:
            callback, listener = self._on_disconnect, self._listener
            self._end()
            self.disconnected = True
            if callback is not None:
                callback()
            if listener is not None:
                listener.on_client_disconnected()

    def client_full(self) -> None:
        """For the connection: the client's buffer is full."""
        self.paused = True
        if self._listener is not None:
            self._listener.on_client_full()

    def client_ready(self) -> None:
        """For the connection: the client's buffer has room again."""
        self.paused = False
        if self._listener is not None:
            self._listener.on_client_ready()

    def _end(self) -> None:
        on_end = self.on_end
        self.closed = True
        self._on_disconnect = self._listener = self.on_end = None
        if on_end is not None:
            on_end()


class ClientPace:
    """Lets the sender of a file wait for a client that reads more slowly."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._ready = asyncio.Event()
        exchange.listen(self)

    async def has_room(self) -> None:
        """Returns when the client has room for more, or has disconnected."""
        while self._exchange.paused and not self._exchange.closed:
            self._ready.clear()
            await self._ready.wait()

    def on_client_full(self) -> None:
        """The sender asks."""

    def on_client_ready(self) -> None:
        self._ready.set()

    def on_client_disconnected(self) -> None:
        self._ready.set()
