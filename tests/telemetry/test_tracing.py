"""Traces as a collector receives them."""

from __future__ import annotations

import socket
import sys
import time

import pytest

from cortex.settings import SettingsError
from cortex.telemetry.otlp import OtlpTracer
from cortex.telemetry.tracing import UNTRACED, NoTracer, TelemetrySection, open_tracer

from ..waiting import NEVER_S, WAIT_S
from .otlp_collector import Collector

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_continues_a_trace_and_passes_it_on(collector: Collector) -> None:
    tracer = open_tracer(TelemetrySection(endpoint=collector.endpoint), "cortex")
    span = tracer.begin("POST /v1/messages", PARENT)
    call = span.call("beast")
    span.phase("prefill", 0.5, 2.0)
    call.end({"http.response.status_code": 503}, error="overloaded")
    span.call("attic").end({}, error="no connection to http://attic: refused")
    span.end({"cortex.node": "beast"})
    tracer.close()
    by_name = {found.name: found for found in collector.spans}
    assert {found.trace_id for found in collector.spans} == {"0af7651916cd43dd8448eb211c80319c"}
    server = by_name["POST /v1/messages"]
    assert server.parent_id == "b7ad6b7169203331"
    assert server.attributes == {"cortex.node": "beast"}
    assert server.service == "cortex"
    assert call.traceparent == f"00-{server.trace_id}-{by_name['beast'].span_id}-01".encode()
    assert by_name["beast"].parent_id == by_name["prefill"].parent_id == server.span_id
    assert (by_name["beast"].error, server.error) == ("overloaded", None)
    assert by_name["beast"].attributes["error.type"] == "overloaded"
    assert by_name["attic"].attributes["error.type"] == "_OTHER", "there are few values"
    assert by_name["prefill"].duration_s == pytest.approx(1.5)


@pytest.mark.parametrize("traceparent", [None, b"nonsense", b"\xff\xff", b"00-0-0-01"])
def test_begins_a_trace_without_traceparent(collector: Collector, traceparent: bytes | None) -> None:
    tracer = open_tracer(TelemetrySection(endpoint=collector.endpoint + "/v1/traces"), "cortex")
    tracer.begin("a", traceparent).end({})
    tracer.close()
    (span,) = collector.spans
    assert span.parent_id == ""


def test_sampling_follows_the_client_else_the_ratio(collector: Collector) -> None:
    tracer = open_tracer(TelemetrySection(endpoint=collector.endpoint, sample_ratio=0.0), "cortex")
    unsampled = tracer.begin("not recorded", None)
    assert unsampled.traceparent is not None
    assert int(unsampled.traceparent[-2:], 16) & 1 == 0, "nodes must not record it either"
    unsampled.end({})
    tracer.begin("recorded", PARENT).end({})
    tracer.close()
    assert [span.name for span in collector.spans] == ["recorded"]


def test_passes_traceparent_on_without_an_endpoint() -> None:
    tracer = open_tracer(TelemetrySection(), "cortex")
    assert isinstance(tracer, NoTracer)
    assert tracer.begin("a", None) is UNTRACED
    span = tracer.begin("a", PARENT)
    assert span.call("b").traceparent == PARENT
    span.phase("c", 0.0, 1.0)
    span.end({})
    tracer.close()


def test_missing_package_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cortex.telemetry.otlp", None)
    with pytest.raises(SettingsError, match=r"pip install '\.\[telemetry\]'"):
        open_tracer(TelemetrySection(endpoint="http://127.0.0.1:1"), "cortex")


def test_rejects_an_endpoint_that_is_not_a_url() -> None:
    with pytest.raises(ValueError, match="http://collector:4318"):
        TelemetrySection(endpoint="collector:4318")


def test_hanging_collector_does_not_delay_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(NEVER_S))  # the exporter's own
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = OtlpTracer(f"http://127.0.0.1:{silent.getsockname()[1]}", 1.0, "cortex", export_timeout_s=0.2)
        tracer.begin("a", None).end({})
        began = time.monotonic()
        tracer.close()
        assert time.monotonic() - began < WAIT_S
