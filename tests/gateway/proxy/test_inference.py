"""Requests through a real gateway to fake nodes on real sockets."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from cortex.fleet.rules import EvictionRules
from cortex.wire import usage_report
from cortex.wire.node import ModelState

from ..fake_neuron import (
    GB,
    REPORTED,
    USAGE,
    begin_stream,
    chunk,
    hang,
    plain_answer,
    reset_connection,
    until,
    usage_chunk,
)

if TYPE_CHECKING:
    from ..fake_neuron import Client, FakeNeuron, StartGateway, StartNeuron


READY = ModelState.READY


async def test_relays_the_body_unchanged_to_a_ready_model(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    raw = b'{"model": "a",  "messages": [{"role":"user","content":"hi"}], "odd":  [1.50]}'
    status, answer = await client.post("/v1/chat/completions", raw)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "from beast")
    assert beast.seen[0].raw == raw


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
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


async def test_loads_a_cold_model_once_for_many_requests(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast)
    requests = [asyncio.create_task(client.chat("a")) for _ in range(5)]
    await until(lambda: client.gateway.dispatcher.queue_depths.get("a") == 5)
    beast.load_gate.set()
    answers = await asyncio.gather(*requests)
    assert [status for status, _ in answers] == [200] * 5
    assert len(beast.load_requests) == 1
    assert 'cortex_cold_starts_total{model="a",node="beast"} 1.0' in client.metrics()


async def test_waiting_stream_gets_keepalives_on_the_wall_clock(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast)
    body = {"model": "a", "messages": [], "stream": True, "max_tokens": 5}
    for path, keepalive in (("/v1/chat/completions", b": "), ("/v1/messages", b"event: ping")):
        async with client.session.post(client.url + path, data=msgspec.json.encode(body)) as response:
            assert response.headers["x-accel-buffering"] == "no"
            assert (await response.content.readuntil(b"\n\n")).startswith(keepalive)
            assert (await response.content.readuntil(b"\n\n")).startswith(keepalive)
    beast.load_gate.set()


async def test_unknown_model_is_404_with_near_misses_in_the_dialect_of_the_route(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"qwen3-8b": GB})
    client = await start_gateway(beast)
    status, body = await client.chat("qwen3-8bb")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "qwen3-8b" in body["error"]["message"]
    status, body = await client.post("/v1/messages", {"model": "qwen3-8bb", "messages": []})
    assert (status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")


async def test_model_that_fits_nowhere_is_507_with_need_and_have(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"huge": 80 * GB})
    client = await start_gateway(beast)
    status, body = await client.chat("huge")
    assert (status, body["error"]["code"]) == (507, "insufficient_capacity")
    device = body["error"]["nodes"][0]["devices"][0]
    assert device["need_bytes"] > device["total_bytes"] == 24 * GB


async def test_too_many_waiting_is_503_with_retry_after(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast, max_waiting=2)
    waiting = [asyncio.create_task(client.chat("a")) for _ in range(2)]
    await until(lambda: client.gateway.dispatcher.queue_depths.get("a") == 2)
    async with client.session.post(client.url + "/v1/messages", data=b'{"model":"a","messages":[]}') as response:
        assert response.status == 529
        assert int(response.headers["retry-after"]) >= 1
        assert (await response.json())["error"]["type"] == "overloaded_error"
    status, body = await client.chat("a")
    assert (status, body["error"]["code"]) == (503, "overloaded")
    beast.load_gate.set()
    await asyncio.gather(*waiting)


async def test_tries_the_next_node_after_a_load_failure(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    first = await neurons("first", sizes={"a": GB}, load_faults=[(502, "load_failed", "corrupt file")])
    second = await neurons("second", sizes={"a": GB}, total_bytes=48 * GB)
    client = await start_gateway(first, second)
    status, answer = await client.chat("a")
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "from second")
    assert len(first.load_requests) == 1


async def test_load_that_fails_everywhere_is_502_with_the_nodes_message(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_faults=[(502, "load_failed", "corrupt file")] * 5)
    client = await start_gateway(beast)
    status, body = await client.chat("a")
    assert (status, body["error"]["code"]) == (502, "load_failed")
    assert "corrupt file" in body["error"]["message"]
    status, _ = await client.chat("a")
    assert status == 502
    assert len(beast.load_requests) == 1, "a load that has just failed is not tried again at once"


async def test_out_of_memory_at_load_evicts_and_retries_once(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    oom = (507, "insufficient_capacity", "CUDA out of memory")
    beast = await neurons("beast", sizes={"old": 4 * GB, "a": GB}, states={"old": READY}, load_faults=[oom])
    client = await start_gateway(beast)
    status, _ = await client.chat("a")
    assert status == 200
    assert [unload.model_id for unload in beast.unload_requests] == ["old"]
    assert len(beast.load_requests) == 2


async def test_evicts_the_least_recently_used_model_and_counts_it(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"old": 20 * GB, "a": 10 * GB}, states={"old": READY})
    client = await start_gateway(beast)
    status, _ = await client.chat("a")
    assert status == 200
    assert [unload.model_id for unload in beast.unload_requests] == ["old"]
    assert 'cortex_evictions_total{model="old",node="beast"} 1.0' in client.metrics()


async def test_does_not_evict_a_busy_model(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    proceed = asyncio.Event()

    async def slow(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await proceed.wait()
        return await plain_answer(node, request, body)

    beast = await neurons("beast", sizes={"old": 20 * GB, "a": 10 * GB}, states={"old": READY}, answer=slow)
    client = await start_gateway(beast)
    running = asyncio.create_task(client.chat("old"))
    await until(lambda: beast.seen)
    waiting = asyncio.create_task(client.chat("a"))
    await until(lambda: client.gateway.dispatcher.queue_depths.get("a") == 1)
    await asyncio.sleep(0.1)
    assert not beast.unload_requests
    proceed.set()
    assert (await running)[0] == 200
    assert (await waiting)[0] == 200
    assert [unload.model_id for unload in beast.unload_requests] == ["old"]


async def test_replaces_workers_of_an_empty_node_after_many_loads(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    client = await start_gateway(beast, rules=EvictionRules(min_residency_s=0, defrag_after_cycles=2))
    for _ in range(2):
        assert (await client.post("/fleet/models/a/load"))[0] == 200
        assert (await client.post("/fleet/models/a/unload"))[0] == 200
    await until(lambda: beast.num_recycles == 1)
    await until(lambda: client.gateway.dispatcher.fleet.nodes[0].num_loads == 0)


async def test_tries_another_node_when_one_dies_before_the_first_byte(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def die(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await reset_connection(request)

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, answer=die)
    good = await neurons("good", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(bad, good)
    for _ in range(4):
        status, answer = await client.chat("a")
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "from good")
    assert bad.seen


async def test_node_that_always_dies_before_the_first_byte_is_502(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def die(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await reset_connection(request)

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, answer=die)
    client = await start_gateway(bad)
    status, body = await client.chat("a")
    assert (status, body["error"]["code"]) == (502, "upstream_unavailable")
    assert client.gateway.dispatcher.in_flight == {}


async def test_stream_of_a_dead_node_ends_with_an_error_event(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def half(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk(body["model"], {"content": "half"}))
        await asyncio.sleep(0.05)
        await reset_connection(request)

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, answer=half)
    good = await neurons("good", sizes={"a": GB}, states={"a": ModelState.COLD})
    client = await start_gateway(bad, good)
    text = await client.stream("/v1/chat/completions", {"model": "a", "messages": [], "stream": True})
    assert b"half" in text
    assert b'"upstream_interrupted"' in text
    assert not good.seen
    await until(lambda: client.gateway.dispatcher.in_flight == {})


async def test_tries_another_node_when_one_dies_during_a_load(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    bad = await neurons("bad", sizes={"a": GB}, load_gate=asyncio.Event())
    good = await neurons("good", sizes={"a": GB}, total_bytes=48 * GB)
    client = await start_gateway(bad, good)
    request = asyncio.create_task(client.chat("a"))
    await until(lambda: bad.load_requests)
    await bad.stop()
    status, answer = await request
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "from good")


async def test_tries_another_node_when_a_loading_one_misses_polls(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cortex.gateway.dispatch.node_client.POLL_TIMEOUT_S", 0.1)
    bad = await neurons("bad", sizes={"a": GB}, load_gate=asyncio.Event())
    good = await neurons("good", sizes={"a": GB}, total_bytes=48 * GB)
    client = await start_gateway(bad, good)
    request = asyncio.create_task(client.chat("a"))
    await until(lambda: bad.load_requests)
    bad.silent = True
    status, answer = await request
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "from good")


async def test_silent_stream_ends_after_the_idle_timeout(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def fall_silent(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk(body["model"], {"content": "half"}))
        await hang()

    bad = await neurons("bad", sizes={"a": GB}, states={"a": READY}, answer=fall_silent)
    client = await start_gateway(bad, idle_timeout_s=0.5, keepalive_s=0.2)
    text = await client.stream("/v1/chat/completions", {"model": "a", "messages": [], "stream": True})
    assert b'"upstream_interrupted"' in text


async def test_one_missed_poll_does_not_take_a_node_down(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cortex.gateway.dispatch.node_client.POLL_TIMEOUT_S", 0.1)
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, missed_polls=3)
    polls = beast.polls
    beast.silent = True
    await until(lambda: beast.polls > polls + 1)
    beast.silent = False
    assert (await client.chat("a"))[0] == 200
    assert (await client.get("/health"))[1]["nodes"] == {"beast": "up"}


async def test_reloads_a_model_that_was_unloaded_elsewhere(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def absent_until_loaded(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not node.load_requests:
            error = {"error": {"message": "not here", "code": "model_not_found", "type": "x"}}
            return web.json_response(error, status=404)
        return await plain_answer(node, request, body)

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, answer=absent_until_loaded)
    client = await start_gateway(beast, poll_interval_s=5.0)
    beast.states["a"] = ModelState.COLD
    status, _ = await client.chat("a")
    assert status == 200
    assert len(beast.load_requests) == 1


async def test_tries_another_replica_when_one_is_overloaded(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def full(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full", "code": "overloaded", "type": "x"}}, status=503)

    full_node = await neurons("a-full", sizes={"a": GB}, states={"a": READY}, answer=full)
    free_node = await neurons("b-free", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(full_node, free_node)
    assert [(await client.chat("a"))[0] for _ in range(3)] == [200] * 3
    free_node.answer = full
    status, body = await client.chat("a")
    assert (status, body["error"]["code"]) == (503, "overloaded")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queue", "load", "prefill", "decode"])
async def test_disconnected_client_frees_its_place_within_a_second(
    neurons: StartNeuron, start_gateway: StartGateway, phase: str, stream: bool
) -> None:
    async def prefill(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await hang()

    async def decode(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        while True:
            await response.write(chunk(body["model"], {"content": "x"}))
            await asyncio.sleep(0.01)

    sizes = {"a": 20 * GB, "b": 20 * GB}
    beast = await neurons("beast", sizes=sizes, answer=decode if phase == "decode" else prefill)
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
    seen = len(beast.seen)
    dispatcher = client.gateway.dispatcher
    request = asyncio.create_task(client.chat("a", stream=stream))
    if phase in ("queue", "load"):
        await until(lambda: dispatcher.queue_depths.get("a") == 1)
    else:
        await until(lambda: len(beast.seen) > seen)
        await asyncio.sleep(0.1)
    request.cancel()
    if phase in ("queue", "load"):
        await until(lambda: "a" not in dispatcher.queue_depths)
    else:
        await until(lambda: beast.seen[-1].left_at is not None)
        assert dispatcher.in_flight == {}
    assert "cortex_client_disconnects_total{phase=" in client.metrics()
    if blocker is not None:
        blocker.cancel()


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

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, answer=stream)
    client = await start_gateway(beast)
    body = {"model": "a", "messages": [], "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{client.url}/v1/chat/completions", json=body) as got:
        assert got.headers.getall("x-accel-buffering") == ["no"]


async def test_count_tokens_does_not_load_the_model(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def count(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"input_tokens": 12})

    beast = await neurons("beast", sizes={"a": GB}, answer=count)
    client = await start_gateway(beast)
    status, body = await client.post("/v1/messages/count_tokens", {"model": "a", "messages": []})
    assert (status, body) == (200, {"input_tokens": 12})
    assert not beast.load_requests
    assert beast.seen[0].path == "/v1/messages/count_tokens"


async def test_embeddings_need_a_node_that_makes_them(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def embed(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"embedding": [0.5]}], "model": body["model"]})

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    other = await neurons("other", sizes={"embedder": GB}, answer=embed)
    client = await start_gateway(beast, foreign=(other,))
    status, body = await client.post("/v1/embeddings", {"model": "a", "input": "x"})
    assert (status, body["error"]["code"]) == (400, "unsupported_modality")
    status, body = await client.post("/v1/embeddings", {"model": "embedder", "input": "x"})
    assert (status, body["data"][0]["embedding"]) == (200, [0.5])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("body", [b"", b"nonsense", b"[]", b"{}", b'{"model":7}', b"[" * 50_000, b"\xff"])
async def test_bad_bodies_are_400_in_the_dialect_of_the_route(
    neurons: StartNeuron, start_gateway: StartGateway, path: str, body: bytes
) -> None:
    client = await start_gateway()
    status, answer = await client.post(path, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert ("type" in answer) == (path == "/v1/messages")


async def test_body_over_the_limit_is_413(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(max_body_mb=1)
    status, answer = await client.post("/v1/messages", b"x" * (2 << 20))
    assert (status, answer["error"]["type"]) == (413, "request_too_large")


async def test_preserves_pauses_between_chunks(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def paced(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        for number in range(4):
            await response.write(chunk(body["model"], {"content": str(number)}))
            await asyncio.sleep(0.05)
        await response.write(usage_chunk("a") + b"data: [DONE]\n\n")
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, answer=paced)
    client = await start_gateway(beast)
    body = msgspec.json.encode({"model": "a", "messages": [], "stream": True})
    times = []
    async with client.session.post(client.url + "/v1/chat/completions", data=body) as response:
        async for _ in response.content.iter_any():
            times.append(time.monotonic())
    assert len(times) >= 4
    assert times[3] - times[0] > 0.1


async def test_shutdown_rejects_new_and_waiting_requests(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast)
    waiting = asyncio.create_task(client.chat("a"))
    await until(lambda: client.gateway.dispatcher.queue_depths.get("a") == 1)
    closing = asyncio.create_task(client.gateway.close(2.0))
    status, body = await waiting
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    await closing


def counted_tokens(client: Client) -> dict[str, float]:
    return {
        name: float(line.rpartition(" ")[2])
        for line in client.metrics().splitlines()
        for name in ("prompt", "cached_prompt", "completion")
        if line.startswith(f"cortex_{name}_tokens_total{{")
    }


REPORTED_TOKENS = {"prompt": 7.0, "cached_prompt": 4.0, "completion": 3.0}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
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

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, answer=reporting)
    client = await start_gateway(beast)
    async with client.session.post(client.url + path, json={"model": "a", "stream": stream}) as response:
        received = await response.read()
    assert counted_tokens(client) == REPORTED_TOKENS
    assert b": usage" not in received, "the report is for the gateway"


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

    foreign = await neurons("foreign", sizes={"a": GB}, answer=unaware)
    client = await start_gateway(foreign=(foreign,))
    body = {"model": "a", "messages": [], "stream": stream}
    async with client.session.post(client.url + "/v1/chat/completions", json=body) as response:
        await response.read()
    assert counted_tokens(client) == REPORTED_TOKENS


async def test_estimates_usage_of_a_response_without_a_report(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    async def unreporting(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk(body["model"], {"content": "x" * 600}) + b"data: [DONE]\n\n")
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, answer=unreporting)
    client = await start_gateway(beast)
    await client.stream("/v1/chat/completions", {"model": "a", "messages": ["x" * 400], "stream": True})
    counted = counted_tokens(client)
    assert counted["prompt"] >= 100
    assert counted["completion"] >= 2


async def test_passes_on_the_trace_context(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await client.post("/v1/chat/completions", {"model": "a", "messages": []}, traceparent=trace)
    assert beast.seen[0].headers["traceparent"] == trace


ERROR_EVENTS = {
    "/v1/chat/completions": b'data: {"error":{"message":"m","type":"server_error","code":"generation_failed"}}\n\n',
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"m"}}\n\n',
    "/v1/responses": b'event: response.failed\ndata: {"type":"response.failed","response":{}}\n\n',
    "/v1/completions": b'data: {"text":"' + b"x" * 5000 + b'"}\n\n: failed generation_failed\n\n',
}


@pytest.mark.parametrize("path", ERROR_EVENTS)
async def test_stream_that_ends_with_an_error_event_counts_as_failed(
    neurons: StartNeuron, start_gateway: StartGateway, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    async def fail(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk("a", {"content": "x"}))
        await response.write(ERROR_EVENTS[path] + usage_report.comment(REPORTED))
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, answer=fail)
    client = await start_gateway(beast, access_log=True)
    with caplog.at_level("INFO", logger="cortex.access"):
        await client.stream(path, {"model": "a", "stream": True, "max_tokens": 5})
        await until(lambda: caplog.records)
    assert vars(caplog.records[-1])["outcome"] == "failed"
    code = "generation_failed" if b"generation_failed" in ERROR_EVENTS[path] else "upstream_interrupted"
    assert f'cortex_request_errors_total{{code="{code}",model="a",node="beast"}} 1.0' in client.metrics()


async def test_complete_stream_that_mentions_errors_counts_as_complete(
    neurons: StartNeuron, start_gateway: StartGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async def succeed(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk("a", {"content": '\n: failed x\n\ndata: {"error": {}}\n\n'}, "stop"))
        return response

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, answer=succeed)
    client = await start_gateway(beast, access_log=True)
    with caplog.at_level("INFO", logger="cortex.access"):
        await client.stream("/v1/chat/completions", {"model": "a", "stream": True})
        await until(lambda: caplog.records)
    assert vars(caplog.records[-1])["outcome"] == "complete"


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


@pytest.mark.parametrize("path", ERROR_EVENTS)
async def test_rejects_a_body_that_is_declared_as_something_else_than_json(
    neurons: StartNeuron, start_gateway: StartGateway, path: str
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    body = b'{"model": "a", "max_tokens": 5}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        status, answer = await client.post(path, body, **{"content-type": kind})
        assert (status, answer["error"]["type"]) == (415, "invalid_request_error")
    for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", "application/vnd.api+json"):
        assert (await client.post(path, body, **{"content-type": kind}))[0] == 200
    assert len(beast.seen) == 3
