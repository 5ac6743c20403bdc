"""Conversations of OpenAI's API, through a real gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItemList, Message

from cortex.gateway.config import ResponsesSection
from cortex.gateway.ledger import keys
from cortex.gateway.responses import conversation_tables
from cortex.gateway.responses.store import ResponseStore
from cortex.tasks import Supervisor

from ..fake_neuron import FakeNeuron
from .responding_node import CALL, create, found, send, stream_events

if TYPE_CHECKING:
    from ..started_gateway import Client, StartGateway

HELLO = {"type": "message", "role": "user", "content": "hello"}


async def listed(client: Client, id: str, query: str = "order=asc") -> list[dict[str, Any]]:
    status, body = await client.get(f"/v1/conversations/{id}/items?{query}")
    assert status == 200, body
    ConversationItemList.model_validate(body | {"first_id": body["first_id"] or "", "last_id": body["last_id"] or ""})
    data: list[dict[str, Any]] = body["data"]
    return data


async def test_conversation_is_made_read_changed_and_deleted(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    status, made = await client.post("/v1/conversations", {"metadata": {"topic": "demo"}, "items": [HELLO]})
    assert status == 200
    Conversation.model_validate(made)
    assert made["id"].startswith("conv_")
    path = f"/v1/conversations/{made['id']}"
    assert await client.get(path) == (200, made)
    changed = made | {"metadata": {"topic": "other"}}
    assert await client.post(path, {"metadata": {"topic": "other"}}) == (200, changed)
    assert await client.get(path) == (200, changed)

    status, added = await client.post(f"{path}/items", {"items": [{"role": "assistant", "content": "hi"}, HELLO]})
    assert status == 200
    assert [Message.model_validate(item).role for item in added["data"]] == ["assistant", "user"]
    assert added["data"][0]["content"][0] == {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
    items = await listed(client, made["id"])
    assert items[1:] == added["data"]
    assert items[0]["content"] == [{"type": "input_text", "text": "hello"}]
    assert await listed(client, made["id"], "limit=1") == items[-1:]
    assert await listed(client, made["id"], f"order=asc&after={items[0]['id']}&limit=1") == items[1:2]

    item = f"{path}/items/{items[1]['id']}"
    assert await client.get(item) == (200, items[1])
    assert await send(client, "DELETE", item) == (200, changed)
    assert (await client.get(item))[0] == 404
    assert await listed(client, made["id"]) == [items[0], items[2]]

    status, gone = await send(client, "DELETE", path)
    ConversationDeletedResource.model_validate(gone)
    assert (status, gone) == (200, {"id": made["id"], "object": "conversation.deleted", "deleted": True})
    for method, missing in (("GET", path), ("DELETE", path), ("GET", f"{path}/items"), ("GET", item)):
        status, error = await send(client, method, missing)
        assert (status, error["error"]["type"]) == (404, "invalid_request_error"), missing
    assert (await client.post("/v1/conversations", {}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_object", [False, True])
async def test_response_continues_its_conversation_and_is_added_to_it(
    node: FakeNeuron, start_gateway: StartGateway, stream: bool, as_object: bool
) -> None:
    client = await start_gateway(node)
    _, made = await client.post("/v1/conversations", {"items": [HELLO, {"role": "assistant", "content": "hi"}]})
    conversation = {"id": made["id"]} if as_object else made["id"]
    for number in (0, 1):
        fields = {"model": "a", "input": "and?", "conversation": conversation, "stream": stream}
        if stream:
            response = stream_events(await client.stream("/v1/responses", fields))[-1]["response"]
        else:
            _, response = await client.post("/v1/responses", fields)
        assert response["conversation"] == {"id": made["id"]}
        assert response["output"][0]["content"][0]["text"] == f"{3 + 2 * number} messages"
        assert "conversation" not in node.seen[-1].body
    items = await listed(client, made["id"])
    assert [item["role"] for item in items] == ["user", "assistant"] * 3
    assert items[-1] == response["output"][0]
    assert items[-2]["content"] == [{"type": "input_text", "text": "and?"}]
    # The tokens of a conversation can be counted, and a response retrieved.
    assert (await client.get(f"/v1/responses/{response['id']}"))[1]["conversation"] == {"id": made["id"]}


async def test_tool_calls_background_and_unstored_responses_are_added(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node)
    id = (await client.post("/v1/conversations", {}))[1]["id"]
    _, first = await create(client, tools=[CALL], conversation=id)
    result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "sunny"}
    _, second = await create(client, input=[result], tools=[CALL], conversation=id, background=True)
    await found(client, f"/v1/responses/{second['id']}")
    _, third = await create(client, conversation=id, store=False)
    assert third["store"] is False
    assert (await client.get(f"/v1/responses/{third['id']}"))[0] == 404
    kinds = [item["type"] for item in await listed(client, id)]
    assert kinds == ["message", "function_call", "function_call_output", *["message"] * 3]


async def test_conversations_belong_to_the_key_that_made_them(node: FakeNeuron, start_gateway: StartGateway) -> None:
    anna, ben = keys.generate("anna"), keys.generate("ben")
    client = await start_gateway(node, keys=(anna.section, ben.section))
    own, other = ({"authorization": f"Bearer {key.text}"} for key in (anna, ben))
    _, made = await client.post("/v1/conversations", {"items": [HELLO]}, **own)
    path = f"/v1/conversations/{made['id']}"
    assert (await client.get(path))[0] == 401
    for method, target in (("GET", path), ("GET", f"{path}/items"), ("DELETE", path)):
        assert (await send(client, method, target, **other))[0] == 404
    assert (await client.post(f"{path}/items", {"items": [HELLO]}, **other))[0] == 404
    assert (await client.post(path, {"metadata": {}}, **other))[0] == 404
    status, error = await create(client, other, conversation=made["id"])
    assert (status, error["error"]["code"]) == (404, "conversation_not_found")
    assert (await create(client, own, conversation=made["id"]))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("", {"items": [HELLO] * 21}, 400, "items"),
        ("", {"items": "hello"}, 400, "items"),
        ("", {"items": [{"type": "message", "role": "user", "content": 3}]}, 400, "items[0].content"),
        ("", {"metadata": {"k": "v" * 513}}, 400, None),
        ("", {"metadata": {str(number): "" for number in range(17)}}, 400, None),
        ("/conv_1", {"metadata": {}}, 404, "conversation"),
        ("/conv_1", {}, 400, None),
        ("/conv_1/items", {"items": [HELLO]}, 404, "conversation"),
        ("/conv_1/items/msg_1", {}, 405, None),
        ("/conv_1/files", {}, 404, None),
    ],
)
async def test_rejects_what_is_no_conversation(
    node: FakeNeuron, start_gateway: StartGateway, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    client = await start_gateway(node)
    got, error = await client.post(f"/v1/conversations{path}", body)
    assert (got, error["error"]["param"]) == (status, param), error


async def test_conversation_and_previous_response_exclude_each_other(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node)
    status, error = await create(client, conversation="conv_1", previous_response_id="resp_1")
    assert (status, error["error"]["param"]) == (400, "conversation")


async def test_gateway_that_stores_nothing_has_no_conversations(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node, responses=ResponsesSection(store=False))
    assert (await client.post("/v1/conversations", {}))[0] == 400
    status, error = await create(client, conversation="conv_1")
    assert (status, error["error"]["param"]) == (400, "conversation")


async def test_conversations_expire_and_are_bounded(database: str) -> None:
    now = 1000.0
    section = ResponsesSection(retention_s=100, max_total_mb=1)
    store = ResponseStore(database, section, Supervisor(lambda _: None), lambda _: None, lambda: now)

    async def make(key_id: str, id: str, num_bytes: int) -> None:
        metadata = '{"k":"' + "v" * num_bytes + '"}'
        owner = conversation_tables.Owner(key_id, now, section.retention_s)
        await store.run(lambda execute: conversation_tables.create(execute, id, owner, metadata, ()))

    async def exists(key_id: str, id: str) -> bool:
        owner = conversation_tables.Owner(key_id, now, section.retention_s)
        return await store.run(lambda execute: conversation_tables.read(execute, id, owner)) is not None

    await make("anna", "old", 600_000)
    await make("ben", "small", 1000)
    now += 1
    await make("anna", "new", 600_000)
    await store.purge()
    assert [await exists("anna", "old"), await exists("anna", "new"), await exists("ben", "small")] == [
        False,
        True,
        True,
    ]
    now += 100
    assert not await exists("anna", "new")
    await store.purge()
    assert await store.run(lambda execute: execute("SELECT COUNT(*) FROM conversation", ())[0][0]) == 0
    await store.close()
