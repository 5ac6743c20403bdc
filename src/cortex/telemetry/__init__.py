"""Traces: one from the client to the engine, through every program that a request passes."""

from cortex.telemetry.tracing import UNTRACED, NoTracer, Span, TelemetrySection, Tracer, open_tracer

__all__ = ["UNTRACED", "NoTracer", "Span", "TelemetrySection", "Tracer", "open_tracer"]
