"""The Responses API with state, through a real gateway: stored responses and references to them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.gateway.config import ResponsesSection
from cortex.gateway.ledger import keys
from cortex.wire.dialects import openai_responses
from cortex.wire.dialects.openai_responses import kept
from cortex.wire.dialects.openai_responses.fields import ITEMS_OF_GATEWAYS, OF_GATEWAYS
from cortex.wire.events import TextDelta

from ...waiting import until
from ..fake_neuron import GB, FakeNeuron
from ..fake_responses import begin_stream
from .responding_node import CALL, create, events_of, found, send, stream_events

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


@pytest.mark.parametrize("stream", [False, True])
async def test_retrieves_a_stored_response_as_it_was_sent(
    node: FakeNeuron, start_gateway: StartGateway, stream: bool
) -> None:
    client = await start_gateway(node)
    if stream:
        data = await client.stream("/v1/responses", {"model": "a", "input": "hello", "stream": True})
        made = stream_events(data)[-1]["response"]
    else:
        _, made = await create(client)
    assert (made["status"], made["store"]) == ("completed", True)
    assert await client.get(f"/v1/responses/{made['id']}") == (200, made)


async def test_continues_a_previous_response_with_its_whole_conversation(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node)
    _, first = await create(client, instructions="be brief")
    _, second = await create(client, input="and?", previous_response_id=first["id"])
    _, third = await create(client, input=[{"role": "user", "content": "so?"}], previous_response_id=second["id"])
    assert second["previous_response_id"] == first["id"]
    assert [seen.body.get("previous_response_id") for seen in node.seen] == [None, None, None]
    said = [(item.get("role"), item["content"]) for item in node.seen[-1].body["input"]]
    assert [role for role, _ in said] == ["user", "assistant", "user", "assistant", "user"]
    assert said[1][1][0]["text"] == "2 messages"  # with the instructions, which later requests do not inherit
    assert third["output"][0]["content"][0]["text"] == "5 messages"


async def test_resolves_item_references_like_an_agents_second_step(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node)
    _, first = await create(client, tools=[CALL])
    call = first["output"][0]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    references = [{"role": "user", "content": "hello"}, {"type": "item_reference", "id": call["id"]}, result]
    status, second = await create(client, tools=[CALL], input=references)
    assert status == 200, second
    assert node.seen[-1].body["input"][1] == call
    assert second["output"][0]["content"][0]["text"] == "3 messages"
    # What was stored for the second response has items, not references.
    _, listed = await client.get(f"/v1/responses/{second['id']}/input_items?order=asc")
    assert [item["type"] for item in listed["data"]] == ["message", "function_call", "function_call_output"]


async def test_compacts_a_stored_conversation_and_stores_nothing(
    node: FakeNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    client = await start_gateway(node)
    _, first = await create(client, input="find the bug")
    body = {"model": "a", "input": "and?", "previous_response_id": first["id"]}
    status, compacted = await client.post("/v1/responses/compact", body)
    assert (status, compacted["object"]) == (200, "response.compaction")
    assert [item["type"] for item in compacted["output"]] == ["message", "message", "compaction"]
    assert (await client.get(f"/v1/responses/{compacted['id']}"))[0] == 404
    status, _ = await create(client, input=[*compacted["output"], {"role": "user", "content": "go on"}])
    assert status == 200
    assert (await client.post("/v1/responses/compact", body | {"stream": True}))[0] == 400


async def test_honours_what_the_field_table_says_of_gateways(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    _, first = await create(client)
    fields = {"store": True, "previous_response_id": first["id"], "background": True}
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    assert {*fields, "conversation"} == OF_GATEWAYS.keys()  # tests of conversations have that one
    assert {reference["type"]} == {kind.name for kind in ITEMS_OF_GATEWAYS}
    status, queued = await create(client, input=[reference], **fields)
    assert (status, {name: queued[name] for name in fields}) == (200, fields)
    await found(client, f"/v1/responses/{queued['id']}")
    sent = node.seen[-1].body
    assert sent.keys().isdisjoint(fields.keys() - {"store"})
    assert [item["type"] for item in sent["input"]] == ["message"] * 3


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, 400, "previous_response_not_found", "previous_response_id"),
        ({"previous_response_id": ""}, 400, "previous_response_not_found", "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 404, "item_not_found", "input[0].id"),
        ({"input": [{"type": "item_reference", "id": f"msg_{'0' * 32}_0"}]}, 404, "item_not_found", "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, 400, "invalid_value", "input[0].id"),
        ({"background": True, "store": False}, 400, "invalid_value", "background"),
        ({"previous_response_id": 5}, 400, "invalid_value", "previous_response_id"),
    ],
)
async def test_rejects_references_to_what_is_not_stored(
    node: FakeNeuron, start_gateway: StartGateway, fields: dict[str, Any], status: int, code: str, param: str
) -> None:
    client = await start_gateway(node)
    got, error = await create(client, **fields)
    assert (got, error["error"]["code"], error["error"]["param"]) == (status, code, param)
    assert not node.seen


async def test_keys_see_only_their_own_responses(node: FakeNeuron, start_gateway: StartGateway) -> None:
    one, other = keys.generate("one"), keys.generate("other")
    client = await start_gateway(node, keys=(one.section, other.section))
    ours, theirs = {"Authorization": f"Bearer {one.text}"}, {"Authorization": f"Bearer {other.text}"}
    _, made = await create(client, ours)
    path = f"/v1/responses/{made['id']}"
    reference = [{"type": "item_reference", "id": made["output"][0]["id"]}]
    for method, suffix in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")):
        assert (await send(client, method, path + suffix, **theirs))[0] == 404, (method, suffix)
    assert (await create(client, theirs, previous_response_id=made["id"]))[0] == 400
    assert (await create(client, theirs, input=reference))[0] == 404
    assert (await send(client, "GET", path))[0] == 401
    assert (await send(client, "GET", path, **ours))[0] == 200


async def test_deleted_responses_are_gone_and_break_their_chain(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    _, first = await create(client)
    _, second = await create(client, previous_response_id=first["id"])
    path = f"/v1/responses/{first['id']}"
    assert await send(client, "DELETE", path) == (200, {"id": first["id"], "object": "response", "deleted": True})
    assert (await client.get(path))[0] == 404
    assert (await send(client, "DELETE", path))[0] == 404
    status, error = await create(client, previous_response_id=second["id"])
    assert status == 400
    assert first["id"] in error["error"]["message"]


async def test_lists_input_items_in_pages(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    _, made = await create(client, input=[{"role": "user", "content": str(number)} for number in range(5)])
    path = f"/v1/responses/{made['id']}/input_items"
    _, newest = await client.get(f"{path}?limit=2")
    assert [item["content"] for item in newest["data"]] == ["4", "3"]
    assert newest["has_more"] is True
    _, rest = await client.get(f"{path}?limit=3&after={newest['last_id']}")
    assert [item["content"] for item in rest["data"]] == ["2", "1", "0"]
    assert rest["has_more"] is False
    for wrong in ("limit=0", "limit=x", "order=up", "after=none"):
        assert (await client.get(f"{path}?{wrong}"))[0] == 400, wrong


async def test_stores_nothing_when_the_client_or_the_operator_says_so(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node)
    _, unstored = await create(client, store=False)
    assert unstored["store"] is False
    assert (await client.get(f"/v1/responses/{unstored['id']}"))[0] == 404
    off = await start_gateway(node, responses=ResponsesSection(store=False))
    status, plain = await create(off)
    assert (status, plain["store"]) == (200, False)
    body = msgspec.json.encode({"model": "a", "input": "x", "store": True})
    async with off.session.post(off.url + "/v1/responses", data=body) as response:
        assert "responses.store" in response.headers["x-cortex-not-stored"]
    for fields in ({"previous_response_id": "resp_1"}, {"background": True}):
        status, error = await create(off, **fields)
        assert (status, error["error"]["param"]) == (400, next(iter(fields)))


async def test_stored_responses_survive_a_restart(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    _, made = await create(client)
    await client.gateway.close()
    again = await start_gateway(node)
    assert await again.get(f"/v1/responses/{made['id']}") == (200, made)
    assert (await create(again, previous_response_id=made["id"]))[0] == 200


async def test_serves_responses_and_says_that_they_are_not_stored_while_the_database_is_down(
    node: FakeNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    (tmp_path / "broken").write_text("not a folder")
    broken = ResponsesSection(database=str(tmp_path / "broken" / "x.db"))
    client = await start_gateway(node, responses=broken)
    status, made = await create(client)
    assert (status, made["status"]) == (200, "completed")
    assert (await client.get(f"/v1/responses/{made['id']}"))[0] == 503
    body = msgspec.json.encode({"model": "a", "input": "x"})
    async with client.session.post(client.url + "/v1/responses", data=body) as response:
        assert response.status == 200
        assert "not available" in response.headers["x-cortex-not-stored"]
        assert (await response.json())["store"] is False
    assert (await create(client, background=True))[0] == 503
    assert 'cortex_stored_responses_total{result="failed"} 1.0' in client.metrics()


async def test_does_not_store_what_is_larger_than_an_entry_may_be(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node, responses=ResponsesSection(max_entry_mb=1))
    body = msgspec.json.encode({"model": "a", "input": "x" * (1 << 20) + "x", "store": True})
    async with client.session.post(client.url + "/v1/responses", data=body) as response:
        assert response.status == 200
        assert "max_entry_mb" in response.headers["x-cortex-not-stored"]


async def test_a_client_that_disconnects_leaves_nothing_stored(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    node.stream_gate = asyncio.Event()
    body = msgspec.json.encode({"model": "a", "input": "x", "stream": True})
    async with client.session.post(client.url + "/v1/responses", data=body) as response:
        first = await response.content.readuntil(b"\n\n")
    await until(lambda: node.seen[-1].left_at is not None)
    id = stream_events(first)[0]["response"]["id"]
    assert (await client.get(f"/v1/responses/{id}"))[0] == 404


async def test_counts_input_tokens_of_the_whole_conversation(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    _, made = await create(client)
    await client.post("/v1/responses/input_tokens", {"model": "a", "input": "more", "previous_response_id": made["id"]})
    assert node.seen[-1].path == "/v1/responses/input_tokens"
    assert len(node.seen[-1].body["input"]) == 3


async def test_serves_stored_responses_from_a_translated_server(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    elsewhere = await neurons("elsewhere", sizes={"a": GB})
    client = await start_gateway(foreign=(elsewhere,))
    await until(lambda: "a" in str(client.gateway.dispatcher.fleet))
    _, first = await create(client)
    status, second = await create(client, input="and?", previous_response_id=first["id"])
    assert (status, second["store"]) == (200, True)
    assert [message["role"] for message in elsewhere.seen[-1].body["messages"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/responses/x"), ("GET", "/v1/responses/x/cancel")])
async def test_other_methods_are_not_allowed(
    node: FakeNeuron, start_gateway: StartGateway, method: str, path: str
) -> None:
    client = await start_gateway(node)
    assert (await send(client, method, path))[0] == 405


def saying(text: str) -> Any:
    """A node whose model says `text`; its long events arrive at the gateway in pieces."""

    async def respond_at_length(node: FakeNeuron, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        request = openai_responses.parse(msgspec.json.encode(body))
        stored = kept.from_header(http.headers[kept.HEADER])
        assert stored is not None
        response = await begin_stream(http)
        encoder = openai_responses.Encoder(stored.described(request), id=stored.id, created=1, model="a")
        start, *_, finish = events_of(request)
        for event in (start, TextDelta(text=text), finish):
            await response.write(encoder.encode(event))
        await response.write_eof()
        return response

    return respond_at_length


@pytest.mark.parametrize("background", [False, True])
async def test_stores_a_stream_whose_last_event_arrives_in_pieces(
    node: FakeNeuron, start_gateway: StartGateway, background: bool
) -> None:
    client = await start_gateway(node)
    node.respond = saying("x" * 1_500_000)
    fields = {"model": "a", "input": "hello", "stream": True, "background": background}
    events = stream_events(await client.stream("/v1/responses", fields))
    done = await found(client, f"/v1/responses/{events[0]['response']['id']}")
    assert len(done["output"][0]["content"][0]["text"]) == 1_500_000
    assert done == events[-1]["response"]


@pytest.mark.parametrize("background", [False, True])
async def test_reports_a_stream_whose_last_event_is_larger_than_an_entry_may_be(
    node: FakeNeuron, start_gateway: StartGateway, background: bool
) -> None:
    client = await start_gateway(node, responses=ResponsesSection(max_entry_mb=1))
    node.respond = saying("x" * 1_500_000)
    fields = {"model": "a", "input": "hello", "stream": True, "background": background}
    id = stream_events(await client.stream("/v1/responses", fields))[0]["response"]["id"]
    if background:
        failed = await found(client, f"/v1/responses/{id}", "failed")
        assert "max_entry_mb" in failed["error"]["message"]
    else:
        assert 'cortex_stored_responses_total{result="too_large"} 1.0' in client.metrics()


@pytest.mark.parametrize(
    "query", ["input_items?limit=0", f"input_items?limit={'1' * 5000}", "?stream=true&starting_after=²"]
)
async def test_rejects_numbers_of_the_query_that_are_none(
    node: FakeNeuron, start_gateway: StartGateway, query: str
) -> None:
    client = await start_gateway(node)
    _, made = await create(client)
    path = f"/v1/responses/{made['id']}{'' if query.startswith('?') else '/'}{query}"
    status, error = await client.get(path)
    assert (status, "it must be a number from" in error["error"]["message"]) == (400, True)
