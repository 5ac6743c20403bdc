"""What the gateway relays to a node and back: bodies, headers, pauses and ends, through real sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from cortex.wire.node.protocol import ModelState

from ...waiting import until
from ..fake_neuron import GB
from ..fake_responses import begin_stream, chunk, hang, usage_chunk

if TYPE_CHECKING:
    from ..fake_neuron import FakeNeuron, StartNeuron
    from ..started_gateway import StartGateway


READY = ModelState.READY
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


async def test_relays_the_body_unchanged_to_a_ready_model(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    raw = b'{"model": "a",  "messages": [{"role":"user","content":"hi"}], "odd":  [1.50]}'
    status, response = await client.post("/v1/chat/completions", raw)
    assert (status, response["choices"][0]["message"]["content"]) == (200, "from beast")
    assert beast.seen[0].raw == raw


@pytest.mark.parametrize("path", PATHS)
async def test_replaces_lone_surrogates_and_nothing_else(
    neurons: StartNeuron, start_gateway: StartGateway, path: str
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    raw = rb'{"model": "a",  "max_tokens": 5, "odd":  [1.50, "%s \ud83d\ude00"]}'
    status, _ = await client.post(path, raw % rb"\ud83d")
    assert status == 200
    assert beast.seen[0].raw == raw % rb"\ufffd"


async def test_request_id_reaches_the_node_and_the_client(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    body = msgspec.json.encode({"model": "a", "messages": []})
    async with client.session.post(client.url + "/v1/chat/completions", data=body) as response:
        made = response.headers["x-request-id"]
    async with client.session.post(
        client.url + "/v1/chat/completions", data=body, headers={"x-request-id": "mine-1"}
    ) as response:
        assert response.headers["x-request-id"] == "mine-1"
    assert [seen.headers["x-request-id"] for seen in beast.seen] == [made, "mine-1"]
    assert beast.seen[0].headers["x-cortex-principal"] == "anonymous"


async def test_client_credentials_do_not_reach_nodes(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    await client.post("/v1/chat/completions", {"model": "a"}, Authorization="Bearer secret")
    assert "authorization" not in beast.seen[0].headers


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queue", "load", "prefill", "decode"])
async def test_disconnected_client_frees_its_place_within_a_second(
    neurons: StartNeuron, start_gateway: StartGateway, phase: str, stream: bool
) -> None:
    is_served = asyncio.Event()

    async def prefill(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_served.set()
        await hang()

    async def decode(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        while True:
            await response.write(chunk(body["model"], {"content": "x"}))
            is_served.set()
            await asyncio.sleep(0.01)

    sizes = {"a": 20 * GB, "b": 20 * GB}
    beast = await neurons("beast", sizes=sizes, respond=decode if phase == "decode" else prefill)
    blocker = None
    if phase == "load":
        beast.load_gate = asyncio.Event()
    elif phase != "queue":
        beast.states["a"] = READY
    client = await start_gateway(beast)
    if phase == "queue":
        beast.states["b"] = READY
        await until(lambda: client.gateway.dispatcher.is_ready("b", "beast"))
        blocker = asyncio.create_task(client.chat("b"))
        await until(lambda: beast.seen)
    dispatcher = client.gateway.dispatcher
    request = asyncio.create_task(client.chat("a", stream=stream))
    if phase in ("queue", "load"):
        await until(lambda: dispatcher.queue_depths.get("a") == 1)
    else:
        await until(is_served.is_set)
    request.cancel()
    if phase in ("queue", "load"):
        await until(lambda: "a" not in dispatcher.queue_depths)
    else:
        await until(lambda: beast.seen[-1].left_at is not None)
        assert dispatcher.in_flight == {}
    assert "cortex_client_disconnects_total{phase=" in client.metrics()
    if blocker is not None:
        blocker.cancel()


async def test_removes_the_billing_header_unless_configured_otherwise(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}]
    body = {"model": "a", "system": system, "messages": [], "max_tokens": 5}
    client = await start_gateway(beast)
    await client.post("/v1/messages", body)
    keeping = await start_gateway(beast, strip_billing_header=False)
    await keeping.post("/v1/messages", body)
    assert [seen.body["system"] for seen in beast.seen] == [system[1:], system]
    assert "cortex_billing_headers_stripped_total 1.0" in client.metrics()


async def test_stream_has_one_header_against_proxy_buffering(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def stream(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        await response.write(b"data: [DONE]\n\n")
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=stream)
    client = await start_gateway(beast)
    body = {"model": "a", "messages": [], "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{client.url}/v1/chat/completions", json=body) as got:
        assert got.headers.getall("x-accel-buffering") == ["no"]


async def test_embeddings_need_a_node_that_makes_them(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def embed(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"embedding": [0.5]}], "model": body["model"]})

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    other = await neurons("other", sizes={"embedder": GB}, respond=embed)
    client = await start_gateway(beast, foreign=(other,))
    status, body = await client.post("/v1/embeddings", {"model": "a", "input": "x"})
    assert (status, body["error"]["code"]) == (400, "unsupported_modality")
    status, body = await client.post("/v1/embeddings", {"model": "embedder", "input": "x"})
    assert (status, body["data"][0]["embedding"]) == (200, [0.5])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b"{}", b'{"model":7}', b"[" * 50_000, b"\xff"])
async def test_bad_bodies_are_400_in_the_dialect_of_the_route(
    neurons: StartNeuron, start_gateway: StartGateway, path: str, body: bytes
) -> None:
    client = await start_gateway()
    status, response = await client.post(path, body)
    assert status == 400
    assert response["error"]["type"] == "invalid_request_error"
    assert ("type" in response) == (path == "/v1/messages")


async def test_body_over_the_limit_is_413(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(max_body_mb=1)
    status, response = await client.post("/v1/messages", b"x" * (2 << 20))
    assert (status, response["error"]["type"]) == (413, "request_too_large")


async def test_relays_each_chunk_before_the_next_one_is_sent(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    arrived = asyncio.Semaphore(0)

    async def lockstep(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        for number in range(4):
            await response.write(chunk(body["model"], {"content": f"chunk {number}"}))
            await arrived.acquire()
        await response.write(usage_chunk("a") + b"data: [DONE]\n\n")
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=lockstep)
    client = await start_gateway(beast)
    body = msgspec.json.encode({"model": "a", "messages": [], "stream": True})
    received = b""
    async with client.session.post(client.url + "/v1/chat/completions", data=body) as response:
        for number in range(4):
            while f"chunk {number}".encode() not in received:
                received += await response.content.readany()
            arrived.release()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_passes_on_the_trace_context(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await client.post("/v1/chat/completions", {"model": "a", "messages": []}, traceparent=trace)
    assert beast.seen[0].headers["traceparent"] == trace


@pytest.mark.parametrize("stream", [False, True])
async def test_response_names_its_node_unless_configured_otherwise(
    neurons: StartNeuron, start_gateway: StartGateway, stream: bool
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    body = msgspec.json.encode({"model": "a", "messages": [], "stream": stream})
    for shown in (True, False):
        client = await start_gateway(beast, node_header=shown)
        async with client.session.post(client.url + "/v1/chat/completions", data=body) as response:
            assert response.status == 200
            assert response.headers.get("x-cortex-node") == ("beast" if shown else None)


@pytest.mark.parametrize("model", ["a", "none"])
async def test_messages_have_the_request_id_that_anthropic_clients_read(
    neurons: StartNeuron, start_gateway: StartGateway, model: str
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    body = msgspec.json.encode({"model": model, "messages": [], "max_tokens": 5})
    for path, expected in (("/v1/messages", "mine-1"), ("/v1/chat/completions", None)):
        async with client.session.post(client.url + path, data=body, headers={"x-request-id": "mine-1"}) as response:
            assert response.headers.get("request-id") == expected


@pytest.mark.parametrize("path", PATHS)
async def test_rejects_a_body_that_is_declared_as_something_else_than_json(
    neurons: StartNeuron, start_gateway: StartGateway, path: str
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    body = b'{"model": "a", "max_tokens": 5}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        status, response = await client.post(path, body, **{"content-type": kind})
        assert (status, response["error"]["type"]) == (415, "invalid_request_error")
    for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"):
        assert (await client.post(path, body, **{"content-type": kind}))[0] == 200
    assert len(beast.seen) == 3


@pytest.mark.parametrize("path", ["/v1/skills", "/v1/agents", "/v1/skills/x?beta=true"])
async def test_unknown_paths_respond_in_the_dialect_of_the_caller(start_gateway: StartGateway, path: str) -> None:
    client = await start_gateway()
    status, body = await client.get(path, **{"anthropic-version": "2023-06-01"})
    assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    status, body = await client.get(path)
    assert status == 404
    assert "type" not in body
    assert body["error"]["code"]
