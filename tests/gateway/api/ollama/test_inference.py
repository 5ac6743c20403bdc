"""Ollama's chat and generate through a gateway: relayed from nodes that speak them, translated from others."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from cortex.gateway.ledger.keys import generate
from cortex.settings import Listen
from cortex.wire.events import Usage
from cortex.wire.node import failure_report, usage_report
from cortex.wire.node.protocol import ModelState

from ....waiting import until
from ...fake_neuron import GB, FakeNeuron
from ...started_gateway import Client

if TYPE_CHECKING:
    from ...fake_neuron import StartNeuron
    from ...started_gateway import StartGateway

READY = ModelState.READY
NATIVE = ("openai_chat", "ollama_chat", "ollama_generate")
REPORT = usage_report.comment(Usage(prompt_tokens=7, completion_tokens=3)).rstrip()


def chat(model: str = "m", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}


async def lines(client: Client, body: dict[str, Any], path: str = "/api/chat") -> list[dict[str, Any]]:
    data = await client.stream(path, body)
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


async def stream_lines(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As a neuron responds to a gateway."""
    response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
    await response.prepare(request)
    for text in ("from ", node.name):
        line = {"model": body["model"], "message": {"role": "assistant", "content": text}, "done": False}
        await response.write(b" " + msgspec.json.encode(line) + b"\n")
        await node.stream_gate.wait()
    await response.write(b'{"done":true,"done_reason":"stop"}\n' + REPORT)
    return response


async def fail_after_a_line(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
    await response.prepare(request)
    await response.write(b'{"done":false}\n')
    failure = b'{"error":"no","code":"recovering"}\n' + failure_report.comment("recovering")
    await response.write(failure + REPORT)
    return response


async def test_lines_of_a_node_are_relayed_and_its_report_is_not(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    node = await neurons("beast", sizes={"m": GB}, states={"m": READY}, dialects=NATIVE, respond=stream_lines)
    client = await start_gateway(node)
    received = await lines(client, chat("m:latest"))
    assert "".join(line.get("message", {}).get("content", "") for line in received) == "from beast"
    assert received[-1] == {"done": True, "done_reason": "stop"}
    (seen,) = node.seen
    assert (seen.path, seen.body["model"]) == ("/api/chat", "m")
    assert int(seen.headers["x-cortex-waited-ms"]) >= 0
    _, activity = await client.get("/fleet/activity")
    assert (activity["requests"][0]["prompt_tokens"], activity["requests"][0]["completion_tokens"]) == (7, 3)


async def test_silence_is_filled_with_space_before_the_next_line(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    gate = asyncio.Event()
    node = await neurons(
        "beast", sizes={"m": GB}, states={"m": READY}, dialects=NATIVE, respond=stream_lines, stream_gate=gate
    )
    client = await start_gateway(node, keepalive_s=0.05)
    async with client.session.post(client.url + "/api/chat", json=chat()) as response:
        assert response.headers["content-type"].startswith("application/x-ndjson")
        first = await response.content.readline()
        assert json.loads(first)["message"]["content"] == "from "
        assert await response.content.readexactly(2) == b"  "
        gate.set()
        rest = (await response.content.read()).splitlines()
    assert [json.loads(line)["done"] for line in rest] == [False, True]


async def test_failure_inside_a_stream_is_a_line_and_is_recorded(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    node = await neurons("beast", sizes={"m": GB}, states={"m": READY}, dialects=NATIVE, respond=fail_after_a_line)
    client = await start_gateway(node)
    received = await lines(client, chat())
    assert received[-1]["error"] == "no"
    _, activity = await client.get("/fleet/activity")
    assert activity["requests"][0]["error"] == "recovering"


async def test_other_nodes_are_translated_with_the_durations_measured_here(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    foreign = await neurons("vllm", sizes={"m": GB})
    client = await start_gateway(foreign=(foreign,))
    received = await lines(client, chat(options={"num_predict": 5, "temperature": 0.2}))
    assert "".join(line["message"]["content"] for line in received) == "from vllm"
    last = received[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("stop", 7, 3)
    assert last["total_duration"] > 0
    (seen,) = foreign.seen
    assert (seen.path, seen.body["max_tokens"], seen.body["temperature"]) == ("/v1/chat/completions", 5, 0.2)
    status, whole = await client.post("/api/generate", {"model": "m", "prompt": "hi", "stream": False})
    assert (status, whole["response"], whole["done"]) == (200, "from vllm", True)
    status, error = await client.post("/api/generate", {"model": "m", "prompt": "hi", "raw": True})
    assert (status, "raw prompt" in error["error"].lower()) == (400, True)


async def test_request_without_a_prompt_loads_the_model(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    foreign = await neurons("vllm", sizes={"there": GB})
    client = await start_gateway(foreign=(foreign,))
    status, reply = await client.post("/api/chat", {"model": "there"})
    assert (status, reply["done_reason"]) == (200, "load")
    assert not foreign.seen, "a foreign server has it loaded"


async def test_unloads_instead_of_a_response_or_after_it(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    node = await neurons("beast", sizes={"m": GB}, states={"m": READY})
    client = await start_gateway(node)
    status, reply = await client.post("/api/generate", {"model": "m", "keep_alive": 0})
    assert (status, reply["done_reason"]) == (200, "unload")
    await until(lambda: [each.model_id for each in node.unload_requests] == ["m"])
    assert not node.seen
    await until(lambda: node.states.get("m") is not READY)
    await lines(client, chat(keep_alive=-1))
    await lines(client, chat(keep_alive="10m"))
    assert len(node.unload_requests) == 1
    await lines(client, chat(keep_alive=0))
    await until(lambda: len(node.unload_requests) == 2)
    assert client.gateway.dispatcher.pins == frozenset()


async def test_model_that_is_used_stays(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    gate = asyncio.Event()
    node = await neurons(
        "beast", sizes={"m": GB}, states={"m": READY}, dialects=NATIVE, respond=stream_lines, stream_gate=gate
    )
    client = await start_gateway(node)
    async with client.session.post(client.url + "/api/chat", json=chat()) as response:
        await response.content.readline()
        assert (await client.post("/api/generate", {"model": "m", "keep_alive": 0}))[0] == 200
        gate.set()
        assert json.loads((await response.content.read()).splitlines()[-1])["done"]
    assert not node.unload_requests
    assert (await client.post("/api/generate", {"model": "other", "keep_alive": 0}))[0] == 404
    await until(lambda: not client.gateway.dispatcher.in_flight)
    await client.post("/api/generate", {"model": "m", "keep_alive": 0})
    await until(lambda: node.unload_requests)


async def test_other_keys_do_not_unload(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    key = generate("user")
    node = await neurons("beast", sizes={"m": GB}, states={"m": READY})
    client = await start_gateway(node, keys=(key.section,))
    bearer = {"authorization": f"Bearer {key.text}"}
    status, reply = await client.post("/api/chat", {"model": "m", "keep_alive": 0}, **bearer)
    assert (status, reply["code"]) == (403, "operator_only")
    assert (await client.post("/api/chat", chat(stream=False, keep_alive=0), **bearer))[0] == 200
    assert not node.unload_requests


async def test_names_of_others_do_not_unload_without_a_key(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    node = await neurons("beast", sizes={"m": GB}, states={"m": READY})
    client = await start_gateway(node, listen=Listen("0.0.0.0:0"), open=True)
    rebound = {"host": "evil.example"}
    status, reply = await client.post("/api/chat", {"model": "m", "keep_alive": 0}, **rebound)
    assert (status, reply["code"]) == (403, "cross_site_request")
    assert (await client.post("/api/chat", chat(stream=False, keep_alive=0), **rebound))[0] == 200
    assert not node.unload_requests


async def test_errors_have_the_form_of_ollama(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    node = await neurons("beast", sizes={"m": GB}, states={"m": READY})
    client = await start_gateway(node)
    status, reply = await client.post("/api/chat", chat("other"))
    assert (status, reply["code"]) == (404, "model_not_found")
    assert isinstance(reply["error"], str)
    assert (await client.post("/api/chat", b"{"))[0] == 400
    curl = {"content-type": "application/x-www-form-urlencoded"}
    assert (await client.post("/api/chat", chat(stream=False), **curl))[0] == 200
    assert (await client.post("/api/chat", chat(stream=False), origin="http://evil.example", **curl))[0] == 415


async def test_embeddings_of_a_text_that_is_too_long_keep_the_code_of_the_error(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def reject(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}
        return web.json_response({"error": error}, status=400)

    client = await start_gateway(foreign=(await neurons("tei", sizes={"e": GB}, respond=reject),))
    status, reply = await client.post("/api/embeddings", {"model": "e", "prompt": "a"})
    assert (status, reply) == (400, {"error": "too long", "code": "context_length_exceeded"})


async def test_embeddings_come_from_the_route_of_openai(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def embed(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        data = [{"index": index, "embedding": [index, 0.5]} for index in range(len(body["input"]))]
        return web.json_response({"data": data[::-1], "model": body["model"], "usage": {"prompt_tokens": 4}})

    foreign = await neurons("tei", sizes={"e": GB}, respond=embed)
    client = await start_gateway(foreign=(foreign,))
    status, reply = await client.post("/api/embed", {"model": "e:latest", "input": ["a", "b"], "dimensions": 2})
    assert (status, reply["embeddings"], reply["prompt_eval_count"]) == (200, [[0, 0.5], [1, 0.5]], 4)
    assert reply["total_duration"] > 0
    assert foreign.seen[0].path == "/v1/embeddings"
    sent = {"encoding_format": "float", "dimensions": 2, "truncate_prompt_tokens": -1}
    assert foreign.seen[0].body == {"model": "e", "input": ["a", "b"], **sent}
    assert (await client.post("/api/embeddings", {"model": "e", "prompt": "a"}))[1] == {"embedding": [0, 0.5]}
    status, reply = await client.post("/api/embed", {"model": "e"})
    assert (status, reply["embeddings"]) == (200, [])
