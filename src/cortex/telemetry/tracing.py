"""The choice of a tracer from the configuration. Without a collector nothing is recorded, at almost no cost."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from cortex.settings import Section, SettingsError
from cortex.telemetry.spans import Attributes, Span, Tracer


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
