"""What a trace is made of, as programs see it: the protocols behind which there may be a collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Attributes = Mapping[str, str | int | float]


class Span(Protocol):
    """Something that takes time, as part of a trace. Ended exactly once by whoever began it."""

    @property
    def traceparent(self) -> bytes | None:
        """The header by which another program goes on with this trace; None when there is no trace."""

    def call(self, name: str) -> Span:
        """Begin a part of this that another program does."""

    def phase(self, name: str, begin_s: float, end_s: float) -> None:
        """A part of this that is over; seconds since this began."""

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """It is over, and `error` is why it failed, if it did."""


class Tracer(Protocol):
    """Begins traces, or goes on with those of clients."""

    def begin(self, name: str, traceparent: bytes | None) -> Span:
        """A request has come, as part of the trace that `traceparent` names, if it names one."""

    def close(self) -> None:
        """Send what is left, within bounds. Blocking."""
