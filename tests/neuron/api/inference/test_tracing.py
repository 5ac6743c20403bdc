"""The node's spans of a trace."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import ClientSession

from cortex.telemetry.spans import Tracer
from cortex.telemetry.tracing import TelemetrySection, open_tracer
from cortex.wire.errors import Recovering

from ..served import served

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def tracer(collector: Any) -> Tracer:
    return open_tracer(TelemetrySection(endpoint=collector.endpoint), "neuron")


@pytest.fixture
async def traced(node: Any, tracer: Tracer) -> AsyncIterator[ClientSession]:
    headers = {"content-type": "application/json"}
    async with (
        served(node, tracer=tracer) as (host, port),
        ClientSession(f"http://{host}:{port}", headers=headers) as client,
    ):
        yield client


@pytest.mark.parametrize("stream", [True, False])
async def test_continues_the_trace_and_records_the_phases(
    traced: ClientSession, tracer: Tracer, collector: Any, node: Any, chat_body: Any, stream: bool
) -> None:
    node.script.first_s, node.script.pause_s = 0.1, 0.02
    headers = {"traceparent": PARENT, "x-request-id": "mine"}
    async with traced.post("/v1/chat/completions", json=chat_body(stream=stream), headers=headers) as response:
        await response.read()
    tracer.close()
    spans = {span.name: span for span in collector.spans}
    assert {span.trace_id for span in collector.spans} == {TRACE}
    server = spans["POST /v1/chat/completions"]
    assert (server.service, server.parent_id, server.error) == ("neuron", "b7ad6b7169203331", None)
    assert server.attributes["cortex.request_id"] == "mine"
    assert server.attributes["gen_ai.request.model"] == "org/tiny"
    assert server.attributes["gen_ai.operation.name"] == "chat"
    assert server.attributes["gen_ai.provider.name"] == "cortex"
    assert server.attributes["gen_ai.usage.output_tokens"] > 10
    assert {span.parent_id for name, span in spans.items() if span is not server} == {server.span_id}
    assert spans["prefill"].duration_s >= 0.09
    assert spans["decode"].duration_s >= 0.1
    assert spans["prepare"].duration_s >= 0


async def test_records_errors_in_the_trace(
    traced: ClientSession, tracer: Tracer, collector: Any, node: Any, chat_body: Any
) -> None:
    async with traced.post("/v1/chat/completions", data=b"{") as response:
        assert response.status == 400
    node.script.fails_after, node.script.error = 3, Recovering("the device failed")
    async with traced.post("/v1/chat/completions", json=chat_body(stream=True)) as response:
        await response.read()
    tracer.close()
    assert [span.error for span in collector.spans] == ["malformed_json", "recovering"]
