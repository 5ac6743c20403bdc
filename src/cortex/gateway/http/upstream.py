"""Connections to one node: kept, reused, watched."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cortex.gateway.http.faults import UpstreamFault
from cortex.gateway.http.limits import UpstreamLimits
from cortex.gateway.http.request import Headers
from cortex.gateway.http.ticker import Ticker


class Response(NamedTuple):
    """A whole answer from a node, collected by `Pool.fetch`."""

    status: int
    headers: Headers
    body: bytes


class Sink(Protocol):
    """Receives one answer: `on_head`, then `on_data` any number of times, then `on_end`; or `on_fault` at any point.

    Called on the loop's thread, never from inside `Pool.send`, and never again after `on_end`, `on_fault` or `Call.abort`.
    """

    def on_head(self, status: int, headers: Headers) -> None:
        """The final head (1xx are skipped), hop-by-hop headers removed."""

    def on_data(self, data: bytes) -> None:
        """Body bytes: whatever one read brought, chunk framing removed; never empty."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_fault(self, fault: UpstreamFault) -> None:
        """The answer will not come, or not to its end."""


class Call:
    """One request on its way to a node."""

    def pause(self) -> None:
        """Stop reading from the node; its silence is not counted meanwhile. Idempotent."""
        raise NotImplementedError

    def resume(self) -> None:
        """Read on. Idempotent."""
        raise NotImplementedError

    def abort(self) -> None:
        """Give up: the connection is cut at once, so that the node notices. No-op when the answer is complete."""
        raise NotImplementedError


class Pool:
    """The connections to one origin, such as `http://beast:13131` or `https://api.example/base/path`."""

    def __init__(self, origin: str, ticker: Ticker, limits: UpstreamLimits | None = None) -> None:
        """Raises ValueError when `origin` is not an http(s) URL. Connects nowhere yet."""
        raise NotImplementedError

    @property
    def num_calls(self) -> int:
        """Calls under way now, connecting ones included."""
        raise NotImplementedError

    @property
    def num_idle(self) -> int:
        """Connections kept for reuse."""
        raise NotImplementedError

    def send(
        self,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: bytes,
        sink: Sink,
        *,
        silence_s: float | None = None,
    ) -> Call:
        """Send a request on a kept connection (the most recently used) or a new one. HEAD is not supported.

        `host`, `content-length` and hop-by-hop headers are this class's business and are removed from `headers`. When a
        reused connection turns out to be dead before a byte came back, the request is sent once more on a new one.
        `silence_s` overrides the limit for this call.
        """
        raise NotImplementedError

    async def fetch(
        self, method: bytes, target: bytes, headers: Headers = (), body: bytes = b"", *, timeout_s: float
    ) -> Response:
        """A whole answer within `timeout_s`, for control traffic. Raises `UpstreamFault`; cancelling aborts the call."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the unused connections and keep none from now on; calls under way run to their end."""
        raise NotImplementedError
