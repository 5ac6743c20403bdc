"""Traces: spans from the client to the engine, through every program that handles a request."""

from cortex.telemetry.spans import Span, Tracer
from cortex.telemetry.tracing import UNTRACED, NoTracer, TelemetrySection, open_tracer

__all__ = ["UNTRACED", "NoTracer", "Span", "TelemetrySection", "Tracer", "open_tracer"]
