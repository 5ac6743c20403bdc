"""One request to a node, and the sink that receives the response."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cortex.http.composed_body import Body
from cortex.http.request import Headers
from cortex.http.upstream.faults import UpstreamFault

if TYPE_CHECKING:
    from cortex.http.upstream.connection import UpstreamConnection
    from cortex.http.upstream.pool import Pool


class Sink(Protocol):
    """Receives one response: `on_head`, then `on_data` any number of times, then `on_end`; or `on_fault` at any point.

    Called on the loop's thread, never from inside `Pool.send`, and never again after `on_end`, `on_fault` or
    `UpstreamCall.abort`.
    """

    def on_head(self, status: int, headers: Headers, content_length: int | None) -> None:
        """The final head (1xx are skipped). `headers` do not include hop-by-hop headers, the date and the length."""

    def on_data(self, data: bytes) -> None:
        """The body bytes of one read, without chunk framing; never empty."""

    def chunk_receiver(self) -> Callable[[bytes], bool] | None:
        """The receiver of the next read, unparsed; None to have it parsed. Called between two chunks.

        The receiver returns True when the read was one whole chunk, framed as `chunks.frame` does, and it has been
        handled: the parser does not see it. The receiver returns False, with nothing done, for any other read, which
        is then parsed and delivered through `on_data`.
        """

    def on_end(self) -> None:
        """The response is complete."""

    def on_fault(self, fault: UpstreamFault) -> None:
        """The response failed, or will not be complete."""


class SilenceLimits(NamedTuple):
    """How long the node may send nothing: see `UpstreamLimits`."""

    silence_s: float
    begin_s: float
    when_down_s: float

    def now_s(self, *, has_begun: bool, is_down: bool) -> float:
        """The limit at the moment. `has_begun`: the response has; `is_down`: the node is known to be."""
        limit_s = self.silence_s if has_begun else self.begin_s
        return min(limit_s, self.when_down_s) if is_down else limit_s


class UpstreamCall:
    """One running request. Made by `Pool.send`; callers use `pause`, `resume`, `abort` and `done`."""

    __slots__ = (
        "_paused",
        "_pool",
        "body",
        "connection",
        "done",
        "head",
        "is_retry",
        "silence",
        "sink",
    )

    def __init__(self, head: bytes, body: Body, sink: Sink, silence: SilenceLimits, pool: Pool) -> None:
        self.head = head
        self.body = body
        self.sink = sink
        self.silence = silence
        self.connection: UpstreamConnection | None = None
        """None while connecting, and again when done."""
        self.is_retry = False
        self.done = False
        """The response is complete, has failed, or was aborted: the sink is not called again."""
        self._paused = False
        self._pool = pool
        pool.num_calls += 1

    def pause(self) -> None:
        """Stop reading from the node. The time does not count as its silence. Idempotent."""
        self._paused = True
        if self.connection is not None:
            self.connection.set_reading(False)

    def resume(self) -> None:
        """Resume reading. Idempotent."""
        self._paused = False
        if self.connection is not None:
            self.connection.set_reading(True)

    def abort(self) -> None:
        """Close the connection at once, so that the node notices. A no-op when the response is complete."""
        if not self.done:
            connection = self.connection
            self.settle()
            if connection is not None:
                connection.cut()

    def assign(self, connection: UpstreamConnection) -> None:
        """For the connection: it has sent the request."""
        self.connection = connection
        if self._paused:
            connection.set_reading(False)

    def begun(self) -> None:
        """For the connection: the response has begun, so that the request is not sent again."""
        self.head = self.body = b""

    def settle(self) -> None:
        """For the connection: the call has ended."""
        self.done = True
        self.connection = None
        self.head = self.body = b""
        self._pool.num_calls -= 1

    def fail(self, fault: UpstreamFault) -> None:
        """For the pool and the connection: the response will not be complete."""
        if not self.done:
            self.settle()
            self.sink.on_fault(fault)
