"""The Responses API over WebSockets, through a real gateway, with the SDK and with raw events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType, WSServerHandshakeError, web
from openai import AsyncOpenAI

from cortex.gateway.config import ResponsesSection
from cortex.gateway.ledger.keys import generate
from cortex.gateway.responses import sockets
from cortex.http.limits import ClientShares
from cortex.http.tls import client_context
from cortex.wire import sse
from cortex.wire.dialects.openai_responses import socket_events

from ...waiting import WAIT_S, at_rest, until
from ..fake_neuron import FakeNeuron
from ..fake_responses import begin_stream
from ..started_gateway import Client
from .responding_node import CALL, READY

if TYPE_CHECKING:
    from ...certificates import Authority
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway

ALICE = generate("alice", models=("a",))
BOB = generate("bob", models=("other",))
POOR = generate("poor", window_tokens=1)
KEYS = (ALICE.section, BOB.section, POOR.section)
LAST = ("response.completed", "response.failed", "response.incomplete", "error", "response.steer.failed")


@asynccontextmanager
async def connected(client: Client, key: str = "", **headers: str) -> AsyncIterator[ClientWebSocketResponse]:
    sent = {"authorization": f"Bearer {key}"} if key else {}
    async with client.session.ws_connect(client.url + "/v1/responses", headers=sent | headers) as socket:
        yield socket


async def send(socket: ClientWebSocketResponse, **event: Any) -> None:
    fields = {"type": "response.create", "model": "a", "input": "hello"} | event
    await socket.send_str(msgspec.json.encode(fields).decode())


async def receive(socket: ClientWebSocketResponse) -> dict[str, Any]:
    message = await socket.receive(timeout=WAIT_S)
    assert message.type is WSMsgType.TEXT, message
    event: dict[str, Any] = msgspec.json.decode(message.data)
    return event


async def last(socket: ClientWebSocketResponse) -> dict[str, Any]:
    """The event that ends the next response."""
    while (event := await receive(socket))["type"] not in LAST:
        pass
    return event


def text_of(event: dict[str, Any]) -> str:
    content: str = event["response"]["output"][-1]["content"][0]["text"]
    return content


async def test_the_sdk_works_unmodified(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node, keys=KEYS)
    async with (
        AsyncOpenAI(api_key=ALICE.text, base_url=f"{client.url}/v1") as openai,
        openai.responses.connect() as connection,
    ):
        deltas: list[str] = []
        ids: list[str] = []
        for previous in (None, 0):
            more = {} if previous is None else {"previous_response_id": ids[0]}
            await connection.response.create(model="a", input="hello", **more)
            async for event in connection:
                if event.type == "response.output_text.delta":
                    deltas.append(event.delta)
                if event.type == "response.completed":
                    ids.append(event.response.id)
                    assert event.response.usage is not None
                    break
        assert deltas == ["1 ", "messages", "3 ", "messages"]
    _, stored = await client.get(f"/v1/responses/{ids[1]}", authorization=f"Bearer {ALICE.text}")
    assert stored["previous_response_id"] == ids[0]


async def test_the_sdk_works_over_tls(node: FakeNeuron, start_gateway: StartGateway, authority: Authority) -> None:
    certificate = authority.issue("gateway")
    client = await start_gateway(node, keys=KEYS, tls_cert=certificate.cert, tls_key=certificate.key)
    trust: Any = {"ssl": client_context(authority.own.cert)}
    async with (
        AsyncOpenAI(api_key=ALICE.text, base_url=f"https://localhost:{client.port}/v1") as openai,
        openai.responses.connect(websocket_connection_options=trust) as connection,
    ):
        await connection.response.create(model="a", input="hello")
        types = [(await connection.recv()).type]
        while types[-1] not in LAST:
            types.append((await connection.recv()).type)
    assert types[-1] == "response.completed"


@pytest.mark.parametrize("stores", [True, False])
async def test_a_connection_remembers_what_is_not_stored(
    node: FakeNeuron, start_gateway: StartGateway, stores: bool
) -> None:
    client = await start_gateway(node, responses=ResponsesSection(store=stores))
    async with connected(client) as socket:
        await send(socket, store=False, tools=[CALL])
        first = (await last(socket))["response"]
        result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "sunny"}
        await send(socket, store=False, tools=[CALL], input=[result], previous_response_id=first["id"])
        second = await last(socket)
        assert text_of(second) == "3 messages"
        await send(socket, store=False, previous_response_id=second["response"]["id"])
        assert text_of(await last(socket)) == "5 messages"
    async with connected(client) as socket:
        await send(socket, previous_response_id=first["id"])
        error = await last(socket)
        assert (error["type"], error["status"]) == ("error", 400), error


async def test_turns_of_a_conversation_follow_each_other_at_once(node: FakeNeuron, start_gateway: StartGateway) -> None:
    """The end of a response is held back until the conversation has it."""
    client = await start_gateway(node)
    _, conversation = await client.post("/v1/conversations", {})
    async with connected(client) as socket:
        for expected in ("1 messages", "3 messages", "5 messages"):
            await send(socket, conversation=conversation["id"])
            assert text_of(await last(socket)) == expected


async def test_a_prepared_request_has_no_output_and_is_continued(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    async with connected(client) as socket:
        await send(socket, generate=False, input="remember me", stream_id="main")
        created, completed = await receive(socket), await receive(socket)
        assert (created["type"], completed["type"]) == ("response.created", "response.completed")
        assert completed["stream_id"] == "main"
        response = completed["response"]
        assert (response["output"], response["usage"]["input_tokens"]) == ([], 12)
        await send(socket, previous_response_id=response["id"])
        assert text_of(await last(socket)) == "2 messages"
    said = [item["content"] for item in node.seen[-1].body["input"]]
    assert said[0][0]["text"] == "remember me"


async def test_a_prepared_request_whose_count_is_cut_off_is_an_error_and_its_lane_goes_on(
    node: FakeNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object, **__: object) -> dict[str, Any]:
        raise msgspec.DecodeError("Input data was truncated")

    client = await start_gateway(node)
    async with connected(client) as socket:
        with monkeypatch.context() as patched:
            patched.setattr(socket_events, "prepared", cut_off)
            await send(socket, generate=False, stream_id="main")
            error = await receive(socket)
        assert (error["type"], error["status"], error["stream_id"]) == ("error", 502, "main")
        await send(socket, stream_id="main")
        assert text_of(await last(socket)) == "1 messages"


async def test_lanes_run_at_the_same_time_and_each_in_order(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    node.stream_gate.clear()
    async with connected(client) as socket:
        for lane in ("x", "y", "x"):
            await send(socket, stream_id=lane, input=[{"role": "user", "content": lane}] * (1 + len(node.seen)))
        await until(lambda: len(node.seen) == 2)
        begun = [await receive(socket) for _ in range(4)]
        assert {event["stream_id"] for event in begun} == {"x", "y"}
        assert len(node.seen) == 2, "the second request of a lane waits for the first"
        node.stream_gate.set()
        ended = [(await last(socket))["stream_id"] for _ in range(3)]
        assert sorted(ended) == ["x", "x", "y"]
        assert len(node.seen) == 3


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("no json", None),
        ("[1]", None),
        ('{"type":"response.cancel"}', "type"),
        ('{"type":"\\ud800"}', None),
        ('{"type":"response.create","stream_id":"a b"}', "stream_id"),
        ('{"type":"response.create","stream_id":"' + "x" * 2000 + '"}', "stream_id"),
        ('{"type":"response.create","stream_id":["' + "x" * 2000 + '"]}', "stream_id"),
        ('{"type":"response.create","generate":1}', "generate"),
        ('{"type":"response.create","background":true,"model":"a","input":"x"}', "background"),
        ('{"type":"response.create","model":"no such model","input":"x"}', "model"),
        ('{"type":"response.create","model":"a","input":"x","previous_response_id":"resp_1"}', "previous_response_id"),
    ],
)
async def test_a_wrong_event_is_an_error_and_the_connection_serves_on(
    node: FakeNeuron, start_gateway: StartGateway, text: str, param: str | None
) -> None:
    client = await start_gateway(node)
    async with connected(client) as socket:
        await socket.send_str(text)
        error = await receive(socket)
        assert (error["type"], 400 <= error["status"] < 500) == ("error", True), error
        assert param is None or error["error"]["param"] == param
        await send(socket)
        assert (await last(socket))["type"] == "response.completed"
    assert client.gateway.server.buffered.num_bytes == 0


async def test_steering_is_reported_as_not_supported(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    async with connected(client) as socket:
        await send(socket, type="response.steer", previous_response_id="resp_1", input="stop")
        failed = await receive(socket)
        assert failed["error"]["code"] == "steering_not_supported"
        assert failed["steer"] == {"previous_response_id": "resp_1", "input": "stop"}


async def test_each_response_is_admitted_like_a_posted_one(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node, keys=KEYS)
    async with connected(client, BOB.text) as socket:
        await send(socket)
        assert (await last(socket))["status"] in (403, 404)
    async with connected(client, POOR.text) as socket:
        await send(socket, input="far more than one token")
        assert (await last(socket))["error"]["code"] == "insufficient_quota"
    async with connected(client, ALICE.text) as socket:
        await send(socket)
        assert (await last(socket))["type"] == "response.completed"
        client.gateway.config = msgspec.structs.replace(client.gateway.config, keys=KEYS[1:])
        await client.gateway.reconfigure(client.gateway.config, client.gateway.dispatcher.catalogue)
        await send(socket)
        assert (await last(socket))["status"] == 401, "a revoked key gets nothing more on an open connection"
    assert len(node.seen) == 1


@pytest.mark.parametrize(
    ("key", "headers", "status"),
    [
        ("", {}, 401),
        ("sk-nobody", {}, 401),
        (ALICE.text, {"origin": "https://evil.example"}, 403),
        (ALICE.text, {"origin": "null"}, 403),
        (ALICE.text, {"sec-fetch-site": "cross-site"}, 403),
    ],
)
async def test_connections_need_a_key_and_no_page_of_another_site(
    node: FakeNeuron, start_gateway: StartGateway, key: str, headers: dict[str, str], status: int
) -> None:
    client = await start_gateway(node, keys=KEYS)
    with pytest.raises(WSServerHandshakeError) as caught:
        async with connected(client, key, **headers):
            pass
    assert caught.value.status == status


async def test_responses_of_a_client_that_disconnects_are_cancelled(
    node: FakeNeuron, start_gateway: StartGateway
) -> None:
    client = await start_gateway(node)
    node.stream_gate.clear()
    async with connected(client) as socket:
        for lane in ("x", "x", "y"):
            await send(socket, stream_id=lane)
        await until(lambda: len(node.seen) == 2 and client.gateway.dispatcher.in_flight)
    await until(lambda: not any(client.gateway.dispatcher.in_flight.values()))
    await until(lambda: client.gateway.server.buffered.num_bytes == 0)
    assert len(node.seen) == 2, "what waited in a lane was dropped"


async def test_a_client_that_does_not_read_pauses_its_node(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    num_events, sent = 600, 0
    event = {"type": "response.output_text.delta", "delta": "x" * 65_536}

    async def respond(_: FakeNeuron, http: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        nonlocal sent
        response = await begin_stream(http)
        for _number in range(num_events):
            await response.write(sse.frame(msgspec.json.encode(event), event["type"]))
            sent += 1
        done = {"type": "response.completed", "response": {"id": "resp_1", "status": "completed", "output": []}}
        await response.write(sse.frame(msgspec.json.encode(done), "response.completed"))
        await response.write_eof()
        return response

    client = await start_gateway(await neurons("beast", respond=respond, **READY))
    async with connected(client) as socket:
        await send(socket)
        await until(lambda: sent)
        assert await at_rest(lambda: sent, for_s=0.5) < num_events, "all of it lies in memory somewhere"
        assert (await last(socket))["type"] == "response.completed"
        assert sent == num_events


async def test_events_beyond_the_limit_are_rejected(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    node.stream_gate.clear()
    async with connected(client) as socket:
        for _ in range(sockets.MAX_EVENTS + 1):
            await send(socket)
        assert (await last(socket))["error"]["code"] == "rate_limit_exceeded"
        node.stream_gate.set()
        for _ in range(sockets.MAX_EVENTS):
            assert (await last(socket))["type"] == "response.completed"


def test_a_connection_forgets_old_responses() -> None:
    most = sockets.MAX_REMEMBERED_BYTES
    remembered = sockets.RememberedResponses(ClientShares(2 * most, None), "key")
    for number in range(sockets.MAX_REMEMBERED + 1):
        remembered.add(f"resp_{number}", remembered.chain(f"resp_{number - 1}") or (), b"[]", b"{}")
    assert remembered.chain("resp_0") is None
    assert len(remembered.chain(f"resp_{sockets.MAX_REMEMBERED}") or ()) == sockets.MAX_REMEMBERED + 1
    remembered.add("large", (), msgspec.Raw(b'"' + b"x" * most + b'"'), b"{}")
    assert remembered.chain("large") is None
    remembered.add("fits", (), b"[]", b"{}")
    assert remembered.chain("fits") is not None


def test_connections_of_a_client_remember_no_more_than_its_share() -> None:
    shares, body = ClientShares(100, 60), b"x" * 38
    first, second, other = (sockets.RememberedResponses(shares, client) for client in ("anna", "anna", "bert"))
    for remembered in (first, second, other):
        remembered.add("resp_1", (), b"[]", body)
    assert [each.chain("resp_1") is not None for each in (first, second, other)] == [True, False, True]
    first.clear()
    second.add("resp_2", (), b"[]", body)
    assert second.chain("resp_2") is not None
    for each in (second, other):
        each.clear()
    assert shares.has_room("anna", 60)


async def test_a_gateway_that_ends_lets_running_responses_end(node: FakeNeuron, start_gateway: StartGateway) -> None:
    client = await start_gateway(node)
    node.stream_gate.clear()
    async with connected(client) as idle, connected(client) as socket:
        await send(socket)
        await until(lambda: len(node.seen) == 1)
        closing = asyncio.create_task(client.gateway.close(grace_s=WAIT_S))
        assert (await idle.receive(timeout=WAIT_S)).type is WSMsgType.CLOSE
        node.stream_gate.set()
        assert (await last(socket))["type"] == "response.completed"
        assert (await socket.receive(timeout=WAIT_S)).type is WSMsgType.CLOSE
        await closing
