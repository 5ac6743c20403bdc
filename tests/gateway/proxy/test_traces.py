"""The spans of a request, as a collector receives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from cortex.telemetry.tracing import TelemetrySection
from cortex.wire.node.protocol import ModelState

from ..fake_neuron import GB, plain_response

if TYPE_CHECKING:
    from ...telemetry.otlp_collector import Collector
    from ..fake_neuron import FakeNeuron, StartNeuron
    from ..started_gateway import StartGateway


TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
READY = ModelState.READY


async def test_one_trace_spans_client_attempts_and_node(
    neurons: StartNeuron, start_gateway: StartGateway, collector: Collector
) -> None:
    async def full(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full", "code": "overloaded", "type": "x"}}, status=503)

    first = await neurons("a-full", sizes={"a": GB}, states={"a": READY}, respond=full)
    second = await neurons("b-free", sizes={"a": GB}, states={"a": READY}, respond=plain_response)
    client = await start_gateway(first, second, telemetry=TelemetrySection(endpoint=collector.endpoint))
    body = msgspec.json.encode({"model": "a", "messages": []})
    headers = {"traceparent": PARENT, "x-request-id": "mine"}
    async with client.session.post(client.url + "/v1/chat/completions", data=body, headers=headers) as response:
        assert response.status == 200
    await client.gateway.close()
    spans = {span.name: span for span in collector.spans}
    assert {span.trace_id for span in collector.spans} == {TRACE}
    server = spans["POST /v1/chat/completions"]
    assert (server.parent_id, server.error) == ("b7ad6b7169203331", None)
    assert server.attributes == {
        "cortex.request_id": "mine",
        "cortex.principal": "anonymous",
        "cortex.node": "b-free",
        "cortex.outcome": "complete",
        "cortex.attempts": 2,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "cortex",
        "gen_ai.request.model": "a",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "http.response.status_code": 200,
    }
    assert spans["a-full"].error == "status 503"
    for node in (first, second):
        assert spans[node.name].parent_id == server.span_id
        assert node.seen[0].headers["traceparent"] == f"00-{TRACE}-{spans[node.name].span_id}-01"


async def test_rejection_ends_the_span_with_its_error(start_gateway: StartGateway, collector: Collector) -> None:
    client = await start_gateway(telemetry=TelemetrySection(endpoint=collector.endpoint))
    assert (await client.chat("nobody"))[0] == 404
    assert (await client.post("/v1/messages", b"{"))[0] == 400
    await client.gateway.close()
    assert [(span.name, span.error) for span in collector.spans] == [
        ("POST /v1/chat/completions", "model_not_found"),
        ("POST /v1/messages", "malformed_json"),
    ]
