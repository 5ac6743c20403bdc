"""Joins a client's exchange and a node's response: bytes pass through unbuffered, at the pace of the slower side."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

from cortex.http.event_boundary import EventBoundary, after_keepalives
from cortex.http.passthrough import BodyTail, ChunkPassthrough
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.http.ticker import Ticker
from cortex.http.upstream.call import UpstreamCall
from cortex.http.upstream.faults import UpstreamFault
from cortex.http.upstream.pool import Pool

_LATE_RESPONSE_BYTES = 1024 * 1024
_EVENT_STREAM = b"text/event-stream"
_UNBUFFERED = (b"x-accel-buffering", b"no")
_STREAM_HEADERS = ((b"content-type", _EVENT_STREAM), (b"cache-control", b"no-cache"), _UNBUFFERED)


class Outcome(Enum):
    """How an exchange ended."""

    COMPLETE = "complete"
    """The client has the node's whole response, whatever its status."""
    REJECTED = "rejected"
    """The caller responded with `Relay.reject`."""
    INTERRUPTED = "interrupted"
    """The node failed after the first byte of its response had been passed on."""
    CLIENT_DISCONNECTED = "client_disconnected"


class Keepalive(NamedTuple):
    """What a client of an event stream gets while it waits. The interval runs on the wall clock."""

    payload: bytes
    """Bytes that are harmless between two events: an SSE comment or a `ping` event, with its blank line."""
    interval_s: float


class Translation(Protocol):
    """Rewrites a node's response as it passes, where node and client speak different dialects."""

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        """The head for the client."""

    def push(self, data: bytes) -> bytes:
        """Whole events for the client; may be empty. Raises `UpstreamFault` when `data` cannot be translated."""

    def finish(self) -> bytes:
        """The end of the body for the client. Raises `UpstreamFault` when the response is not complete."""


class Observer(Protocol):
    """The caller's side of a relay: decides on retries, words errors, and accounts for the request."""

    def on_head(self, relay: Relay, status: int, headers: Headers) -> bool:
        """The node has sent its head; the client has nothing of it yet. True to go on. False to drop this response,
        after having called `send` or `reject`, or to call one of them later."""

    def on_first_data(self, relay: Relay) -> None:
        """The first bytes of the node's body are about to go to the client."""

    def on_fault(self, relay: Relay, fault: UpstreamFault) -> None:
        """The node failed before anything was passed on: call `send` again or `reject`, now or later."""

    def late_response(self, relay: Relay, status: int, body: bytes) -> bytes:
        """Events for a response that is not an event stream (an error, as a rule) and that came after a keepalive had
        started one."""

    def interruption(self, relay: Relay, fault: UpstreamFault) -> bytes:
        """Events that end a stream whose node failed after the first byte."""

    def on_done(self, relay: Relay, outcome: Outcome) -> None:
        """Called exactly once, last. `relay.tail` has the end of the node's body."""


class _Mode(Enum):
    """What happens to the node's body."""

    WAITING = "waiting"
    """Nothing has been passed on."""
    PLAIN = "plain"
    """It is passed on as bytes."""
    EVENTS = "events"
    """It is passed on as whole events."""
    LATE = "late"
    """It is collected for `Observer.late_response`."""


# A module global is looked up faster than a member of its class.
_WAITING, _PLAIN, _EVENTS, _LATE = _Mode


class _Head(NamedTuple):
    """A node's head, held back until there are body bytes to send with it."""

    status: int
    headers: Headers
    content_length: int | None
    is_stream: bool


class Relay:
    """Serves one exchange from the first node that responds.

    Create it as soon as the request has to wait: the `keepalive` interval (streaming requests only) starts here. Then
    call `send`, again for each retry that `Observer.on_fault` decides on, or `reject`. When the client disconnects, the
    call is aborted within one turn of the event loop.

    The head goes out with the first body bytes or the first keepalive, so a node that fails between its head and its
    first byte can still be replaced. Keepalives of the node before its first event are dropped where the relay sends
    its own. Only whole events of a stream are passed on, so a keepalive or an error never lands inside one.
    """

    __slots__ = (
        "_boundary",
        "_call",
        "_extra_headers",
        "_has_written",
        "_head",
        "_keepalive",
        "_late_body",
        "_mode",
        "_node_headers",
        "_observer",
        "_passthrough",
        "_tail",
        "_ticker",
        "_translation",
        "_written_at",
        "closed",
        "exchange",
    )

    def __init__(
        self,
        exchange: Exchange,
        observer: Observer,
        ticker: Ticker,
        *,
        keepalive: Keepalive | None = None,
        extra_headers: Headers = (),
    ) -> None:
        """`extra_headers` go into every response, in place of the node's headers of the same name.

        When the client has already disconnected, `Observer.on_done` is called from here.
        """
        self.exchange = exchange
        self.closed = False
        """`Observer.on_done` has been called, or is being called."""
        self._observer = observer
        self._ticker = ticker
        self._keepalive = keepalive
        self._extra_headers = extra_headers
        self._node_headers: Headers = ()
        self._call: UpstreamCall | None = None
        self._translation: Translation | None = None
        self._boundary: EventBoundary | None = None
        self._head: _Head | None = None
        self._mode = _WAITING
        self._late_body = b""
        self._tail = BodyTail()
        self._passthrough: ChunkPassthrough | None = None
        self._has_written = False
        """Since the last tick; a flag is cheaper to set for each event than the time."""
        self._written_at = ticker.loop.time()
        if keepalive is not None:
            ticker.add(self)
        exchange.on_flow(self._pause, self._resume)
        exchange.on_disconnect(self._client_disconnected)

    # --- for the caller

    @property
    def tail(self) -> BodyTail:
        """The end of the node's body, where usage is reported, and the body's length so far."""
        if self._passthrough is not None:
            self._passthrough.fold()
        return self._tail

    def send(
        self,
        pool: Pool,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: bytes,
        *,
        translation: Translation | None = None,
        response_headers: Headers = (),
        silence_s: float | None = None,
    ) -> None:
        """Send the request to a node. Only while no other call is running; a no-op after the client disconnected.

        `translation` (a new one for each attempt) rewrites the response. `response_headers` are added to it.
        """
        if self.closed:
            return
        if self._call is not None:
            raise RuntimeError("a call is already running")
        self._head = None
        self._boundary = None
        self._translation = translation
        self._node_headers = response_headers
        self._tail = BodyTail()
        self._call = pool.send(method, target, headers, body, self, silence_s=silence_s)
        if self.exchange.paused:
            self._call.pause()

    def translate(self, translation: Translation) -> None:
        """Rewrite the response whose head `Observer.on_head` is looking at; call it from there only."""
        self._translation = translation

    def reject(self, status: int, headers: Headers, body: bytes, events: bytes) -> None:
        """Respond without a node: with `status, headers, body`, or with `events` inside a stream that has started."""
        if self.closed:
            return
        if self._call is not None:
            self._call.abort()
            self._call = None
        if self.exchange.started:
            self.exchange.write(events)
            self.exchange.finish(keep_alive=False)
        else:
            self.exchange.respond(status, [*headers, *self._extra_headers], body)
        self._done(Outcome.REJECTED)

    # --- the sink of the node's response

    def on_head(self, status: int, headers: Headers, content_length: int | None) -> None:
        """Hold the head back until there are body bytes to send with it."""
        call, self._call = self._call, None
        if not self._observer.on_head(self, status, headers):
            if call is not None:
                call.abort()
            return
        self._call = call
        if self._translation is not None:
            status, headers = self._translation.head(status, headers)
            content_length = None
        if self._extra_headers or self._node_headers:
            ours = {name for name, _ in (*self._extra_headers, *self._node_headers)}
            headers = [*(pair for pair in headers if pair[0] not in ours), *self._node_headers]
        is_stream = _is_event_stream(headers)
        if is_stream:
            headers = [*(pair for pair in headers if pair[0] != _UNBUFFERED[0]), _UNBUFFERED]
            content_length = None  # keepalives and errors may make it longer
            self._boundary = EventBoundary() if self._translation is None else None
        self._head = _Head(status, headers, content_length, is_stream)

    def chunk_receiver(self) -> Callable[[bytes], bool] | None:
        """The fast path, between two events of a stream that the client gets in chunks; else None."""
        if self._mode is not _EVENTS or self._boundary is None or not self._boundary.is_between_events:
            return None
        if self._passthrough is None:
            write = self.exchange.chunk_writer()
            if write is None:
                return None
            self._passthrough = ChunkPassthrough(write, self._tail)
        return self._passthrough.take

    def on_data(self, data: bytes) -> None:
        """Pass on what is complete."""
        self.tail.push(data)
        if self._boundary is not None:
            data = self._boundary.push(data)
        elif self._translation is not None:
            try:
                data = self._translation.push(data)
            except UpstreamFault as fault:
                self._abandon_node(fault)
                return
        if data:
            self._pass_on(data)

    def on_end(self) -> None:
        """The response is complete: pass on what was held back, and end the exchange."""
        self._call = None
        try:
            rest = self._held_back()
        except UpstreamFault as fault:
            self.on_fault(fault)
            return
        if self._mode is not _WAITING:
            if rest:
                self._pass_on(rest)
        elif self._head is not None and not self.exchange.started:
            self._respond_whole(self._head, rest)
            return
        else:
            self._begin(rest)
        if self._mode is _LATE and self._head is not None:
            self.exchange.write(self._observer.late_response(self, self._head.status, self._late_body))
        self.exchange.finish()
        self._done(Outcome.COMPLETE)

    def on_fault(self, fault: UpstreamFault) -> None:
        """Let the observer try another node if nothing was passed on; otherwise end the response with an error."""
        self._call = None
        if self._mode is _WAITING:
            self._head = None
            self._boundary = None
            self._observer.on_fault(self, fault)
            return
        if self._mode is _PLAIN:
            self.exchange.abort()
        else:
            escape = self._boundary.escape() if self._boundary is not None else b""
            self.exchange.write(escape + self._observer.interruption(self, fault))
            self.exchange.finish(keep_alive=False)
        self._done(Outcome.INTERRUPTED)

    # --- passing on

    def _held_back(self) -> bytes:
        if self._translation is not None:
            return self._translation.finish()
        return self._boundary.flush() if self._boundary is not None else b""

    def _pass_on(self, data: bytes) -> None:
        mode = self._mode
        if mode is _WAITING:
            if self._keepalive is not None and self._head is not None and self._head.is_stream:
                data = after_keepalives(data, self._keepalive.payload)
            if data:
                self._begin(data)
        elif mode is _LATE:
            if len(self._late_body) < _LATE_RESPONSE_BYTES:
                self._late_body += data
        else:
            self._has_written = True
            self.exchange.write(data)

    def _begin(self, data: bytes) -> None:
        """Pass on the first bytes. From here on no other node can take over."""
        head = self._head
        if head is None:
            raise RuntimeError("a body without a head")
        if data:
            self._observer.on_first_data(self)
        if self.exchange.started:
            self._mode = _EVENTS if head.is_stream and head.status == 200 else _LATE
            self._pass_on(data)
        else:
            self._mode = _EVENTS if head.is_stream else _PLAIN
            self._has_written = True
            headers = [*head.headers, *self._extra_headers]
            self.exchange.start(head.status, headers, head.content_length, first=data)

    def _respond_whole(self, head: _Head, body: bytes) -> None:
        """Send a response of which nothing was passed on before its end."""
        if body:
            self._observer.on_first_data(self)
        self.exchange.respond(head.status, [*head.headers, *self._extra_headers], body)
        self._done(Outcome.COMPLETE)

    def _abandon_node(self, fault: UpstreamFault) -> None:
        if self._call is not None:
            self._call.abort()
        self.on_fault(fault)

    # --- the ticker's callback

    def on_tick(self, now: float) -> None:
        """Send a keepalive if nothing was written for the interval and the stream is between two events."""
        if self._passthrough is not None and self._passthrough.is_active:
            self._passthrough.is_active = False
            self._has_written = True
        if self._has_written:
            self._has_written = False
            self._written_at = now
        keepalive = self._keepalive
        if keepalive is None or now - self._written_at < keepalive.interval_s or not self._may_keep_alive():
            return
        if not self.exchange.started:
            status, headers = (self._head.status, self._head.headers) if self._head else (200, _STREAM_HEADERS)
            self.exchange.start(status, [*headers, *self._extra_headers])
        self.exchange.write(keepalive.payload)
        self._written_at = now

    def _may_keep_alive(self) -> bool:
        head = self._head
        is_other_response = head is not None and not (head.is_stream and head.status == 200)
        is_inside_event = self._boundary is not None and self._boundary.inside
        return not (self.exchange.paused or is_other_response or is_inside_event)

    # --- the client's side

    def _pause(self) -> None:
        if self._call is not None:
            self._call.pause()

    def _resume(self) -> None:
        if self._call is not None:
            self._call.resume()

    def _client_disconnected(self) -> None:
        if self._call is not None:
            self._call.abort()
            self._call = None
        self._done(Outcome.CLIENT_DISCONNECTED)

    def _done(self, outcome: Outcome) -> None:
        self.closed = True
        if self._keepalive is not None:
            self._ticker.discard(self)
        self._observer.on_done(self, outcome)


def _is_event_stream(headers: Headers) -> bool:
    return any(name == b"content-type" and value.lower().startswith(_EVENT_STREAM) for name, value in headers)
