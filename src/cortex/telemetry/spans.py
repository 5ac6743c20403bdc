"""The protocols of traces, and OpenTelemetry's names for generative AI. Programs use these whether or not a collector
is configured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

Attributes = Mapping[str, str | int | float]

MODEL, OPERATION = "gen_ai.request.model", "gen_ai.operation.name"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
PROVIDER, PROVIDER_NAME = "gen_ai.provider.name", "cortex"

_OPERATIONS = {"relay": "generate_content", "opaque": "generate_content", "count": "count_tokens"}


def operation_name(kind: str) -> str:
    """The value of `gen_ai.operation.name` for what a request needs, where it generates no text. The conventions have
    no name for reranking and counting."""
    return _OPERATIONS.get(kind, kind)


class Span(Protocol):
    """An operation with a duration, as part of a trace. The caller that began it ends it exactly once."""

    @property
    def traceparent(self) -> bytes | None:
        """The header with which another program continues this trace; None when there is no trace."""

    def call(self, name: str) -> Span:
        """Begin a child span for a call to another program."""

    def phase(self, name: str, begin_s: float, end_s: float) -> None:
        """Record a finished part of this span; times are seconds since the span began."""

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """End the span; `error` is the reason if it failed."""


class Tracer(Protocol):
    """Begins traces, or continues those of clients."""

    def begin(self, name: str, traceparent: bytes | None) -> Span:
        """Begin the span of a request, as part of the trace that `traceparent` names, if any."""

    def close(self) -> None:
        """Send the remaining spans, within a time limit. Blocking."""
