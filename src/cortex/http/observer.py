"""The caller's side of a relay: what it decides, rewrites and accounts for."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

from cortex.http.passthrough import BodyTail
from cortex.http.request import Headers
from cortex.http.response_head import STREAM_HEADERS
from cortex.http.upstream.faults import UpstreamFault


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
