"""What the gateway counts of a response: its usage, and whether it was complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.fleet.catalogue import Catalogue
from cortex.gateway.ledger.keys import generate
from cortex.wire.node import usage_report
from cortex.wire.node.protocol import ModelState

from ....waiting import until
from ...fake_neuron import GB
from ...fake_responses import REPORTED, USAGE, begin_stream, chunk, usage_chunk

if TYPE_CHECKING:
    from ...fake_neuron import FakeNeuron, StartNeuron
    from ...started_gateway import Client, StartGateway


READY = ModelState.READY
ERROR_EVENTS = {
    "/v1/chat/completions": b'data: {"error":{"message":"m","type":"server_error","code":"generation_failed"}}\n\n',
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"m"}}\n\n',
    "/v1/responses": b'event: response.failed\ndata: {"type":"response.failed","response":{}}\n\n',
    "/v1/completions": b'data: {"text":"' + b"x" * 5000 + b'"}\n\n: failed generation_failed\n\n',
}


async def test_counts_usage_of_streams_and_whole_responses(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    await client.chat("a")
    options = {"include_usage": True}
    body = {"model": "a", "messages": [], "stream": True, "stream_options": options}
    await client.stream("/v1/chat/completions", body)
    text = client.metrics()
    assert 'cortex_prompt_tokens_total{key="anonymous",model="a"} 14.0' in text
    assert 'cortex_cached_prompt_tokens_total{key="anonymous",model="a"} 8.0' in text
    assert 'cortex_completion_tokens_total{key="anonymous",model="a"} 6.0' in text
    assert 'cortex_requests_total{model="a",node="beast"} 2.0' in text
    only_the_stream = 'cortex_time_to_first_token_seconds_count{model="a",node="beast"} 1.0'
    assert only_the_stream in text


async def test_model_that_does_not_exist_has_no_usage(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    key = generate("anna")
    client = await start_gateway(beast, catalogue=Catalogue(aliases={"default": "codr"}), keys=(key.section,))
    bearer = {"authorization": f"Bearer {key.text}"}
    for model, expected in (("default", 404), ("b", 404), ("a", 200)):
        body: dict[str, Any] = {"model": model, "messages": []}
        assert (await client.post("/v1/chat/completions", body, **bearer))[0] == expected
    _, usage = await client.get("/fleet/usage?by=model", **bearer)
    assert [row["name"] for row in usage["rows"]] == ["a"]


def counted_tokens(client: Client) -> dict[str, float]:
    return {
        name: float(line.rpartition(" ")[2])
        for line in client.metrics().splitlines()
        for name in ("prompt", "cached_prompt", "completion")
        if line.startswith(f"cortex_{name}_tokens_total{{")
    }


REPORTED_TOKENS = {"prompt": 7.0, "cached_prompt": 4.0, "completion": 3.0}


@pytest.mark.parametrize("path", ERROR_EVENTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_meters_what_the_node_reports_in_every_dialect(
    neurons: StartNeuron, start_gateway: StartGateway, path: str, stream: bool
) -> None:
    async def reporting(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not stream:
            headers = {usage_report.HEADER: usage_report.header_value(REPORTED)}
            return web.Response(
                body=b'{"usage":{"prompt_tokens":99}}', content_type="application/json", headers=headers
            )
        response = await begin_stream(request)
        await response.write(b"data: first\n\n")
        long_last_event = b"data: " + b"x" * 5000 + b"\n\n"
        await response.write(long_last_event + usage_report.comment(REPORTED))
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=reporting)
    client = await start_gateway(beast)
    async with client.session.post(client.url + path, json={"model": "a", "stream": stream}) as response:
        received = await response.read()
    assert counted_tokens(client) == REPORTED_TOKENS
    assert b": usage" not in received, "the report is for the gateway"


async def test_what_a_node_computed_before_it_rejected_a_request_is_charged(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def rejecting(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        headers = {usage_report.HEADER: usage_report.header_value(REPORTED)}
        return web.json_response({"error": {"message": "a damaged picture"}}, status=400, headers=headers)

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=rejecting)
    client = await start_gateway(beast)
    async with client.session.post(f"{client.url}/v1/chat/completions", json={"model": "a"}) as response:
        assert response.status == 400
    assert counted_tokens(client) == REPORTED_TOKENS


@pytest.mark.parametrize("stream", [False, True])
async def test_meters_a_foreign_server_by_the_usage_of_its_dialect(
    neurons: StartNeuron, start_gateway: StartGateway, stream: bool
) -> None:
    async def unaware(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not stream:
            return web.json_response({"choices": [], "usage": USAGE})
        response = await begin_stream(request)
        for event in (chunk("a", {"content": "x"}), usage_chunk("a"), b"data: [DONE]\n\n"):
            await response.write(event)
        return response

    foreign = await neurons("foreign", sizes={"a": GB}, respond=unaware)
    client = await start_gateway(foreign=(foreign,))
    body = {"model": "a", "messages": [], "stream": stream}
    async with client.session.post(client.url + "/v1/chat/completions", json=body) as response:
        await response.read()
    assert counted_tokens(client) == REPORTED_TOKENS


@pytest.mark.parametrize("reports", [True, False])
async def test_embeddings_are_charged(neurons: StartNeuron, start_gateway: StartGateway, reports: bool) -> None:
    async def embedding(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        usage = {"usage": {"prompt_tokens": 5000, "total_tokens": 5000}} if reports else {}
        return web.json_response({"object": "list", "data": [{"embedding": [0.5] * 1000}], "model": "a", **usage})

    key = generate("alice", window_tokens=30_000)
    foreign = await neurons("foreign", sizes={"a": GB}, respond=embedding)
    client = await start_gateway(foreign=(foreign,), keys=(key.section,))
    body = {"model": "a", "input": "word " * 4000}
    for _ in range(2):
        assert (await client.post("/v1/embeddings", body, Authorization=f"Bearer {key.text}"))[0] == 200
    num_bytes = len(msgspec.json.encode(body))
    used = 5000 if reports else num_bytes // 4
    assert counted_tokens(client) == {"prompt": 2 * used, "cached_prompt": 0, "completion": 0}
    status, rejected = await client.post("/v1/embeddings", body, Authorization=f"Bearer {key.text}")
    assert status == 429
    assert f"has {30_000 - 2 * used} of 30000 tokens left" in rejected["error"]["message"]
    assert f"the prompt counts as {num_bytes} tokens" in rejected["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens"])
async def test_counting_tokens_is_free(neurons: StartNeuron, start_gateway: StartGateway, path: str) -> None:
    key = generate("alice", balance_tokens=5)
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, keys=(key.section,))
    body = {"model": "a", "messages": [{"role": "user", "content": "word " * 100}]}
    for _ in range(3):
        assert (await client.post(path, body, Authorization=f"Bearer {key.text}"))[0] == 200
    assert counted_tokens(client) == {}


async def test_estimates_usage_of_a_response_without_a_report(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def unreporting(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk(body["model"], {"content": "x" * 600}) + b"data: [DONE]\n\n")
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=unreporting)
    client = await start_gateway(beast)
    await client.stream("/v1/chat/completions", {"model": "a", "messages": ["x" * 400], "stream": True})
    counted = counted_tokens(client)
    assert counted["prompt"] >= 100
    assert counted["completion"] >= 2


@pytest.mark.parametrize("path", ERROR_EVENTS)
async def test_stream_that_ends_with_an_error_event_counts_as_failed(
    neurons: StartNeuron, start_gateway: StartGateway, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    async def fail(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk("a", {"content": "x"}))
        await response.write(ERROR_EVENTS[path] + usage_report.comment(REPORTED))
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=fail)
    client = await start_gateway(beast, access_log=True)
    with caplog.at_level("INFO", logger="cortex.access"):
        await client.stream(path, {"model": "a", "stream": True, "max_tokens": 5})
        await until(lambda: caplog.records)
    assert vars(caplog.records[-1])["outcome"] == "failed"
    code = "generation_failed" if b"generation_failed" in ERROR_EVENTS[path] else "upstream_interrupted"
    assert f'cortex_request_errors_total{{code="{code}",model="a",node="beast"}} 1.0' in client.metrics()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"message": "too long", "type": "x", "code": "context_length_exceeded"}, "context_length_exceeded"),
        ({"message": "long " * 2000, "type": "x", "code": "context_length_exceeded"}, "context_length_exceeded"),
        ({"message": "odd", "type": "x", "code": "of_a_foreign_server"}, "status_400"),
        ({"message": "none", "type": "x"}, "status_400"),
        ("text", "status_400"),
    ],
)
async def test_error_response_of_a_node_counts_with_its_code(
    neurons: StartNeuron, start_gateway: StartGateway, error: Any, code: str
) -> None:
    async def reject(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": error}, status=400)

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=reject)
    client = await start_gateway(beast)
    assert (await client.chat("a"))[0] == 400
    assert f'cortex_request_errors_total{{code="{code}",model="a",node="beast"}} 1.0' in client.metrics()
    _, activity = await client.get("/fleet/activity")
    assert activity["requests"][0]["error"] == code


async def test_complete_stream_that_mentions_errors_counts_as_complete(
    neurons: StartNeuron, start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async def succeed(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk("a", {"content": '\n: failed x\n\ndata: {"error": {}}\n\n'}, "stop"))
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=succeed)
    client = await start_gateway(beast, access_log=True)
    with caplog.at_level("INFO", logger="cortex.access"):
        await client.stream("/v1/chat/completions", {"model": "a", "stream": True})
        await until(lambda: caplog.records)
    assert vars(caplog.records[-1])["outcome"] == "complete"
