"""Joins a client's exchange and a node's response: bytes pass through unbuffered, at the pace of the slower side."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum

from cortex.http.composed_body import Body
from cortex.http.event_boundary import EventBoundary, LineBoundary, after_keepalives
from cortex.http.head import ResponseHead, for_client
from cortex.http.observer import (
    ERROR_TAIL_BYTES,
    WHOLE_EVENTS,
    WHOLE_LINES,
    BodyTail,
    ChunkPassthrough,
    Keepalive,
    Observer,
    Outcome,
    Translation,
)
from cortex.http.request import Headers
from cortex.http.server.exchange import Exchange
from cortex.http.ticker import Ticker
from cortex.http.upstream.call import UpstreamCall
from cortex.http.upstream.faults import UpstreamFault
from cortex.http.upstream.pool import Pool


class ResponseBody:
    """The body of one response. Its events are passed on whole, or rewritten by a translation."""

    __slots__ = ("_boundary", "_passthrough", "_tail", "translation")

    def __init__(self, translation: Translation | None = None) -> None:
        self.translation = translation
        """Set before the first `push`."""
        self._tail = BodyTail()
        self._boundary: EventBoundary | LineBoundary | None = None
        self._passthrough: ChunkPassthrough | None = None

    @property
    def tail(self) -> BodyTail:
        """The end of the body so far, as the node sent it."""
        if self._passthrough is not None:
            self._passthrough.fold()
        return self._tail

    @property
    def is_inside_event(self) -> bool:
        """The last bytes that `push` returned ended inside an event: nothing else may be sent now."""
        return self._boundary is not None and self._boundary.inside

    def begin_events(self, *, has_lines: bool = False) -> None:
        """The body is an event stream; with `has_lines` each event is a line."""
        if self.translation is None:  # translations return whole events
            self._boundary = LineBoundary() if has_lines else EventBoundary()

    def push(self, data: bytes) -> bytes:
        """The bytes to pass on now; may be empty. Raises `UpstreamFault` when they cannot be translated."""
        if self._passthrough is not None:
            self._passthrough.fold()
        self._tail.push(data)
        if self._boundary is not None:
            return self._boundary.push(data)
        return data if self.translation is None else self.translation.push(data)

    def finish(self) -> bytes:
        """What is left to pass on at the end. Raises `UpstreamFault` when the response is not complete."""
        if self.translation is not None:
            return self.translation.finish()
        return self._boundary.flush() if self._boundary is not None else b""

    def escape(self) -> bytes:
        """Bytes that end an event that was passed on in part, if there is one, so that another can follow."""
        return self._boundary.escape() if self._boundary is not None else b""

    def chunk_receiver(
        self, exchange: Exchange, capture: Callable[[bytes], None] | None
    ) -> Callable[[bytes], bool] | None:
        """The fast path, between two events of a stream that the client gets in chunks; else None. `capture` gets what
        passes there."""
        if self._boundary is None or not self._boundary.is_between_events:
            return None
        if self._passthrough is None:
            write = exchange.chunk_writer()
            if write is None:
                return None
            ends = WHOLE_LINES if isinstance(self._boundary, LineBoundary) else WHOLE_EVENTS
            self._passthrough = ChunkPassthrough(write, self._tail, capture, ends)
        return self._passthrough.take

    def has_passed_chunks(self) -> bool:
        """Whether the fast path was used since the last call."""
        passthrough = self._passthrough
        if passthrough is None or not passthrough.is_active:
            return False
        passthrough.is_active = False
        return True


_LATE_RESPONSE_BYTES = 1024 * 1024


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
_COMPLETE = Outcome.COMPLETE
_NO_BODY = ResponseBody()
"""The body of a relay that has sent nothing yet. Nothing is pushed to it."""


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
        "_body",
        "_call",
        "_capture",
        "_extra_headers",
        "_has_written",
        "_head",
        "_keepalive",
        "_late_body",
        "_mode",
        "_node_headers",
        "_observer",
        "_passed_headers",
        "_ticker",
        "_written_at",
        "closed",
        "exchange",
        "waiting_note",
    )

    def __init__(
        self,
        exchange: Exchange,
        observer: Observer,
        ticker: Ticker,
        keepalive: Keepalive | None = None,
        extra_headers: Headers = (),
        capture: Callable[[bytes], None] | None = None,
    ) -> None:
        """`extra_headers` go into every response, in place of the node's headers of the same name.

        `capture` gets what the client gets: all of a whole body, and of a stream at least its last events.

        When the client has already disconnected, `Observer.on_done` is called from here.
        """
        self.exchange = exchange
        self.closed = False
        """`Observer.on_done` has been called, or is being called."""
        self._observer = observer
        self._ticker = ticker
        self._keepalive = keepalive
        self.waiting_note: Callable[[], bytes] | None = None
        """Events that precede each keepalive until the node has sent its head."""
        self._extra_headers = extra_headers
        self._capture = capture
        self._node_headers: Headers = ()
        self._passed_headers: Collection[bytes] | None = None
        self._call: UpstreamCall | None = None
        self._body = _NO_BODY
        self._head: ResponseHead | None = None
        """Held back until there are body bytes to send with it."""
        self._mode = _WAITING
        self._late_body = b""
        self._has_written = False
        """Since the last tick; a flag is cheaper to set for each event than the time."""
        self._written_at = 0.0
        if keepalive is not None:
            self._written_at = ticker.loop.time()
            ticker.add(self)
        exchange.listen(self)

    # --- for the caller

    @property
    def tail(self) -> BodyTail:
        """The end of the node's body, where usage is reported, and the body's length so far."""
        return self._body.tail

    def send(
        self,
        pool: Pool,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: Body,
        translation: Translation | None = None,
        response_headers: Headers = (),
        silence_s: float | None = None,
        silence_when_down_s: float | None = None,
        passed_headers: Collection[bytes] | None = None,
    ) -> None:
        """Send the request to a node. Only while no other call is running; a no-op after the client disconnected.

        `translation` (a new one for each attempt) rewrites the response. `response_headers` are added to it.
        `passed_headers`: those of the node that the client gets; None: all that are for clients.
        `silence_s` and `silence_when_down_s`: see `Pool.send`.
        """
        if self.closed:
            return
        if self._call is not None:
            raise RuntimeError("a call is already running")
        self._head = None
        self._body = ResponseBody(translation)
        self._node_headers, self._passed_headers = response_headers, passed_headers
        self._call = pool.send(method, target, headers, body, self, silence_s, silence_when_down_s)
        if self.exchange.paused:
            self._call.pause()

    def translate(self, translation: Translation) -> None:
        """Rewrite the response whose head `Observer.on_head` is looking at; call it from there only."""
        self._body.translation = translation

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

    def cancel(self, status: int, headers: Headers, body: bytes, events: bytes) -> None:
        """End the exchange now, at the node too, wherever it is. As `reject`, also after bytes of the node were passed
        on: `events` follow a whole event of its stream, and a body of another kind is cut off."""
        if self.closed:
            return
        if self._call is not None:
            self._call.abort()
            self._call = None
        if not self.exchange.started:
            self.exchange.respond(status, [*headers, *self._extra_headers], body)
        elif self._mode is _PLAIN:
            self.exchange.abort()
        else:
            self.exchange.write(self._body.escape() + events)
            self.exchange.finish(keep_alive=False)
        self._done(Outcome.CANCELLED)

    def drop(self) -> None:
        """The caller does not need the response: end the call, if it runs."""
        if self._call is not None:
            self._call.abort()
            self._call = None

    # --- the sink of the node's response

    def on_head(self, status: int, headers: Headers, content_length: int | None) -> None:
        """Hold the head back until there are body bytes to send with it."""
        call, self._call = self._call, None
        if not self._observer.on_head(self, status, headers):
            if call is not None:
                call.abort()
            return
        self._call = call
        if status >= 400:
            self._body.tail.max_bytes = ERROR_TAIL_BYTES
        if (passed := self._passed_headers) is not None:
            headers = [pair for pair in headers if pair[0] in passed]
        translation = self._body.translation
        if translation is not None:
            status, headers = translation.head(status, headers)
            content_length = None
        ours = self._extra_headers
        if self._node_headers:
            ours = (*self._node_headers, *ours)
        head = self._head = for_client(status, headers, content_length, ours)
        if head.is_stream:
            self._body.begin_events(has_lines=head.has_lines)

    def chunk_receiver(self) -> Callable[[bytes], bool] | None:
        """The fast path, between two events of a stream that the client gets in chunks; else None."""
        return self._body.chunk_receiver(self.exchange, self._capture) if self._mode is _EVENTS else None

    def on_data(self, data: bytes) -> None:
        """Pass on what is complete."""
        try:
            data = self._body.push(data)
        except UpstreamFault as fault:
            self._abandon_node(fault)
            return
        if data:
            self._pass_on(data)

    def on_end(self) -> None:
        """The response is complete: pass on what was held back, and end the exchange."""
        self._call = None
        try:
            rest = self._body.finish()
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
        self._done(_COMPLETE)

    def on_fault(self, fault: UpstreamFault) -> None:
        """Let the observer try another node if nothing was passed on; otherwise end the response with an error."""
        self._call = None
        if self._mode is _WAITING:
            self._head = None
            self._observer.on_fault(self, fault)
            return
        if self._mode is _PLAIN:
            self.exchange.abort()
        else:
            self.exchange.write(self._body.escape() + self._observer.interruption(self, fault))
            self.exchange.finish(keep_alive=False)
        self._done(Outcome.INTERRUPTED)

    # --- passing on

    def _pass_on(self, data: bytes) -> None:
        mode = self._mode
        if mode is _WAITING:
            if self._keepalive is not None and self._head is not None and self._head.is_stream:
                data = after_keepalives(data, self._keepalive.payload)
            if data:
                self._begin(data)
        elif mode is _LATE:
            self._late_body += data[: _LATE_RESPONSE_BYTES - len(self._late_body)]
            if len(self._late_body) >= _LATE_RESPONSE_BYTES and self._call is not None:
                self._call.abort()  # the reason of an error is in its beginning
                self.on_end()
        else:
            self._has_written = True
            if self._capture is not None:
                self._capture(data)
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
            if self._capture is not None:
                self._capture(data)
            self.exchange.start(head.status, head.headers, head.content_length, data)

    def _respond_whole(self, head: ResponseHead, body: bytes) -> None:
        """Send a response of which nothing was passed on before its end."""
        if body:
            self._observer.on_first_data(self)
        if self._capture is not None:
            self._capture(body)
        self.exchange.respond(head.status, head.headers, body)
        self._done(_COMPLETE)

    def _abandon_node(self, fault: UpstreamFault) -> None:
        if self._call is not None:
            self._call.abort()
        self.on_fault(fault)

    # --- the ticker's callback

    def on_tick(self, now: float) -> None:
        """Send a keepalive if nothing was written for the interval and the stream is between two events."""
        if self._body.has_passed_chunks() or self._has_written:
            self._has_written = False
            self._written_at = now
        keepalive = self._keepalive
        if keepalive is not None and now - self._written_at >= keepalive.interval_s and self._may_keep_alive():
            note = self.waiting_note if self._head is None else None
            self._write_aside(keepalive, keepalive.payload if note is None else note() + keepalive.payload)
            self._written_at = now

    def comment(self, text: bytes) -> None:
        """Send a comment of a stream, if it is between two events. Only for requests with keepalives."""
        if self._keepalive is not None and self._may_keep_alive():
            self._write_aside(self._keepalive, text)

    def _write_aside(self, keepalive: Keepalive, data: bytes) -> None:
        if not self.exchange.started:
            if self._head is not None:
                self.exchange.start(self._head.status, self._head.headers)
            else:
                self.exchange.start(200, (*keepalive.headers, *self._extra_headers))
        self.exchange.write(data)

    def _may_keep_alive(self) -> bool:
        head = self._head
        is_other_response = head is not None and not (head.is_stream and head.status == 200)
        return not (self.exchange.paused or is_other_response or self._body.is_inside_event)

    # --- the client's side

    def on_client_full(self) -> None:
        if self._call is not None:
            self._call.pause()

    def on_client_ready(self) -> None:
        if self._call is not None:
            self._call.resume()

    def on_client_disconnected(self) -> None:
        if self._call is not None:
            self._call.abort()
            self._call = None
        self._done(Outcome.CLIENT_DISCONNECTED)

    def _done(self, outcome: Outcome) -> None:
        self.closed = True
        if self._keepalive is not None:
            self._ticker.discard(self)
        self._observer.on_done(self, outcome)
