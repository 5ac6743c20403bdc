"""Joins an exchange and an upstream call: bytes through, no buffering, both sides' pace and end respected."""

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

_LATE_ANSWER_BYTES = 1024 * 1024
_EVENT_STREAM = b"text/event-stream"
_UNBUFFERED = (b"x-accel-buffering", b"no")
_STREAM_HEADERS = ((b"content-type", _EVENT_STREAM), (b"cache-control", b"no-cache"), _UNBUFFERED)


class Outcome(Enum):
    """How an exchange ended."""

    COMPLETE = "complete"
    """The client has the node's whole answer (whatever its status)."""
    REJECTED = "rejected"
    """The caller answered with `Relay.reject`."""
    INTERRUPTED = "interrupted"
    """The node died after its first byte had been passed on."""
    CLIENT_DISCONNECTED = "client_disconnected"


class Keepalive(NamedTuple):
    """What a waiting event stream says, and how often. Ticks run on the wall clock from the relay's creation."""

    payload: bytes
    """Bytes that are harmless between two events: an SSE comment or a `ping` event, with its blank line."""
    interval_s: float


class Translation(Protocol):
    """Rewrites a node's answer on its way, where node and client speak different dialects."""

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        """The head the client gets."""

    def push(self, data: bytes) -> bytes:
        """What the client gets for these bytes, in whole events; may be empty. Raises `UpstreamFault` on nonsense."""

    def finish(self) -> bytes:
        """What the client gets last. Raises `UpstreamFault` when the answer is not complete."""


class Observer(Protocol):
    """The caller's side of a relay: decides, words errors, keeps the books."""

    def on_head(self, relay: Relay, status: int, headers: Headers) -> bool:
        """The node answered; nothing of it was sent yet. True to go on; False to drop this answer, after having called
        `send` or `reject` (or to do so later)."""

    def on_first_data(self, relay: Relay) -> None:
        """The node has begun to say something; the client hears it next."""

    def on_fault(self, relay: Relay, fault: UpstreamFault) -> None:
        """The node failed before anything of it was passed on: `send` again (to another) or `reject`, now or later."""

    def late_response(self, relay: Relay, status: int, body: bytes) -> bytes:
        """Events that tell a node's refusal (or any answer that is not an event stream) inside a stream that a
        keepalive has already started."""

    def interruption(self, relay: Relay, fault: UpstreamFault) -> bytes:
        """Events that end a stream whose node died after the first byte."""

    def on_done(self, relay: Relay, outcome: Outcome) -> None:
        """Exactly once, last. `relay.tail` holds the end of the node's answer."""


class _Mode(Enum):
    """What is being done with the node's body."""

    WAITING = "waiting"
    PLAIN = "plain"
    EVENTS = "events"
    LATE = "late"


# Looking a member up in its class takes longer than all that is done with it here.
_WAITING, _PLAIN, _EVENTS, _LATE = _Mode


class _Head(NamedTuple):
    """A node's head, held until there is something to send with it."""

    status: int
    headers: Headers
    content_length: int | None
    is_stream: bool


class Relay:
    """Answers one exchange from one node after another until one starts to answer.

    Create it as soon as the request has to wait: a `keepalive` (streaming requests only) counts from here. Then `send`,
    as often as `Observer.on_fault` wants to try, or `reject`. When the client leaves, the call is aborted within a loop
    turn.

    The head goes out with the first body bytes or the first keepalive, whichever comes first, so a node that dies
    between its head and its first byte can still be replaced. A node's own keepalives before its first event are not
    passed on where we give ours: it has said nothing yet. In an event stream only whole events are passed on, so a
    keepalive or an error never lands inside one.
    """

    __slots__ = (
        "_boundary",
        "_call",
        "_extra_headers",
        "_head",
        "_keepalive",
        "_late",
        "_mode",
        "_observer",
        "_passthrough",
        "_spoke",
        "_spoke_at",
        "_tail",
        "_ticker",
        "_translation",
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
        """`extra_headers` are added to whatever answer is relayed, refused or started by a keepalive, instead of the
        node's own of the same name.

        When the client has already left, `Observer.on_done` is called from here.
        """
        self.exchange = exchange
        self.closed = False
        """Over; `Observer.on_done` has been or is being called."""
        self._observer = observer
        self._ticker = ticker
        self._keepalive = keepalive
        self._extra_headers = extra_headers
        self._call: UpstreamCall | None = None
        self._translation: Translation | None = None
        self._boundary: EventBoundary | None = None
        self._head: _Head | None = None
        self._mode = _WAITING
        self._late = b""
        self._tail = BodyTail()
        self._passthrough: ChunkPassthrough | None = None
        self._spoke = False
        """Since the last tick; cheaper to note for each event than the time."""
        self._spoke_at = ticker.loop.time()
        if keepalive is not None:
            ticker.add(self)
        exchange.on_flow(self._pause, self._resume)
        exchange.on_close(self._client_disconnected)

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
        silence_s: float | None = None,
    ) -> None:
        """Ask a node. Only while no other call is under way; a no-op when the client has left.

        `translation` (a fresh one for each attempt) rewrites the answer on its way.
        """
        if self.closed:
            return
        if self._call is not None:
            raise RuntimeError("a call is already under way")
        self._head = None
        self._boundary = None
        self._translation = translation
        self._tail = BodyTail()
        self._call = pool.send(method, target, headers, body, self, silence_s=silence_s)
        if self.exchange.paused:
            self._call.pause()

    def reject(self, status: int, headers: Headers, body: bytes, events: bytes) -> None:
        """Answer without a node: `status, headers, body`, or `events` inside the stream if one has been started."""
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

    # --- the node's answer

    def on_head(self, status: int, headers: Headers, content_length: int | None) -> None:
        """The node began to answer: hold the head until there is something to send with it."""
        call, self._call = self._call, None
        if not self._observer.on_head(self, status, headers):
            if call is not None:
                call.abort()
            return
        self._call = call
        if self._translation is not None:
            status, headers = self._translation.head(status, headers)
            content_length = None
        if self._extra_headers:
            ours = {name for name, _ in self._extra_headers}
            headers = [pair for pair in headers if pair[0] not in ours]
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
        """The node goes on: pass on what is whole."""
        self.tail.push(data)
        if self._boundary is not None:
            data = self._boundary.push(data)
        elif self._translation is not None:
            try:
                data = self._translation.push(data)
            except UpstreamFault as fault:
                self._give_up_on_node(fault)
                return
        if data:
            self._pass_on(data)

    def on_end(self) -> None:
        """The node has said everything."""
        self._call = None
        try:
            rest = self._rest()
        except UpstreamFault as fault:
            self.on_fault(fault)
            return
        if self._mode is _WAITING:
            head = self._head
            if head is not None and not self.exchange.started:
                if rest:
                    self._observer.on_first_data(self)
                self.exchange.respond(head.status, [*head.headers, *self._extra_headers], rest)
                self._done(Outcome.COMPLETE)
                return
            self._begin(rest)
        elif rest:
            self._pass_on(rest)
        if self._mode is _LATE and self._head is not None:
            self.exchange.write(self._observer.late_response(self, self._head.status, self._late))
        self.exchange.finish()
        self._done(Outcome.COMPLETE)

    def on_fault(self, fault: UpstreamFault) -> None:
        """The node failed. Before anything of it was passed on, another may be tried; afterwards we can only say so."""
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

    # --- inside

    def _rest(self) -> bytes:
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
            if len(self._late) < _LATE_ANSWER_BYTES:
                self._late += data
        else:
            self._spoke = True
            self.exchange.write(data)

    def _begin(self, data: bytes) -> None:
        """Pass on the first bytes: no other node can take over from here."""
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
            self._spoke = True
            headers = [*head.headers, *self._extra_headers]
            self.exchange.start(head.status, headers, head.content_length, first=data)

    def _give_up_on_node(self, fault: UpstreamFault) -> None:
        if self._call is not None:
            self._call.abort()
        self.on_fault(fault)

    def on_tick(self, now: float) -> None:
        """Say that we are still here, if nothing was said for a while and this is a place to say it."""
        if self._passthrough is not None and self._passthrough.is_active:
            self._passthrough.is_active = False
            self._spoke = True
        if self._spoke:
            self._spoke = False
            self._spoke_at = now
        keepalive = self._keepalive
        if keepalive is None or now - self._spoke_at < keepalive.interval_s or self.exchange.paused:
            return
        head = self._head
        if head is not None and not (head.is_stream and head.status == 200):
            return  # a whole answer is on its way, or an answer that is not a stream
        if self._boundary is not None and self._boundary.inside:
            return
        if not self.exchange.started:
            status, headers = (head.status, head.headers) if head is not None else (200, _STREAM_HEADERS)
            self.exchange.start(status, [*headers, *self._extra_headers])
        self.exchange.write(keepalive.payload)
        self._spoke_at = now

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
