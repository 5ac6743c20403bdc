"""A request in flight is cancelled: at its node, for its client, and in the records."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web

from cortex.gateway.ledger.keys import generate
from cortex.wire.node.protocol import ModelState

from ...waiting import until
from ..fake_neuron import GB
from ..fake_responses import begin_stream, chunk, hang

if TYPE_CHECKING:
    from ..fake_neuron import FakeNeuron, StartNeuron
    from ..started_gateway import Client, StartGateway

READY = ModelState.READY
RUNNING = "/fleet/activity/running"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/v1/responses": {"input": "hello"},
    "/v1/completions": {"prompt": "hello"},
    "/api/chat": {"messages": HELLO},
}


async def begun(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Streams the beginning of a response, or nothing of a whole one, and hangs."""
    if body.get("stream", request.path.startswith("/api/")):
        response = await begin_stream(request)
        await response.write(chunk(body["model"], {"content": "once upon"}))
    await hang()


async def remove(client: Client, path: str, **headers: str) -> tuple[int, Any]:
    async with client.session.delete(client.url + path, headers=headers) as response:
        return response.status, msgspec.json.decode(await response.read())


async def running(client: Client, phase: str, **headers: str) -> dict[str, Any]:
    """The only request, once it has got to `phase`."""

    def has_begun(page: Any) -> bool:
        return [each["phase"] for each in page["requests"]] == [phase]

    return dict((await client.get_until(RUNNING, has_begun, **headers))["requests"][0])


async def recorded(client: Client) -> dict[str, Any]:
    """The only request that has ended, once its node has reported its usage."""
    [record] = (await client.get_until("/fleet/activity", lambda page: page["requests"]))["requests"]
    return dict(record)


@pytest.mark.parametrize("path", BODIES)
async def test_whole_response_ends_with_an_error_in_the_dialect_of_the_client(
    neurons: StartNeuron, start_gateway: StartGateway, path: str
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=begun)
    client = await start_gateway(beast)
    request = asyncio.create_task(client.post(path, {"model": "a", "stream": False, **BODIES[path]}))
    found = await running(client, "prefill")
    assert (found["model"], found["node"], found["path"], found["stream"]) == ("a", "beast", path, False)
    assert await remove(client, f"{RUNNING}/{found['id']}") == (200, {"cancelled": 1})
    status, answer = await request
    assert status == 499
    error = answer["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert message == "The request was cancelled by the operator of this gateway."
    assert ("type" in answer) == (path == "/v1/messages")
    await until(lambda: beast.seen[-1].left_at is not None)
    assert client.gateway.dispatcher.in_flight == {}
    record = await recorded(client)
    assert (record["outcome"], record["error"], record["status"]) == ("cancelled", "request_cancelled", 499)
    assert (await client.get(RUNNING))[1] == {"requests": []}


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/chat/completions", b'"code":"request_cancelled"'),
        ("/v1/messages", b'"type":"error"'),
        ("/v1/responses", b"event: error"),
        ("/api/chat", b'"error":"The request was cancelled'),
    ],
)
async def test_stream_ends_with_an_error_after_a_whole_event(
    neurons: StartNeuron, start_gateway: StartGateway, path: str, end: bytes
) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=begun)
    client = await start_gateway(beast)
    request = asyncio.create_task(client.stream(path, {"model": "a", "stream": True, **BODIES[path]}))
    found = await running(client, "decode")
    assert (await remove(client, f"{RUNNING}/{found['id']}"))[0] == 200
    received = await request
    assert b"once upon" in received
    assert end in received
    await until(lambda: beast.seen[-1].left_at is not None)
    record = await recorded(client)
    assert (record["outcome"], record["error"]) == ("cancelled", "request_cancelled")


async def test_request_that_waits_for_a_load_is_cancelled(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB})
    beast.load_gate = asyncio.Event()
    client = await start_gateway(beast)
    request = asyncio.create_task(client.chat("a"))
    found = await running(client, "wait")
    assert found["node"] == ""
    await remove(client, f"{RUNNING}/{found['id']}")
    assert (await request)[0] == 499
    assert "a" not in client.gateway.dispatcher.queue_depths


async def test_only_operators_and_owners_cancel(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY}, respond=begun)
    operator, anna, bert = generate("op", operator=True), generate("anna"), generate("bert")
    client = await start_gateway(beast, keys=(operator.section, anna.section, bert.section))

    def bearer(key: Any) -> dict[str, str]:
        return {"Authorization": f"Bearer {key.text}"}

    for by, words in ((anna, "its owner"), (operator, "the operator of this gateway")):
        body = {"model": "a", "messages": HELLO}
        request = asyncio.create_task(client.post("/v1/chat/completions", body, **bearer(anna)))
        found = await running(client, "prefill", **bearer(anna))
        assert (found["key"], found["node"]) == ("anna", None)
        assert (await client.get(RUNNING, **bearer(bert)))[1] == {"requests": []}
        assert (await remove(client, f"{RUNNING}/{found['id']}", **bearer(bert)))[0] == 404
        assert (await remove(client, f"{RUNNING}/{found['id']}"))[0] == 401
        assert (await remove(client, f"{RUNNING}/{found['id']}", **bearer(by)))[0] == 200
        status, answer = await request
        assert status == 499
        assert words in answer["error"]["message"]
    assert (await remove(client, f"{RUNNING}/unknown", **bearer(operator)))[0] == 404
