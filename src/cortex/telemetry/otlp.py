"""Traces for an OTLP/HTTP collector. Imported only when one is configured.

The SDK's own thread sends spans in batches. An unreachable collector loses spans but delays no request.
"""

from __future__ import annotations

import time

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as SdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cortex import __version__
from cortex.telemetry.spans import Attributes, Span

EXPORT_TIMEOUT_S = 3.0
SEND_EVERY_S = 1.0
_NS = 1_000_000_000
_propagator = TraceContextTextMapPropagator()


class OtlpSpan:
    """A recorded span."""

    __slots__ = ("_began_ns", "_span", "_tracer", "traceparent")

    def __init__(self, tracer: SdkTracer, name: str, parent: Context, kind: SpanKind) -> None:
        self._tracer = tracer
        self._began_ns = time.time_ns()
        self._span: SdkSpan = tracer.start_span(name, context=parent, kind=kind, start_time=self._began_ns)
        context = self._span.get_span_context()
        self.traceparent: bytes | None = (
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()
        )

    def call(self, name: str) -> Span:
        return OtlpSpan(self._tracer, name, set_span_in_context(self._span, Context()), SpanKind.CLIENT)

    def phase(self, name: str, begin_s: float, end_s: float) -> None:
        context = set_span_in_context(self._span, Context())
        begin_ns = self._began_ns + int(begin_s * _NS)
        part = self._tracer.start_span(name, context=context, kind=SpanKind.INTERNAL, start_time=begin_ns)
        part.end(self._began_ns + int(end_s * _NS))

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_attribute("error.type", error if error.isidentifier() else "_OTHER")
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class OtlpTracer:
    """The tracer of a program, with its exporter."""

    def __init__(
        self, endpoint: str, sample_ratio: float, service: str, *, export_timeout_s: float = EXPORT_TIMEOUT_S
    ) -> None:
        exporter = OTLPSpanExporter(
            endpoint=endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces", timeout=export_timeout_s
        )
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service, "service.version": __version__}),
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                schedule_delay_millis=SEND_EVERY_S * 1000,
                export_timeout_millis=export_timeout_s * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("cortex", __version__)

    def begin(self, name: str, traceparent: bytes | None) -> Span:
        headers = {} if traceparent is None else {"traceparent": traceparent.decode("latin-1")}
        return OtlpSpan(self._tracer, name, _propagator.extract(headers, context=Context()), SpanKind.SERVER)

    def close(self) -> None:
        self._provider.shutdown()
