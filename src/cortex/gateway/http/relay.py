"""Joins an exchange and an upstream call: bytes through, no buffering, both sides' pace and end respected."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from cortex.gateway.http.exchange import Exchange
from cortex.gateway.http.faults import UpstreamFault
from cortex.gateway.http.request import Headers
from cortex.gateway.http.ticker import Ticker
from cortex.gateway.http.upstream import Pool


class Outcome(Enum):
    """How an exchange ended."""

    COMPLETE = "complete"
    """The client has the node's whole answer (whatever its status)."""
    REFUSED = "refused"
    """The caller answered with `Relay.refuse`."""
    INTERRUPTED = "interrupted"
    """The node died after its first byte."""
    CLIENT_LEFT = "client_left"


class Keepalive(NamedTuple):
    """What a waiting event stream says, and how often. Ticks run on the wall clock from the relay's creation."""

    payload: bytes
    """Bytes that are harmless between two events: an SSE comment or a `ping` event, with its blank line."""
    interval_s: float
    headers: Headers = ()
    """Extra headers for a stream that starts with a keepalive, before the node has answered (a request id, say)."""


class Translation(Protocol):
    """Rewrites a node's answer on its way, where node and client speak different dialects."""

    def head(self, status: int, headers: Headers) -> tuple[int, Headers]:
        """The head the client gets."""

    def push(self, data: bytes) -> bytes:
        """What the client gets for these bytes; may be empty. Raises `UpstreamFault` on nonsense."""

    def finish(self) -> bytes:
        """What the client gets last. Raises `UpstreamFault` when the answer is not complete."""


class Observer(Protocol):
    """The caller's side of a relay: decides, words errors, keeps the books."""

    def on_head(self, relay: Relay, status: int, headers: Headers) -> bool:
        """The node answered; nothing of it was sent yet. True to go on; False to drop this answer, after having called
        `send` or `refuse` (now or later)."""

    def on_first_data(self, relay: Relay, data: bytes) -> None:
        """The first body bytes, just before they go to the client."""

    def on_fault(self, relay: Relay, fault: UpstreamFault) -> None:
        """The node failed before its first body byte: call `send` again (another node) or `refuse`, now or later."""

    def late_answer(self, relay: Relay, status: int, body: bytes) -> bytes:
        """Events that tell a node's refusal (or any answer that is not an event stream) inside a stream that a keepalive
        has already started."""

    def interruption(self, relay: Relay, fault: UpstreamFault) -> bytes:
        """Events that end a stream whose node died after the first byte."""

    def on_done(self, relay: Relay, outcome: Outcome) -> None:
        """Exactly once, last. `relay.tail` holds the end of the node's answer."""


class Relay:
    """Answers one exchange from one node after another until one starts to answer.

    Create it as soon as the request has to wait: a `keepalive` (streaming requests only) counts from here. Then `send`, as
    often as `Observer.on_fault` wants to try, or `refuse`. When the client leaves, the call is aborted within a loop turn.

    The head goes out with the first body bytes or the first keepalive, whichever comes first, so a node that dies between
    its head and its first byte can still be replaced. In an event stream only whole events are passed on, so a keepalive
    or an error never lands inside one.
    """

    exchange: Exchange
    tail: bytes
    """The last bytes (up to `TAIL_BYTES`) of the node's body, where usage is reported."""
    num_body_bytes: int

    def __init__(
        self,
        exchange: Exchange,
        observer: Observer,
        ticker: Ticker,
        *,
        keepalive: Keepalive | None = None,
        translation: Translation | None = None,
        extra_headers: Headers = (),
    ) -> None:
        """`extra_headers` are added to whatever answer is relayed, refused or started by a keepalive."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Over; `on_done` has been or is being called."""
        raise NotImplementedError

    def send(
        self,
        pool: Pool,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: bytes,
        *,
        silence_s: float | None = None,
    ) -> None:
        """Ask a node. Only while no other call is under way; a no-op when the client has left."""
        raise NotImplementedError

    def refuse(self, status: int, headers: Headers, body: bytes, events: bytes) -> None:
        """Answer without a node: `status, headers, body`, or `events` inside the stream if one has been started."""
        raise NotImplementedError
