"""A client's connection: bytes in, one exchange at a time out."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import httptools

from cortex.gateway.http.exchange import Exchange
from cortex.gateway.http.framing import body_too_large, judge, split_target
from cortex.gateway.http.head import date_line, encode_head, status_line
from cortex.gateway.http.limits import ClientLimits
from cortex.gateway.http.request import Headers, Request
from cortex.gateway.http.ticker import Ticker
from cortex.wire.errors import CortexError, HeadersTooLarge, MalformedHTTP, RequestTimeout

log = logging.getLogger(__name__)

_NEVER = float("inf")
_BACKLOG_BYTES = 64 * 1024
"""Bytes a client may send ahead of its turn before we stop reading."""
_CHUNKING_OVERHEAD = 8
"""Wire bytes allowed per body byte: one-byte chunks cost six, so more is chunk extensions without end."""


class Answer(NamedTuple):
    """A whole response."""

    status: int
    headers: Headers
    body: bytes


Handler = Callable[[Exchange], None]
"""Called synchronously, on the loop's thread, when a request's body is complete; it may start a task.

An exception that leaves it is logged and becomes `Refuse`'s answer to a `CortexError`, or an abort if an answer had
started.
"""

Refuse = Callable[[CortexError, bytes], Answer]
"""Words the answer to a request that never became an exchange: (what was wrong, its path or `b""`) -> answer."""


class House(Protocol):
    """What a connection needs of the server it belongs to."""

    handler: Handler
    refuse: Refuse
    limits: ClientLimits
    ticker: Ticker
    connections: set[Connection]
    num_exchanges: int


class _Ready(NamedTuple):
    """A complete request that waits for its turn."""

    request: Request
    keep_alive: bool
    http_10: bool


class Connection(asyncio.Protocol):
    """Parses requests, refuses what is ambiguous or too large, and answers serially.

    Reading goes on while an exchange runs, so that a client that leaves is noticed; what it sends ahead is kept for
    later, up to a bound. The parser's callbacks only record; everything that acts runs after `feed_data` returned.
    """

    def __init__(self, house: House, loop: asyncio.AbstractEventLoop) -> None:
        self._house = house
        self._limits = house.limits
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)  # until connection_made
        self._client = ""
        self._deadline = _NEVER
        self._exchange: Exchange | None = None
        self._ready: deque[_Ready] = deque()
        self._backlog = b""
        self._refusal: CortexError | None = None
        self._closing = False
        """Nothing more is read from this client; what is written still goes out."""
        self._retiring = False
        self._writing_paused = False
        # The message being parsed:
        self._in_message = False
        self._in_head = False
        self._declines_upgrade = False
        self._keeps_head = False
        self._num_message_bytes = 0
        self._num_body_bytes = 0
        self._owes_continue = False
        self._method = b""
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._http_10 = False

    # --- the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        peer = transport.get_extra_info("peername")
        self._client = str(peer[0]) if isinstance(peer, tuple) else ""
        self._deadline = self._loop.time() + self._limits.idle_s
        self._house.connections.add(self)
        self._house.ticker.add(self)

    def data_received(self, data: bytes) -> None:
        if self._exchange is not None or self._ready or self._backlog:
            self._backlog += data  # not its turn yet, even if the running exchange has just ended
            if len(self._backlog) > _BACKLOG_BYTES:
                self.transport.pause_reading()
        elif not self._closing:
            self._feed(data)
            self._advance()

    def eof_received(self) -> None:
        if self._exchange is not None:
            self.transport.abort()
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - why does not matter here
        self._house.connections.discard(self)
        self._house.ticker.discard(self)
        self._closing = True
        del self._parser  # it refers back to us
        self._ready.clear()
        exchange = self._exchange
        if exchange is not None:
            self._release()
            exchange.client_left()

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

    # --- the parser's callbacks

    def on_message_begin(self) -> None:
        self._in_message = True
        if not self._keeps_head:
            self._in_head = True
            self._target = b""
            self._headers = []
        self._body = []
        self._num_body_bytes = 0

    def on_url(self, url: bytes) -> None:
        if not self._keeps_head:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        if self._keeps_head:
            self._keeps_head = False
            return
        self._in_head = False
        if self._refusal is not None:
            return
        parser = self._parser
        version = parser.get_http_version()
        self._method = parser.get_method()
        self._http_10 = version == "1.0"
        self._refusal, self._owes_continue = judge(self._method, version, self._headers, self._limits)
        if self._num_message_bytes > self._limits.head_bytes:
            num_head_bytes = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if num_head_bytes > self._limits.head_bytes:
                self._refusal = self._head_too_large()
        self._declines_upgrade = parser.should_upgrade()

    def on_body(self, data: bytes) -> None:
        self._num_body_bytes += len(data)
        if self._num_body_bytes <= self._limits.body_bytes:
            self._body.append(data)
        elif self._refusal is None:
            self._body.clear()
            self._refusal = body_too_large(self._limits)

    def on_message_complete(self) -> None:
        if self._declines_upgrade or self._refusal is not None:
            return
        parts = split_target(self._target)
        if parts is None:
            self._refusal = MalformedHTTP("the request target must be a path or an absolute http URL")
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        request = Request(self._method, parts[0], parts[1], self._headers, body, self._client)
        self._ready.append(_Ready(request, self._parser.should_keep_alive(), self._http_10))
        self._body = []
        self._num_message_bytes = 0
        self._in_message = False
        self._owes_continue = False

    # --- what happens

    def _feed(self, data: bytes) -> None:
        if not self._in_message:
            self._num_message_bytes = 0
            self._deadline = self._loop.time() + self._limits.head_s
        self._num_message_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._refusal is None:
                self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self._refusal is None:
                self._refusal = MalformedHTTP(f"not a request that can be read safely: {error}")
        if self._in_message and self._refusal is None:
            self._check_progress()

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read on as if there were no `Upgrade`: some clients offer HTTP/2 with every request, body and all.

        The parser gives up at such a head, so another one, told only how the body is framed, reads the body.
        """
        self._declines_upgrade = False
        self._keeps_head = True
        self._parser = httptools.HttpRequestParser(self)
        framing = [pair for pair in self._headers if pair[0] in (b"content-length", b"transfer-encoding")]
        self._feed(encode_body_head(framing) + rest)

    def _check_progress(self) -> None:
        limits = self._limits
        if self._in_head:
            if self._num_message_bytes > limits.head_bytes:
                self._refusal = self._head_too_large()
            return
        self._deadline = self._loop.time() + limits.body_s
        if self._num_message_bytes > 2 * limits.head_bytes + _CHUNKING_OVERHEAD * self._num_body_bytes:
            self._refusal = MalformedHTTP("the chunked body is mostly chunk extensions; send plain chunks")

    def _head_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"the request line and headers are over {self._limits.head_bytes} bytes; send less")

    def _advance(self) -> None:
        """Serve the next request that is complete, or refuse, or read on: whichever is due."""
        if self._exchange is not None or self._closing:
            return
        if not self._ready and self._refusal is None and self._backlog:
            backlog, self._backlog = self._backlog, b""
            self.transport.resume_reading()
            self._feed(backlog)
        if self._ready:
            self._serve(self._ready.popleft())
        elif self._refusal is not None:
            self._refuse(self._refusal)
        elif self._owes_continue and not self._in_head:
            self._owes_continue = False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _serve(self, ready: _Ready) -> None:
        self._deadline = self._loop.time() + self._limits.stall_s if self._writing_paused else _NEVER
        keep_alive = ready.keep_alive and not self._retiring
        exchange = Exchange(ready.request, self, keep_alive=keep_alive, http_10=ready.http_10)
        exchange.paused = self._writing_paused
        self._exchange = exchange
        self._house.num_exchanges += 1
        try:
            self._house.handler(exchange)
        except Exception:  # whatever a handler forgot must not leave a client waiting
            log.exception("the handler failed on %s %s", ready.request.method, ready.request.path)
            if exchange.started:
                exchange.abort()
            else:
                error = CortexError("the gateway failed on this request; its log has the details")
                exchange.respond(*self._house.refuse(error, ready.request.path))

    def exchange_ended(self, *, keep_alive: bool) -> None:
        """The answer is complete; go on to the next request, or close once everything is sent."""
        self._release()
        if not keep_alive or self._retiring:
            self._close()
            return
        self._deadline = self._loop.time() + self._limits.idle_s
        if self._ready or self._backlog or self._refusal is not None or self._owes_continue:
            self._loop.call_soon(self._advance)

    def _release(self) -> None:
        self._exchange = None
        self._house.num_exchanges -= 1

    def retire(self) -> None:
        """Take no further request: close now if idle, else after the running exchange."""
        self._retiring = True
        if self._exchange is not None:
            self._exchange.be_the_last()
        elif not self._ready and not self._closing:
            self._close()

    def _close(self) -> None:
        """Close when everything written has been sent, but wait no longer than for a stalled client."""
        self._closing = True
        self._deadline = self._loop.time() + self._limits.stall_s
        self.transport.close()

    def _refuse(self, error: CortexError) -> None:
        """Answer and close, but go on reading for a moment: closing on unread bytes would destroy the answer."""
        self._closing = True
        path = split_target(self._target)
        status, headers, body = self._house.refuse(error, path[0] if path is not None else b"")
        framing = date_line() + b"content-length: %d\r\nconnection: close\r\n" % len(body)
        self.transport.write(encode_head(status_line(status), headers, framing))
        if self._method != b"HEAD":
            self.transport.write(body)
        self._deadline = self._loop.time() + self._limits.linger_s
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def on_tick(self, now: float) -> None:
        """Close what has waited too long."""
        if now < self._deadline:
            return
        if self._in_message and not self._closing and not self._writing_paused:
            self._refuse(RequestTimeout("the request did not arrive in time; send it again"))
        else:
            self.transport.abort()


def encode_body_head(framing: Headers) -> bytes:
    """The head of a request of which only the body matters."""
    return b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in framing) + b"\r\n"
