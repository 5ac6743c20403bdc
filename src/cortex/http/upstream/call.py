"""One request on its way to a node, and who receives the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cortex.http.request import Headers
from cortex.http.upstream.faults import UpstreamFault


class Sink(Protocol):
    """Receives one response: `on_head`, then `on_data` any number of times, then `on_end`; or `on_fault` at any point.

    Called on the loop's thread, never from inside `Pool.send`, and never again after `on_end`, `on_fault` or
    `UpstreamCall.abort`.
    """

    def on_head(self, status: int, headers: Headers, content_length: int | None) -> None:
        """The final head (1xx are skipped). Hop-by-hop headers, the date and the length are not among `headers`."""

    def on_data(self, data: bytes) -> None:
        """Body bytes: whatever one read brought, chunk framing removed; never empty."""

    def chunk_receiver(self) -> Callable[[bytes], bool] | None:
        """Who is offered the next read unparsed, as it came; None to have it parsed. Asked between two chunks.

        The receiver returns True when the read was one whole chunk, framed as `chunks.frame` does, and it has been
        handled: the parser does not see it. The receiver returns False, with nothing done, for any other read, which
        is then parsed and delivered through `on_data`.
        """

    def on_end(self) -> None:
        """The answer is complete."""

    def on_fault(self, fault: UpstreamFault) -> None:
        """The answer will not come, or not to its end."""


class CallConnection(Protocol):
    """The connection that carries a call."""

    def set_reading(self, wanted: bool) -> None:
        """Pause or resume the node."""

    def cut(self) -> None:
        """Close at once."""


class CallCounter(Protocol):
    """Who counts the calls under way."""

    num_calls: int


class UpstreamCall:
    """One request on its way to a node. Made by `Pool.send`; callers use `pause`, `resume`, `abort` and `done`."""

    __slots__ = ("_counter", "_paused", "body", "connection", "done", "head", "is_second_try", "silence_s", "sink")

    def __init__(self, head: bytes, body: bytes, sink: Sink, silence_s: float, counter: CallCounter) -> None:
        self.head = head
        self.body = body
        self.sink = sink
        self.silence_s = silence_s
        self.connection: CallConnection | None = None
        """None while connecting, and again when done."""
        self.is_second_try = False
        self.done = False
        """The answer is complete, has failed, or was aborted: the sink hears no more."""
        self._paused = False
        self._counter = counter
        counter.num_calls += 1

    def pause(self) -> None:
        """Stop reading from the node; its silence is not counted meanwhile. Idempotent."""
        self._paused = True
        if self.connection is not None:
            self.connection.set_reading(False)

    def resume(self) -> None:
        """Read on. Idempotent."""
        self._paused = False
        if self.connection is not None:
            self.connection.set_reading(True)

    def abort(self) -> None:
        """Give up: the connection is cut at once, so that the node notices. No-op when the answer is complete."""
        if not self.done:
            connection = self.connection
            self.settle()
            if connection is not None:
                connection.cut()

    def carried_by(self, connection: CallConnection) -> None:
        """For the connection: it has sent the request."""
        self.connection = connection
        if self._paused:
            connection.set_reading(False)

    def settle(self) -> None:
        """For the connection: the answer is complete, or nobody wants it any more."""
        self.done = True
        self.connection = None
        self.body = b""
        self._counter.num_calls -= 1

    def fail(self, fault: UpstreamFault) -> None:
        """For the pool and the connection: there will be no (whole) answer."""
        if not self.done:
            self.settle()
            self.sink.on_fault(fault)
