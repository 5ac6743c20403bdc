"""Requests for models that are not loaded, or not there: loads, evictions and rejections."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.rules import EvictionRules
from cortex.gateway.ledger.keys import generate
from cortex.wire.errors import prompt_too_long
from cortex.wire.node.contexts import ContextSize, ContextSizes
from cortex.wire.node.headers import PROMPT_TOKENS
from cortex.wire.node.protocol import ModelState

from ...ports import free_port
from ...waiting import until
from ..fake_neuron import GB, FakeNeuron, plain_response

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


READY = ModelState.READY


async def test_loads_a_cold_model_once_for_many_requests(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast)
    requests = [asyncio.create_task(client.chat("a")) for _ in range(5)]
    await until(lambda: client.gateway.dispatcher.queue_depths.get("a") == 5)
    beast.load_gate.set()
    responses = await asyncio.gather(*requests)
    assert [status for status, _ in responses] == [200] * 5
    assert len(beast.load_requests) == 1
    assert 'cortex_cold_starts_total{model="a",node="beast"} 1.0' in client.metrics()


async def test_waiting_stream_gets_keepalives_on_the_wall_clock(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast, keepalive_s=0.1)
    body = {"model": "a", "messages": [], "stream": True, "max_tokens": 5}
    for path, keepalive in (("/v1/chat/completions", b": "), ("/v1/messages", b"event: ping")):
        async with client.session.post(client.url + path, data=msgspec.json.encode(body)) as response:
            assert response.headers["x-accel-buffering"] == "no"
            assert keepalive in await response.content.readuntil(b"\n\n")
            assert keepalive in await response.content.readuntil(b"\n\n")
    beast.load_gate.set()


async def test_waiting_stream_is_told_of_the_load_in_a_comment_or_as_reasoning(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    beast = await neurons("beast", sizes={"a": GB, "b": GB}, load_gate=asyncio.Event())
    catalogue = Catalogue(models=(ModelSpec(id="a"), ModelSpec(id="b", loading_state="reasoning")))
    client = await start_gateway(beast, catalogue=catalogue, keepalive_s=0.1)
    for path, model, told in (
        ("/v1/chat/completions", "a", b": a is being loaded\n"),
        ("/v1/messages", "b", b": b is being loaded\n"),
        ("/v1/chat/completions", "b", b'"reasoning_content":"b is being loaded\\n"'),
        ("/api/chat", "b", b'"thinking":"b is being loaded\\n"'),
    ):
        messages = [{"role": "user", "content": "x"}]
        body = {"model": model, "messages": messages, "stream": True, "max_tokens": 5}
        async with client.session.post(client.url + path, data=msgspec.json.encode(body)) as response:
            assert told in await response.content.readuntil(b"\n")
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


async def test_unknown_model_can_be_asked_for_again_while_a_node_is_starting(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    away = FakeNeuron("away", port=free_port())
    client = await start_gateway(await neurons("beast", sizes={"a": GB}), away)
    async with client.session.post(
        client.url + "/v1/chat/completions", data=b'{"model":"b","messages":[]}'
    ) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], "retry-after" in response.headers) == (503, "overloaded", True)
        assert "away may have it" in error["message"]
    assert (await client.chat("a"))[0] == 200


async def test_client_with_a_key_does_not_learn_which_node_is_starting(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    user, away = generate("user"), FakeNeuron("away", port=free_port())
    client = await start_gateway(await neurons("beast", sizes={"a": GB}), away, keys=(user.section,))
    body = {"model": "b", "messages": []}
    status, response = await client.post("/v1/chat/completions", body, authorization=f"Bearer {user.text}")
    assert (status, response["error"]["code"], "away" in response["error"]["message"]) == (503, "overloaded", False)


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
    status, response = await client.chat("a")
    assert (status, response["choices"][0]["message"]["content"]) == (200, "from second")
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


async def test_load_of_an_unsupported_model_is_422_with_the_nodes_message(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    reason = "mamba9000 is not supported"
    beast = await neurons("beast", sizes={"a": GB}, load_faults=[(422, "model_unsupported", reason)] * 5)
    client = await start_gateway(beast)
    for _ in range(2):  # by the load, and because it has just failed
        status, body = await client.chat("a")
        assert (status, body["error"]["code"]) == (422, "model_unsupported")
        assert reason in body["error"]["message"]
    messages = [{"role": "user", "content": "x"}]
    status, body = await client.post("/v1/messages", {"model": "a", "max_tokens": 5, "messages": messages})
    assert (status, body["error"]["type"]) == (422, "invalid_request_error")
    assert len(beast.load_requests) == 1


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
        return await plain_response(node, request, body)

    beast = await neurons("beast", sizes={"old": 20 * GB, "a": 10 * GB}, states={"old": READY}, respond=slow)
    client = await start_gateway(beast)
    running = asyncio.create_task(client.chat("old"))
    await until(lambda: beast.seen)
    waiting = asyncio.create_task(client.chat("a"))
    await until(lambda: client.gateway.dispatcher.queue_depths.get("a") == 1)
    num_polls = beast.polls
    await until(lambda: beast.polls > num_polls + 1)  # each is followed by a decision
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


async def test_reloads_a_model_that_was_unloaded_elsewhere(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def absent_until_loaded(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not node.load_requests:
            error = {"error": {"message": "not here", "code": "model_not_found", "type": "x"}}
            return web.json_response(error, status=404)
        return await plain_response(node, request, body)

    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=absent_until_loaded)
    client = await start_gateway(beast, poll_interval_s=5.0)
    beast.states["a"] = ModelState.COLD
    status, _ = await client.chat("a")
    assert status == 200
    assert len(beast.load_requests) == 1


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/tokenize"])
async def test_tokens_are_counted_once_a_model_that_no_node_knows_is_loaded(
    neurons: StartNeuron, start_gateway: StartGateway, path: str
) -> None:
    beast = await neurons("beast", sizes={"other": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast, catalogue=Catalogue(models=(ModelSpec(id="new", vram_mb=1024),)))
    counting = asyncio.create_task(client.post(path, {"model": "new", "messages": []}))
    await until(lambda: beast.load_requests)
    beast.sizes["new"] = GB
    beast.load_gate.set()
    status, body = await counting
    assert status == 200, body
    assert [request.model_id for request in beast.load_requests] == ["new"]
    assert beast.seen[-1].path == path


async def test_count_tokens_does_not_load_the_model(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    async def count(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"input_tokens": 12})

    beast = await neurons("beast", sizes={"a": GB}, respond=count)
    client = await start_gateway(beast)
    status, body = await client.post("/v1/messages/count_tokens", {"model": "a", "messages": []})
    assert (status, body) == (200, {"input_tokens": 12})
    assert not beast.load_requests
    assert beast.seen[0].path == "/v1/messages/count_tokens"


async def test_shutdown_rejects_new_and_waiting_requests(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, load_gate=asyncio.Event())
    client = await start_gateway(beast)
    waiting = asyncio.create_task(client.chat("a"))
    await until(lambda: client.gateway.dispatcher.queue_depths.get("a") == 1)
    closing = asyncio.create_task(client.gateway.close(2.0))
    status, body = await waiting
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    await closing


CONTEXTS = ContextSizes(
    limit_tokens=131_072,
    full_tokens=131_072,
    wanted_tokens=32_768,
    empty_tokens=131_072,
    full_bytes=18 * GB,
    sizes=(ContextSize(tokens=1, num_bytes=2 * GB), ContextSize(tokens=131_072, num_bytes=18 * GB)),
)


async def rejects_60_000_tokens(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Until the model was loaded there by order."""
    if node.load_requests:
        return await plain_response(node, request, body)
    error = prompt_too_long(60_000, 32_768)
    headers = {PROMPT_TOKENS: "60000"}
    return web.json_response({"error": {"message": error.message, "code": error.code}}, status=400, headers=headers)


async def test_model_that_rejects_a_prompt_is_loaded_again_in_the_place_of_idle_ones(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    """Its context of 32,768 tokens is less than memory allows without them."""
    sizes, states, contexts = {"long": 6 * GB, "other": 16 * GB}, {"long": READY, "other": READY}, {"long": CONTEXTS}
    beast = await neurons("beast", sizes=sizes, states=states, contexts=contexts, respond=rejects_60_000_tokens)
    client = await start_gateway(beast)
    status, body = await client.chat("long")
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    await until(lambda: beast.load_requests)
    assert {request.model_id for request in beast.unload_requests} == {"long", "other"}
    status, body = await client.chat("long")
    assert status == 200
    assert (beast.load_requests[0].min_context_tokens or 0) > 56_000


async def test_prompt_that_is_too_long_for_one_replica_goes_to_another_with_more_context(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    sizes, states, contexts = {"long": 6 * GB}, {"long": READY}, {"long": CONTEXTS}
    small = await neurons("a-small", sizes=sizes, states=states, contexts=contexts, respond=rejects_60_000_tokens)
    large = await neurons("b-large", sizes=sizes, states=states, context_tokens=131_072, respond=plain_response)
    client = await start_gateway(small, large)
    status, body = await client.chat("long")
    assert (status, body["choices"][0]["message"]["content"]) == (200, "from b-large")
    assert small.seen, "it was tried there first"
    assert not small.unload_requests
    assert (await client.get("/v1/models/long"))[1]["max_model_len"] == 131_072


async def test_prompt_that_no_other_replica_has_room_for_is_not_sent_again(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    """It ran out of memory, or is over the limit of the node's configuration."""
    sizes, states = {"long": 6 * GB}, {"long": READY}
    large = await neurons("a-large", sizes=sizes, states=states, context_tokens=131_072, respond=rejects_60_000_tokens)
    small = await neurons("b-small", sizes=sizes, states=states, context_tokens=32_768, respond=rejects_60_000_tokens)
    client = await start_gateway(large, small)
    assert (await client.chat("long"))[0] == 400
    assert (len(large.seen), len(small.seen)) == (1, 0)
