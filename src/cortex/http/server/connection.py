"""A client's connection: parses bytes into requests and serves them one at a time."""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

from cortex.http.head import date_line, encode_head, status_line
from cortex.http.request import Headers, Request, loggable
from cortex.http.server.exchange import Exchange, SwitchedConnection
from cortex.http.server.parser import RequestParser
from cortex.wire.errors import CortexError, MalformedHTTP, RequestTimeout

if TYPE_CHECKING:
    from cortex.http.server.server import Server

log = logging.getLogger(__name__)

_NEVER = float("inf")
_BACKLOG_BYTES = 64 * 1024
"""Bytes that a client may send ahead of its turn before the connection stops reading."""
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)  # Linux; elsewhere a reset is noticed and an orderly close is not


class Response(NamedTuple):
    """A whole response."""

    status: int
    headers: Headers
    body: bytes


Handler = Callable[[Exchange], None]
"""Called synchronously, on the loop's thread, when a request is complete; it may start a task.

An exception that it raises is logged. The client gets an error from `Reject`, or an abort if a response had started.
"""

Reject = Callable[[CortexError, bytes], Response]
"""Makes the response to a request that never became an exchange, from the error and the path (`b""` if unknown)."""


ResponseHeaders = Callable[[Headers], Headers]
"""Headers for every response, made from those of the request (empty if unknown). They replace others of their names."""


class ClientConnection(asyncio.Protocol):
    """Serves requests one after the other, and rejects what the parser does not accept.

    It keeps reading while an exchange runs, to notice a disconnect. What the client sends ahead is kept, up to a bound.
    No request is parsed or served while the client leaves earlier responses unread.
    """

    __slots__ = (
        "_backlog",
        "_body_began_at",
        "_closing",
        "_deadline",
        "_exchange",
        "_has_served",
        "_limits",
        "_loop",
        "_parser",
        "_retiring",
        "_server",
        "_switched",
        "_writing_paused",
        "client",
        "transport",
    )

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = loop
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)  # until connection_made
        self._parser: RequestParser = cast(RequestParser, None)  # until connection_made
        self.client = ""
        """The peer's address; empty for a Unix socket."""
        self._deadline = _NEVER
        self._body_began_at = _NEVER
        self._exchange: Exchange | None = None
        self._has_served = False
        """A request has arrived before."""
        self._backlog = b""
        self._closing = False
        """Nothing more is read from this client; what was written is still sent."""
        self._retiring = False
        self._switched: SwitchedConnection | None = None
        """What speaks on the connection now."""
        self._writing_paused = False

    # --- the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        peer = transport.get_extra_info("peername")
        self.client = str(peer[0]) if isinstance(peer, tuple) else ""
        server = self._server
        self._parser = RequestParser(self._limits, server.buffered, server.admit_head, self.client, server.spooled)
        self._deadline = self._loop.time() + self._limits.head_s
        rejection = server.enter(self)
        if rejection is None:
            server.ticker.add(self)
        else:
            self._closing = True
            self._write_rejection(rejection)
            self.transport.close()  # at once, because the limit exists to free what such a client holds

    def data_received(self, data: bytes) -> None:
        if self._exchange is not None or self._backlog or self._parser.ready or self._writing_paused:
            # Not yet its turn, even if the running exchange has just ended.
            self._set_backlog(self._backlog + data)
        elif not self._closing:
            self._parse(data)
            self._advance()

    def eof_received(self) -> None:
        if self._exchange is not None:
            self.transport.abort()
        else:
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why does not matter here
        self._server.leave(self)
        self._server.ticker.discard(self)
        self._closing = True
        self._set_backlog(b"")
        exchange = self._exchange
        if exchange is not None:
            self._release(exchange)
            exchange.client_disconnected()
        self._parser.close()

    def pause_writing(self) -> None:
        self._writing_paused = True
        self._deadline = self._loop.time() + self._limits.stall_s
        if self._exchange is not None:
            self._exchange.client_full()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._exchange is not None:
            self._deadline = _NEVER
            self._exchange.client_ready()
        elif not self._closing:
            self._deadline = self._loop.time() + self._limits.idle_s
            self._advance()

    # --- parsing and serving

    def _set_backlog(self, backlog: bytes) -> None:
        """Hold these bytes until it is their turn. Above the bound nothing more is read."""
        self._server.buffered.num_bytes += len(backlog) - len(self._backlog)
        self._backlog = backlog
        if len(backlog) > _BACKLOG_BYTES:
            self.transport.pause_reading()
        elif not self._closing:
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        parser = self._parser
        was_in_message = parser.in_message
        if rest := parser.feed(data):
            self._set_backlog(rest)
        if parser.ready:
            return  # it is served at once, without a deadline
        now = self._loop.time()
        limits = self._limits
        if not was_in_message:
            self._deadline = min(self._deadline, now + limits.head_s)  # later bytes do not postpone it
        if parser.in_message and not parser.in_head:
            self._body_began_at = min(self._body_began_at, now)
            slowest_s = limits.body_s + parser.num_body_bytes / limits.body_bytes_per_s
            self._deadline = min(now + limits.body_s, self._body_began_at + slowest_s)

    def _advance(self) -> None:
        """Serve the next complete request, or reject the connection, or ask for the body: whichever is due."""
        if self._exchange is not None or self._closing or self._writing_paused:
            return
        parser = self._parser
        if self._backlog and not parser.ready and parser.rejection is None:
            backlog = self._backlog
            self._set_backlog(b"")
            self._parse(backlog)
        if parser.ready:
            self._serve(parser.ready.pop(0))
        elif parser.rejection is not None:
            self._reject(parser.rejection)
        elif parser.owes_continue and not parser.in_head:
            parser.owes_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _serve(self, request: Request) -> None:
        self._deadline = self._body_began_at = _NEVER
        self._has_served = True
        exchange = self._exchange = Exchange(request, self)
        if self._retiring:
            exchange.disable_keep_alive()
        server = self._server
        if server.response_headers is not None:
            exchange.added_headers = server.response_headers(request.headers)
        server.num_exchanges += 1
        try:
            server.handler(exchange)
        except Exception:  # a bug in a handler must not leave its client waiting
            log.exception("handler failed for %s %s", loggable(request.method), loggable(request.path))
            if exchange.started:
                exchange.abort()
            else:
                error = CortexError("the server failed on this request; see its log for the details")
                exchange.respond(*server.reject(error, request.path))

    def exchange_ended(self, keep_alive: bool) -> None:
        """The response is complete: serve the next request, or close once everything is sent."""
        exchange = self._exchange
        if exchange is None:
            return  # the client disconnected while the end of its response was held back
        self._release(exchange)
        if not keep_alive or self._retiring:
            self._close()
            return
        if self._writing_paused:
            return  # `resume_writing` continues, or the deadline that `pause_writing` set ends the connection
        self._deadline = self._loop.time() + self._limits.idle_s
        parser = self._parser
        if parser.ready or self._backlog or parser.rejection is not None or parser.owes_continue:
            self._loop.call_soon(self._advance)

    def upgrade(self, headers: Headers, switched: SwitchedConnection) -> None:
        """Switch to another protocol. The connection stays counted until it is lost."""
        if self._backlog or self._parser.ready or self._parser.in_message:
            raise MalformedHTTP("the client must wait for the response to its upgrade before it sends anything")
        self.transport.write(encode_head(status_line(101), headers, b"connection: upgrade\r\n"))
        if self._exchange is not None:
            self._release(self._exchange)
        self._switched = switched
        switched.transport, switched.on_lost = self.transport, self.connection_lost
        self.transport.set_protocol(switched)
        if self._retiring:
            switched.retire()

    def _release(self, exchange: Exchange) -> None:
        self._exchange = None
        self._server.num_exchanges -= 1
        if exchange.request.body:
            self._parser.release(len(exchange.request.body))
        elif exchange.request.upload is not None:
            self._parser.release_upload(len(exchange.request.upload))

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request."""
        if self._switched is not None:
            return self._switched.is_idle
        return self._exchange is None and not self._closing

    def announce_end(self) -> None:
        """Close after the next response, which tells the client so."""
        self._retiring = True
        if self._exchange is not None:
            self._exchange.disable_keep_alive()

    def retire(self) -> None:
        """Take no further request: close now if idle, else after the running exchange."""
        self.announce_end()
        if self._switched is not None:
            self._switched.retire()
        elif self._exchange is None and not self._parser.ready and not self._closing:
            self._close()
            if not self.transport.get_write_buffer_size():  # TLS waits for a client that may never look at an idle one
                self._deadline = self._loop.time() + self._limits.linger_s

    def abort(self) -> None:
        """Close at once."""
        self.transport.abort()

    def _close(self) -> None:
        """Close when everything written has been sent, or when the client has read nothing for `stall_s`."""
        self._closing = True
        self._deadline = self._loop.time() + self._limits.stall_s
        self.transport.close()

    def _reject(self, error: CortexError) -> None:
        """Send an error and close, but read on for `linger_s`: closing with unread bytes would reset the connection
        before the client has read the error."""
        self._closing = True
        self._set_backlog(b"")
        self.transport.resume_reading()
        self._write_rejection(error)
        self._deadline = self._loop.time() + self._limits.linger_s
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _write_rejection(self, error: CortexError) -> None:
        log.debug("request rejected: client=%s error=%s", self.client or "unknown", error.message)
        parser = self._parser
        rejection = encode_rejection(self._server, error, parser.path, parser.headers, is_head=parser.method == b"HEAD")
        self.transport.write(rejection)

    def on_tick(self, now: float) -> None:
        """Enforce the deadline, and notice a disconnect that unread bytes hide."""
        if self._switched is not None:
            self._switched.on_tick(now)
            return
        if now < self._deadline:
            if len(self._backlog) > _BACKLOG_BYTES and _is_disconnected(self.transport):
                self.transport.abort()
            return
        is_due = self._parser.in_message or not self._has_served
        if is_due and not self._closing and not self._writing_paused:
            self._reject(RequestTimeout("the request did not arrive in time; send it again, without pauses"))
        else:
            self.transport.abort()


def _is_disconnected(transport: asyncio.Transport) -> bool:
    """Whether the peer has closed or reset the connection; asks the kernel, without reading."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _PEER_CLOSED)  # errors are reported in any case
    return bool(poll.poll(0))


def encode_rejection(
    server: Server, error: CortexError, path: bytes = b"", headers: Headers = (), *, is_head: bool = False
) -> bytes:
    """A whole response that ends its connection. At most the head of the request was read."""
    status, own, body = server.reject(error, path)
    if server.response_headers is not None:
        own = [*own, *server.response_headers(headers)]
    framing = date_line() + b"content-length: %d\r\nconnection: close\r\n" % len(body)
    return encode_head(status_line(status), own, framing) + (b"" if is_head else body)
