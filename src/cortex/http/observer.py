"""The caller's side of a relay: what it decides, rewrites and accounts for, and the chunks that it lets through
unparsed."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple, Protocol

from cortex.http.chunks import SIZE_LINES, payload
from cortex.http.event_boundary import BLANK_LINES
from cortex.http.head import STREAM_HEADERS
from cortex.http.request import Headers
from cortex.http.upstream.faults import UpstreamFault

TAIL_BYTES = 2048
ERROR_TAIL_BYTES = 64 * 1024
"""An error is read as a whole: its code may be anywhere in its body."""
_NUM_TAIL_CHUNKS = 8
"""Chunks that are kept for the tail: the last ones of a stream, where its usage is."""
_MAX_HELD_CHUNKS = 4 * _NUM_TAIL_CHUNKS
_FRAME_BYTES = 6
"""Framing of a chunk of 16 to 255 bytes, which most events are; smaller ones have a byte less, larger ones one more."""
WHOLE_EVENTS = tuple(blank + b"\r\n" for blank in BLANK_LINES)
"""How a chunk ends that leaves no event open."""
WHOLE_LINES = (b"}\n\r\n",)
"""The same where events are lines."""


class BodyTail:
    """The end of a response body, where usage is reported, and the body's length. Chunk framing is not part of it."""

    __slots__ = ("_kept", "max_bytes", "num_bytes")

    def __init__(self) -> None:
        self._kept = bytearray()
        self.max_bytes = TAIL_BYTES
        self.num_bytes = 0
        """Length of the body so far. Inexact by a byte for each small or large chunk that was passed through."""

    def push(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._kept += data[-self.max_bytes :]
        if len(self._kept) > 4 * self.max_bytes:  # seldom, not at every push
            del self._kept[: -self.max_bytes]

    def skip(self, num_bytes: int) -> None:
        """Count bytes that are not kept: more of the body has already followed them."""
        self.num_bytes += num_bytes
        self._kept.clear()

    def __bytes__(self) -> bytes:
        """The last bytes of the body, at most `max_bytes`."""
        return bytes(self._kept[-self.max_bytes :])


class ChunkPassthrough:
    """Sends chunks to the client as they came from the node. Used between two events of a stream, for nearly all of it.

    `take` makes as few calls and objects as it can. A quiet stream finds the CPU caches cold at every event, so each of
    them would cost a cache miss.
    """

    __slots__ = ("_capture", "_chunks", "_ends", "_tail", "_write", "is_active")

    def __init__(
        self,
        write: Callable[[bytes], None],
        tail: BodyTail,
        capture: Callable[[bytes], None] | None = None,
        ends: tuple[bytes, ...] = WHOLE_EVENTS,
    ) -> None:
        """`write` sends framed bytes to the client. `fold` adds the data that went through here to `tail`, and passes
        it to `capture`. `ends`: how a chunk of whole events ends."""
        self._ends = ends
        self._write = write
        self._tail = tail
        self._capture = capture
        self._chunks: list[bytes] = []
        self.is_active = False
        """Set when a chunk was sent; cleared by the reader."""

    def take(self, wire: bytes) -> bool:
        """Send `wire` if it is one whole chunk, framed as `chunks.frame` does, whose last event is complete.

        Returns False, with nothing done, if it is anything else.
        """
        try:
            is_whole = wire.startswith(SIZE_LINES[len(wire)]) and wire.endswith(self._ends)
        except IndexError:  # longer than the table covers
            return False
        if is_whole:
            self._write(wire)
            self.is_active = True
            chunks = self._chunks
            chunks.append(wire)
            if len(chunks) > _MAX_HELD_CHUNKS:
                self._drop_oldest()
        return is_whole

    def _drop_oldest(self) -> None:
        dropped = self._chunks[:-_NUM_TAIL_CHUNKS]
        del self._chunks[:-_NUM_TAIL_CHUNKS]
        self._tail.skip(sum(map(len, dropped)) - _FRAME_BYTES * len(dropped))

    def fold(self) -> None:
        """Add the chunks that were sent since the last call to the tail."""
        if self._chunks:
            data = b"".join(map(payload, self._chunks))
            self._tail.push(data)
            self._chunks.clear()
            if self._capture is not None:
                self._capture(data)


class Outcome(StrEnum):
    """How an exchange ended."""

    COMPLETE = "complete"
    """The client has the node's whole response, whatever its status."""
    REJECTED = "rejected"
    """The caller responded with `Relay.reject`."""
    INTERRUPTED = "interrupted"
    """The node failed after the first byte of its response had been passed on."""
    CLIENT_DISCONNECTED = "client_disconnected"
    CANCELLED = "cancelled"
    """The caller ended it with `Relay.cancel`."""


class Keepalive(NamedTuple):
    """What a client of an event stream gets while it waits. The interval runs on the wall clock."""

    payload: bytes
    """Bytes that are harmless between two events: an SSE comment or a `ping` event, with its
    blank line, or space before a line."""
    interval_s: float
    headers: Headers = STREAM_HEADERS
    """Those of a stream that begins with it."""


class Translation(Protocol):
    """Rewrites a node's response as it passes, where node and client speak different dialects."""

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        """The head for the client."""

    def push(self, data: bytes) -> bytes:
        """Whole events for the client; may be empty. Raises `UpstreamFault` when `data` cannot be translated."""

    def finish(self) -> bytes:
        """The end of the body for the client. Raises `UpstreamFault` when the response is not complete."""


class ObservedRelay(Protocol):
    """What an observer may do with the relay that calls it. The relay's owner may also `send` again."""

    @property
    def tail(self) -> BodyTail:
        """The end of the node's body, where usage is reported, and the body's length so far."""

    def translate(self, translation: Translation) -> None:
        """Rewrite the response whose head `Observer.on_head` is looking at; call it from there only."""

    def reject(self, status: int, headers: Headers, body: bytes, events: bytes) -> None:
        """Respond without a node: with `status, headers, body`, or with `events` inside a stream that has started."""


class Observer(Protocol):
    """The caller's side of a relay: decides on retries, words errors, and accounts for the request."""

    def on_head(self, relay: ObservedRelay, status: int, headers: Headers) -> bool:
        """The node has sent its head; the client has nothing of it yet. True to go on. False to drop this response,
        after having called `send` or `reject`, or to call one of them later."""

    def on_first_data(self, relay: ObservedRelay) -> None:
        """The first bytes of the node's body are about to go to the client."""

    def on_fault(self, relay: ObservedRelay, fault: UpstreamFault) -> None:
        """The node failed before anything was passed on: call `send` again or `reject`, now or later."""

    def late_response(self, relay: ObservedRelay, status: int, body: bytes) -> bytes:
        """Events for a response that is not an event stream (an error, as a rule) and that came after a keepalive had
        started one."""

    def interruption(self, relay: ObservedRelay, fault: UpstreamFault) -> bytes:
        """Events that end a stream whose node failed after the first byte."""

    def on_done(self, relay: ObservedRelay, outcome: Outcome) -> None:
        """Called exactly once, last. `relay.tail` has the end of the node's body."""
