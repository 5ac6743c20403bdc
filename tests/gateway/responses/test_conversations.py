"""Conversations of OpenAI's API, through a real gateway."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import Raw
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItemList, Message

from cortex.gateway.config import ResponsesSection
from cortex.gateway.database import Database, Execute
from cortex.gateway.ledger import keys
from cortex.gateway.proxy.services import RequestLimits
from cortex.gateway.responses import conversation_tables, tables
from cortex.gateway.responses.store import ResponseStore
from cortex.gateway.responses.tables import NewResponse
from cortex.parsing import items as stored_items
from cortex.system.tasks import Supervisor
from cortex.wire.errors import InvalidValue

from ...waiting import NEVER_S, WAIT_S, until
from ..fake_neuron import FakeNeuron
from .responding_node import CALL, create, found, send, stream_events

if TYPE_CHECKING:
    from ..started_gateway import Client, StartGateway

ROLES = ("user", "user", "assistant", "user", "assistant")
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


async def test_items_with_an_id_and_no_type_are_messages(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    status, made = await client.post("/v1/conversations", {"items": [{"id": "m0", "role": "user", "content": "a"}]})
    assert status == 200
    for background in (False, True):
        item = {"id": "m\0", "role": "user", "content": "b"}
        _, response = await create(client, input=[item], conversation=made["id"], background=background)
        await found(client, f"/v1/responses/{response['id']}")
    items = await listed(client, made["id"])
    assert [(item["type"], item["role"]) for item in items] == [("message", role) for role in ROLES]


async def test_full_conversation_rejects_items(node: FakeNeuron, start_gateway: StartGateway, tmp_path: Path) -> None:
    client = await start_gateway(node)
    _, made = await client.post("/v1/conversations", {"items": [HELLO]})
    items = [Raw(b'{"id":"msg_%d","type":"message"}' % number) for number in range(stored_items.MAX_ITEMS - 2)]
    owner = conversation_tables.Owner("", time.time(), NEVER_S)
    database = Database(client.gateway.config.responses_database(tmp_path))
    assert await database.do(lambda execute: conversation_tables.append(execute, made["id"], owner, items))
    await database.close()
    path = f"/v1/conversations/{made['id']}/items"
    status, error = await client.post(path, {"items": [HELLO, HELLO]})
    assert (status, error["error"]["param"]) == (400, "items")
    assert [(await client.post(path, {"items": [HELLO]}))[0] for _ in range(2)] == [200, 400]


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
        ("", {"items": {"0": HELLO}}, 400, "items"),
        ("", {"items": [3]}, 400, "items[0]"),
        ("", {"items": [HELLO | {"content": "x" * 1024 * 1024}]}, 400, "items"),
        ("", {"metadata": {str(number): "" for number in range(20_000)}}, 400, "metadata"),
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
    client = await start_gateway(node, responses=ResponsesSection(max_entry_mb=1))
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
    store = ResponseStore(Database(database), section, Supervisor(lambda _: None), lambda _: None, lambda: now)

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


def new_response(id: str, input: bytes = b"[]", conversation_id: str | None = None) -> NewResponse:
    body = b'{"id":"%s","status":"completed","output":[]}' % id.encode()
    return NewResponse(id, "anna", None, "completed", input, body, conversation_id)


async def test_response_that_cannot_be_stored_takes_no_other_with_it(database: str) -> None:
    counted: list[str] = []
    store = ResponseStore(Database(database), ResponsesSection(), Supervisor(lambda _: None), counted.append)
    owner = conversation_tables.Owner("anna", store.clock(), 1000.0)
    await store.run(lambda execute: conversation_tables.create(execute, "conv_1", owner, "{}", ()))
    wanted = [
        new_response("resp_0"),
        new_response("resp_1", b'[{"type":"message"}]', "conv_1"),  # without an id
        new_response("resp_2", b'[{"id":"m\\u0000"}]', "conv_1"),
        new_response("resp_3\0"),  # which only SQLite holds
        new_response("resp_4"),
    ]
    for response in wanted:
        store.save(lambda response=response: response, 10)  # type: ignore[misc]
    stored = [(await store.read("anna", f"resp_{number}")) is not None for number in (0, 1, 2, 4)]
    assert (stored, store.database.is_failing) == ([True, False, True, True], False)
    is_postgres = "://" in database
    assert sorted(counted) == (["failed"] * 2 + ["stored"] * 3 if is_postgres else ["failed"] + ["stored"] * 4)
    if is_postgres:
        with pytest.raises(InvalidValue):
            await store.read("anna", "\0")
        assert store.database.is_failing is False, "the database is available"
    await store.close()


async def test_gateways_on_one_database_add_to_one_conversation(database: str) -> None:
    stores = [
        ResponseStore(Database(database), ResponsesSection(), Supervisor(lambda _: None), lambda _: None) for _ in "ab"
    ]
    owner = conversation_tables.Owner("anna", stores[0].clock(), 1000.0)
    await stores[0].run(lambda execute: conversation_tables.create(execute, "conv_1", owner, "{}", ()))

    async def append(store: ResponseStore, number: int) -> bool:
        item = Raw(b'{"id":"m%d","type":"message","role":"user","content":"\xe4\xbd\xa0"}' % number)
        return await store.run(lambda execute: conversation_tables.append(execute, "conv_1", owner, [item]))

    assert all(await asyncio.gather(*(append(stores[number % 2], number) for number in range(40))))
    items = await stores[0].run(lambda execute: conversation_tables.items_of(execute, "conv_1", owner)) or []
    assert len(items) == 40
    row = await stores[1].run(lambda execute: conversation_tables.read(execute, "conv_1", owner))
    assert row is not None
    assert row.num_bytes == conversation_tables.MIN_BYTES + 2 + sum(len(item.encode()) for item in items)
    for store in stores:
        await store.close()


@pytest.mark.parametrize("kind", ["whole", "stream", "background", "polled"])
async def test_next_turn_at_another_gateway_has_the_previous_one(
    node: FakeNeuron, start_gateway: StartGateway, database: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    section = ResponsesSection(database=database)
    one = await start_gateway(node, responses=section, request_limits=RequestLimits(max_held_s=WAIT_S))
    other = await start_gateway(node, responses=section)
    _, made = await one.post("/v1/conversations", {"items": [HELLO]})
    fields = {"model": "a", "input": "and?", "conversation": made["id"]}
    writing, may_write = threading.Event(), threading.Event()
    are_written: list[str] = []
    add, finish = tables.add, tables.finish

    def add_late(execute: Execute, response: NewResponse, *args: Any, **named: Any) -> None:
        if response.status != "queued":
            writing.set()
            may_write.wait(WAIT_S)
            are_written.append(response.id)
        add(execute, response, *args, **named)

    def finish_late(*args: Any) -> bool:
        writing.set()
        may_write.wait(WAIT_S)
        are_written.append(args[1])
        return finish(*args)

    monkeypatch.setattr(tables, "add", add_late)
    monkeypatch.setattr(tables, "finish", finish_late)

    async def turn() -> list[str]:
        """What was written when the client had the end of the response."""
        if kind == "whole":
            await one.post("/v1/responses", fields)
        elif kind == "polled":
            _, queued = await one.post("/v1/responses", {**fields, "background": True})
            await found(one, f"/v1/responses/{queued['id']}")
        else:
            body = {**fields, "stream": True, "background": kind == "background"}
            async with one.session.post(one.url + "/v1/responses", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"event: response.completed"):
                        break
                return list(are_written)
        return list(are_written)

    running = asyncio.create_task(turn())
    await until(writing.is_set)
    await asyncio.sleep(0.05)  # in which the client would get the end
    may_write.set()
    assert len(await running) == 1
    _, second = await other.post("/v1/responses", fields)
    assert second["output"][0]["content"][0]["text"] == "4 messages"


async def test_responses_and_conversations_share_the_total_size(database: str) -> None:
    section = ResponsesSection(max_total_mb=1)
    store = ResponseStore(Database(database), section, Supervisor(lambda _: None), lambda _: None)
    owner = conversation_tables.Owner("anna", store.clock(), section.retention_s)
    metadata = '{"k":"' + "v" * 600_000 + '"}'
    await store.run(lambda execute: conversation_tables.create(execute, "conv_1", owner, metadata, ()))
    await store.add(new_response("resp_1", b"[]" + b" " * 500_000))
    await store.purge()
    assert await store.run(lambda execute: conversation_tables.read(execute, "conv_1", owner)) is None
    assert await store.read("anna", "resp_1") is not None
    await store.close()
