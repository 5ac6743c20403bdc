"""Responses that run in the background: queued, cancelled, resumed, and lost."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.gateway.config import ResponsesSection
from cortex.gateway.proxy.services import RequestLimits
from cortex.gateway.responses import tables
from cortex.gateway.responses.background import LOST_AFTER_S, current_body
from cortex.gateway.responses.response_object import head_of
from cortex.gateway.responses.tables import StoredResponse

from ...waiting import NEVER_S, WAIT_S, until
from ..fake_neuron import FakeNeuron
from .responding_node import create, found, stream_events

if TYPE_CHECKING:
    from ..started_gateway import StartGateway


async def test_background_responses_are_queued_run_and_complete(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    node.stream_gate = asyncio.Event()
    status, queued = await create(client, background=True)
    assert (status, queued["status"], queued["background"], queued["output"]) == (200, "queued", True, [])
    path = f"/v1/responses/{queued['id']}"
    await found(client, path, "in_progress")
    status, error = await create(client, previous_response_id=queued["id"])
    assert (status, "wait until it has ended" in error["error"]["message"]) == (400, True)
    node.stream_gate.set()
    done = await found(client, path)
    assert done["output"][0]["content"][0]["text"] == "1 messages"
    assert done["usage"]["output_tokens"] == 3
    await client.gateway.close()
    again = await start_gateway(node)
    assert await again.get(path) == (200, done)


async def test_background_responses_can_be_cancelled(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    node.stream_gate = asyncio.Event()
    _, queued = await create(client, background=True)
    await until(lambda: node.seen)
    path = f"/v1/responses/{queued['id']}"
    status, cancelled = await client.post(path + "/cancel")
    assert (status, cancelled["status"]) == (200, "cancelled")
    await until(lambda: node.seen[0].left_at is not None)
    assert (await client.post(path + "/cancel"))[1]["status"] == "cancelled"
    assert (await client.get(path))[1]["status"] == "cancelled"
    _, foreground = await create(client, stream=False)
    status, error = await client.post(f"/v1/responses/{foreground['id']}/cancel")
    assert (status, "background" in error["error"]["message"]) == (400, True)


async def test_a_background_stream_survives_its_client_and_can_be_resumed(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node)
    node.stream_gate = asyncio.Event()
    body = msgspec.json.encode({"model": "a", "input": "x", "stream": True, "background": True})
    async with client.session.post(client.url + "/v1/responses", data=body) as response:
        first = stream_events(await response.content.readuntil(b"\n\n"))[0]
    node.stream_gate.set()
    path = f"/v1/responses/{first['response']['id']}?stream=true&starting_after=0"
    async with client.session.get(client.url + path) as response:
        events = stream_events(await response.read())
    assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
    assert (events[0]["type"], events[-1]["type"]) == ("response.in_progress", "response.completed")


async def test_background_requests_are_rejected_at_once_where_that_is_known(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node, responses=ResponsesSection(max_background=1))
    assert (await create(client, background=True, temperature=-1))[0] == 400
    assert (await create(client, background=True, model="unknown"))[0] == 404
    node.stream_gate = asyncio.Event()
    assert (await create(client, background=True))[0] == 200
    assert (await create(client, background=True))[0] == 503


async def test_bodies_of_background_responses_count_as_buffered_until_they_end(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node)
    buffered = client.gateway.server.buffered
    node.stream_gate = asyncio.Event()
    _, queued = await create(client, background=True, input="x" * 100_000)
    await until(lambda: 100_000 < buffered.num_bytes < 150_000)
    buffered.max_bytes = buffered.num_bytes + 50_000
    assert (await create(client, background=True, input="x" * 40_000))[0] == 503, "its body is there twice for a while"
    node.stream_gate.set()
    await found(client, f"/v1/responses/{queued['id']}")
    await until(lambda: buffered.num_bytes == 0)


async def test_a_background_response_whose_node_fails_has_failed(node: FakeNeuron, start_gateway: StartGateway) -> None:
    async def broken(*_: Any) -> web.StreamResponse:
        return web.json_response({"error": {"message": "out of luck", "code": "generation_failed"}}, status=500)

    client = await start_gateway(node)
    node.respond = broken
    _, queued = await create(client, background=True)
    failed = await found(client, f"/v1/responses/{queued['id']}", "failed")
    assert failed["error"]["code"] == "generation_failed"


async def test_gateways_on_one_database_share_responses_and_cancel_each_others_runs(
    node: FakeNeuron, start_gateway: StartGateway, database: str
) -> None:
    """The second gateway reads, continues and cancels what the first one makes."""
    section = ResponsesSection(database=database)
    one, other = await start_gateway(node, responses=section), await start_gateway(node, responses=section)
    _, made = await create(one)
    assert await found(other, f"/v1/responses/{made['id']}") == made  # once the first one has written it
    assert (await create(other, previous_response_id=made["id"]))[0] == 200
    node.stream_gate = asyncio.Event()
    _, queued = await create(one, background=True)
    await until(lambda: len(node.seen) == 3)
    path = f"/v1/responses/{queued['id']}"
    assert (await other.get(path))[1]["status"] == "queued"
    assert (await other.post(path + "/cancel"))[1]["status"] == "cancelled"
    await until(lambda: node.seen[-1].left_at is not None)
    assert (await one.get(path))[1]["status"] == "cancelled"


async def test_a_background_response_of_a_gateway_that_is_gone_has_failed(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node)
    stored = StoredResponse("resp_1", None, "in_progress", int(time.time()), "[]", '{"id":"resp_1","status":"queued"}')
    assert head_of(current_body(stored, time.time())).status == "queued"
    lost = msgspec.json.decode(current_body(stored, time.time() + LOST_AFTER_S + 1))
    assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
    node.stream_gate = asyncio.Event()
    _, queued = await create(client, background=True)
    await client.gateway.close()
    again = await start_gateway(node)
    _, ended = await again.get(f"/v1/responses/{queued['id']}")
    assert (ended["status"], ended["error"]["code"]) == ("failed", "shutting_down")


async def test_background_requests_at_the_same_time_do_not_exceed_the_limit(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node, responses=ResponsesSection(max_background=1))
    node.stream_gate = asyncio.Event()
    results = await asyncio.gather(*(create(client, background=True) for _ in range(4)))
    assert sorted(status for status, _ in results) == [200, 503, 503, 503]


@pytest.mark.parametrize("in_conversation", [False, True])
async def test_the_end_of_a_background_response_does_not_wait_for_a_database_that_does_not_respond(
    node: FakeNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch, *, in_conversation: bool
) -> None:
    """Only that of one that may be continued elsewhere waits, for a limited time."""
    may_write = threading.Event()
    are_written: list[str] = []
    finish = tables.finish

    def finish_late(*args: Any) -> bool:
        may_write.wait(WAIT_S)
        are_written.append(args[1])
        return finish(*args)

    monkeypatch.setattr(tables, "finish", finish_late)
    limits = RequestLimits(max_held_s=0.01 if in_conversation else NEVER_S)
    client = await start_gateway(node, request_limits=limits)
    fields: dict[str, Any] = {"background": True, "stream": True}
    if in_conversation:
        fields["conversation"] = (await client.post("/v1/conversations", {}))[1]["id"]
    try:
        body = msgspec.json.encode({"model": "a", "input": "x", **fields})
        async with client.session.post(client.url + "/v1/responses", data=body) as response:
            last = stream_events(await response.read())[-1]
        assert last["type"] == "response.completed"
        assert (await client.get(f"/v1/responses/{last['response']['id']}"))[1]["status"] == "completed"
        assert not are_written
    finally:
        may_write.set()
