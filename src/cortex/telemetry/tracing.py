"""The choice of a tracer from the configuration. Without a collector nothing is recorded, at almost no cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Protocol

from msgspec import Meta

from cortex.settings import Section, SettingsError

Attributes = Mapping[str, str | int | float]

MODEL, OPERATION = "gen_ai.request.model", "gen_ai.operation.name"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"

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


class TelemetrySection(Section, frozen=True):
    """Export of traces."""

    endpoint: str | None = None
    """OTLP/HTTP collector, such as `http://collector:4318`; no traces when absent. Needs the extra `telemetry`."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of requests that are traced. For a client that sends `traceparent`, its sampling flag decides."""

    def __post_init__(self) -> None:
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint must look like `http://collector:4318`, got `{self.endpoint}`")


class _Untraced:
    """A span that is not recorded. It passes on the `traceparent` of its request."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: bytes | None) -> None:
        self.traceparent = traceparent

    def call(self, name: str) -> Span:  # noqa: ARG002
        return self

    def phase(self, name: str, begin_s: float, end_s: float) -> None:
        """Nothing is recorded."""

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """Nothing is recorded."""


UNTRACED: Span = _Untraced(None)


class NoTracer:
    """The tracer without a collector."""

    def begin(self, name: str, traceparent: bytes | None) -> Span:  # noqa: ARG002
        return UNTRACED if traceparent is None else _Untraced(traceparent)

    def close(self) -> None:
        """There is nothing to send."""


def open_tracer(section: TelemetrySection, service: str) -> Tracer:
    """The tracer for `section`, under the name `service`. Raises SettingsError when its packages are missing."""
    if section.endpoint is None:
        return NoTracer()
    try:
        from cortex.telemetry.otlp import OtlpTracer
    except ImportError as problem:
        raise SettingsError(
            "telemetry.endpoint needs packages that are not installed: "
            "run `pip install '.[telemetry]'` in a checkout of cortex"
        ) from problem
    return OtlpTracer(section.endpoint, section.sample_ratio, service)
