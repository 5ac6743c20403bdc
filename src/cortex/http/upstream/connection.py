"""A connection to a node. It carries one call at a time and is kept for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import httptools

from cortex.http.chunks import ends_with_chunk
from cortex.http.composed_body import ComposedBody
from cortex.http.head import NOT_FOR_CLIENTS, end_to_end
from cortex.http.request import Headers
from cortex.http.upstream.call import UpstreamCall
from cortex.http.upstream.faults import ConnectionLost, MalformedResponse, UpstreamFault, UpstreamSilent

if TYPE_CHECKING:
    from cortex.http.upstream.pool import Pool

_READ_BYTES = 128 * 1024


class BodyWriter:
    """Belongs to one connection, for one call."""

    __slots__ = ("_body", "_position", "_transport", "is_paused")

    def __init__(self, transport: asyncio.Transport, body: ComposedBody) -> None:
        self._transport = transport
        self._body = body
        self._position = 0
        self.is_paused = False
        """The node does not keep up."""

    @property
    def is_done(self) -> bool:
        return self._position == len(self._body)

    def write(self) -> None:
        """Writes until everything is sent or the transport pauses. Raises OSError, or EOFError for a file that is
        shorter than it was."""
        while not self.is_paused and not self.is_done and not self._transport.is_closing():
            data = self._body.read(self._position, _READ_BYTES)
            if not data:
                raise EOFError("the spooled body is shorter than it was")
            self._position += len(data)
            self._transport.write(data)


_JOIN_BYTES = 64 * 1024
"""Bodies up to this size are joined with their head, so that both leave in one packet."""


class UpstreamConnection(asyncio.Protocol):
    """Sends a call's request and delivers the response to its sink. The parser's callbacks only record."""

    __slots__ = (
        "_body",
        "_call",
        "_chunked",
        "_complete",
        "_connection_options",
        "_content_length",
        "_has_begun",
        "_has_received",
        "_head_due",
        "_headers",
        "_in_head",
        "_keep_alive",
        "_malformed",
        "_num_overhead_bytes",
        "_parser",
        "_pool",
        "_reading_paused",
        "_received_at",
        "_status",
        "_surplus",
        "_take_chunk",
        "_writer",
        "is_reused",
        "transport",
    )

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)  # until connection_made
        self._call: UpstreamCall | None = None
        self.is_reused = False
        """It was idle before, so the node may have closed it unnoticed; set by the pool."""
        self._take_chunk: Callable[[bytes], bool] | None = None
        """The sink's chunk receiver, set while the parser is between two chunks: it need not see another whole one."""
        self._reading_paused = False
        self._has_received = True
        """Since the last tick; a flag is cheaper to set for each event than the time."""
        self._received_at = 0.0
        # The response being parsed:
        self._has_begun = False
        """The node has sent something since the request."""
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        """Without those that are not for clients."""
        self._connection_options: list[tuple[bytes, bytes]] = []
        """The `Connection` headers, which may list others that are not for clients."""
        self._num_overhead_bytes = 0
        """Bytes since the last part of the body: of heads, chunk extensions and trailers, which the parser holds."""
        self._content_length: int | None = None
        self._chunked = False
        self._in_head = True
        self._head_due = False
        """The head is complete and the sink has not seen it."""
        self._body: list[bytes] = []
        self._complete = False
        self._keep_alive = False
        self._surplus = False
        """Bytes followed the response."""
        self._writer: BodyWriter | None = None
        """Sends the body of the call, where that is not in memory."""
        self._malformed: str | None = None

    # --- for the pool and the call

    def carry(self, call: UpstreamCall) -> None:
        """Send the call's request; the response goes to its sink. Only on a free connection."""
        self._call = call
        self._has_received = True
        self._has_begun = self._complete = self._surplus = self._head_due = False
        self._status = 0
        self._malformed = None
        body = call.body
        if isinstance(body, ComposedBody):
            self.transport.write(call.head)
            self._writer = BodyWriter(self.transport, body)
            call.assign(self)
            self._write_body()
            return
        if len(body) <= _JOIN_BYTES:
            self.transport.write(call.head + body)
        else:
            self.transport.writelines((call.head, body))
        call.assign(self)

    def set_reading(self, wanted: bool) -> None:
        """Pause or resume reading from the node. Time spent paused does not count as its silence."""
        if wanted and self._reading_paused:
            self._reading_paused = False
            self._has_received = True
            self.transport.resume_reading()
        elif not wanted and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def cut(self) -> None:
        """Close at once, without calling the sink."""
        self._call = self._take_chunk = self._writer = None
        self.transport.abort()

    # --- the transport's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._pool.connections.add(self)
        self._pool.ticker.add(self)

    def pause_writing(self) -> None:
        if self._writer is not None:
            self._writer.is_paused = True

    def resume_writing(self) -> None:
        if self._writer is not None:
            self._has_received = True  # it takes the body, which is no silence
            self._writer.is_paused = False
            self._write_body()

    def _write_body(self) -> None:
        try:
            if self._writer is not None:
                self._writer.write()
        except (OSError, EOFError) as error:
            # Not from inside `carry`, whose caller does not expect the sink to be called.
            fault = ConnectionLost(f"the request could not be sent to {self._pool.origin}: {error}")
            self._pool.ticker.loop.call_soon(self._fail, fault)

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        take_chunk = self._take_chunk
        if take_chunk is not None and take_chunk(data):
            return
        call = self._call
        if call is None:
            self.transport.abort()  # unsolicited bytes must not become the response to the next request
            return
        if not self._has_begun:
            self._has_begun = True
            call.begun()
        self._parse(data)
        between_chunks = self._chunked and bool(self._body) and ends_with_chunk(data, self._body[-1])
        self._deliver(call)
        self._take_chunk = call.sink.chunk_receiver() if between_chunks and self._call is call else None

    def eof_received(self) -> None:
        self._closed_by_node(None)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.connections.discard(self)
        self._pool.ticker.discard(self)
        self._pool.forget(self)
        self._closed_by_node(exc)
        del self._parser  # a reference cycle

    # --- the parser's callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True
            return
        self._in_head = True
        self._headers = []
        self._connection_options = []
        self._content_length = None
        self._chunked = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head or self._complete:
            return
        name = name.lower()
        value = value.strip()
        if name not in NOT_FOR_CLIENTS:
            self._headers.append((name, value))
        elif name == b"content-length":
            self._content_length = int(value)
        elif name == b"transfer-encoding":
            self._chunked = True
            if value.lower() != b"chunked":
                self._malformed = "it uses a Transfer-Encoding other than chunked"
        elif name == b"connection":
            self._connection_options.append((name, value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._in_head = False
        self._num_overhead_bytes = 0
        self._status = status
        self._head_due = True

    def on_body(self, data: bytes) -> None:
        if not self._complete:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._status and not self._complete:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()  # the parser knows only at this moment

    # --- parsing and delivery

    def _parse(self, data: bytes) -> None:
        self._num_overhead_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._malformed = "it switched protocols unasked"
        except httptools.HttpParserError as error:
            self._malformed = str(error)
        if self._body or self._complete:
            self._num_overhead_bytes = 0
        elif self._num_overhead_bytes > self._pool.limits.head_bytes:
            part = "head is" if self._in_head else "chunk extensions or trailers are"
            self._malformed = f"its {part} over {self._pool.limits.head_bytes} bytes"

    def _deliver(self, call: UpstreamCall) -> None:
        """Deliver what this read contained. The sink may abort the call at any point."""
        if self._head_due and self._malformed is None:
            self._head_due = False
            call.body = b""  # it will not be sent again
            headers: Headers = self._headers
            if self._connection_options:
                headers = end_to_end([*headers, *self._connection_options], NOT_FOR_CLIENTS)
            call.sink.on_head(self._status, headers, self._content_length)
        if self._body:
            data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body = []
            if not call.done and not self._head_due:
                call.sink.on_data(data)
        if call.done:
            return
        if self._complete:
            self._finish(call)
        elif self._malformed is not None:
            self._fail(MalformedResponse(f"{self._pool.origin} sent a malformed response: {self._malformed}"))

    def _finish(self, call: UpstreamCall) -> None:
        self._call = None
        writer, self._writer = self._writer, None
        reusable = (
            not self._surplus
            and (writer is None or writer.is_done)
            and self._malformed is None
            and self._keep_alive
            and not self.transport.get_write_buffer_size()
            and not self.transport.is_closing()
        )
        if reusable:
            self._in_head = True
            self.set_reading(True)
            self._pool.keep(self)
        else:
            self.transport.abort()
        call.settle()
        call.sink.on_end()

    def _closed_by_node(self, exc: Exception | None) -> None:
        """The node closed the connection. That completes a response without a length, and breaks any other."""
        call = self._call
        if call is None:
            return
        ends_by_close = self._status and not self._chunked and self._content_length is None
        if ends_by_close and exc is None:
            self.cut()
            call.settle()
            call.sink.on_end()
        elif self.is_reused and not self._has_begun and not call.is_retry:
            self.cut()
            call.is_retry = True
            self._pool.send_on_new_connection(call)
        else:
            why = f": {exc}" if exc is not None else ""
            when = "in the middle of its response" if self._has_begun else "before responding"
            self._fail(ConnectionLost(f"{self._pool.origin} closed the connection {when}{why}"))

    def _fail(self, fault: UpstreamFault) -> None:
        call = self._call
        self.cut()
        if call is not None:
            call.fail(fault)

    def has_heard_since(self, then: float) -> bool:
        """Whether some of a response has arrived since the loop's time was `then`."""
        return self._has_begun and (self._has_received or self._received_at >= then)

    def on_tick(self, now: float) -> None:
        """Fail the call of a silent node; close a connection that was idle for too long."""
        if self._has_received:
            self._has_received = False
            self._received_at = now
        silence_s = now - self._received_at
        call = self._call
        if call is None:
            if silence_s >= self._pool.limits.keep_s:
                self.transport.abort()
        elif not self._reading_paused:
            is_down = self._pool.is_down
            limit_s = call.silence.now_s(has_begun=self._has_begun, is_down=is_down)
            if silence_s >= limit_s:
                why = ", and it does not respond to polls" if is_down else ""
                self._fail(UpstreamSilent(f"{self._pool.origin} sent nothing for {limit_s:g} s{why}"))
