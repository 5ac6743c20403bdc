"""Clients that wait, disconnect, or meet a node that shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import aiohttp
import pytest

from cortex.neuron.engine.request import EngineRequest
from cortex.wire.node.kv_blocks import SOURCE, source_header
from cortex.wire.node.neighbours import Neighbour
from cortex.wire.node.protocol import ModelState

from ....waiting import NEVER_S, until
from ...generations import PlayedGeneration
from ..conftest import Api, ChatBody
from .route_calls import ROUTES, ask, body, frames, is_ollama, received_until


@pytest.mark.parametrize("keepalive_s", [0.05])
@pytest.mark.parametrize("path", ROUTES)
async def test_sends_keepalives_while_there_is_no_output(api: Api, path: str, keepalive_s: float) -> None:
    keepalive = b"event: ping" if path == "/v1/messages" else b" " if is_ollama(path) else b": keepalive"
    api.node.script.first_gate = asyncio.Event()
    began_s = time.monotonic()
    async with api.client.post(api.url + path, json=body(path, stream=True)) as response:
        data = await received_until(response, keepalive, 3)
        api.node.script.first_gate.set()
        data += await response.read()
    assert data.count(keepalive) <= (time.monotonic() - began_s) / keepalive_s, "not more often than configured"
    assert b'"H"' in data


@pytest.mark.parametrize("keepalive_s", [0.05])
@pytest.mark.parametrize("stream", [False, True])
async def test_loads_a_cold_model_for_the_first_request(api: Api, chat_body: ChatBody, stream: bool) -> None:
    api.node.state = ModelState.COLD
    api.node.load_gate = asyncio.Event()
    request = api.client.post(api.url + "/v1/chat/completions", json=chat_body(stream=stream))
    if stream:
        async with request as response:
            await received_until(response, b": keepalive", 2)
            api.node.load_gate.set()
            data = await response.read()
    else:
        sent = asyncio.ensure_future(request)
        await until(lambda: api.node.loads)
        api.node.load_gate.set()
        async with await sent as response:
            data = await response.read()
    assert response.status == 200
    assert b"H" in data
    assert [load.model_id for load in api.node.loads] == ["org/tiny"]


async def disconnect(asking: asyncio.Task[None]) -> None:
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode", "load"])
async def test_disconnected_client_frees_everything_in_every_phase(
    api: Api, path: str, stream: bool, phase: str
) -> None:
    if phase == "prefill":
        api.node.script.first_s = NEVER_S
    elif phase == "decode":
        api.node.script.pause_s = NEVER_S
    else:
        api.node.state = ModelState.COLD
        api.node.load_s = NEVER_S
    asking = asyncio.create_task(ask(api, path, body(path, stream=stream)))
    reached = {
        "load": lambda: api.node.loads,
        "prefill": lambda: api.node.generations,
        "decode": lambda: api.node.num_taken_outputs,
    }
    await until(reached[phase])
    await disconnect(asking)
    if phase == "load":
        await until(lambda: api.node.cancelled_loads == 1)
        assert not api.node.submitted
    else:
        await until(lambda: all(g.cancelled.is_set() for g in api.node.generations))
    await until(lambda: api.drain_gate.num_requests == 0)
    async with api.client.get(api.url + "/metrics") as response:
        exposition = await response.text()
    assert f'neuron_client_disconnects_total{{model="org/tiny",phase="{phase}"}} 1.0' in exposition


@pytest.mark.parametrize("disconnects", [False, True])
async def test_kv_arrives_from_before_the_engine_gets_the_request_until_the_first_token(
    api: Api, chat_body: ChatBody, monkeypatch: pytest.MonkeyPatch, *, disconnects: bool
) -> None:
    node, is_expected = api.node, list[bool]()
    begin = node.generate

    def generate(model_id: str, request: EngineRequest) -> PlayedGeneration:
        is_expected.append(request.transfer in node.transfers)
        return begin(model_id, request)

    monkeypatch.setattr(node, "generate", generate)
    node.script.first_gate, node.script.pause_s = asyncio.Event(), NEVER_S
    source = source_header(Neighbour(name="a", url="http://a:1", ticket="t")).decode()
    chat = api.post("/v1/chat/completions", chat_body(n=2), **{SOURCE: source})
    asking = asyncio.create_task(chat)
    await until(lambda: len(node.generations) == 2)
    assert (is_expected, len(node.transfers)) == ([True, True], 1)
    if not disconnects:
        node.script.first_gate.set()
        await until(lambda: not node.transfers)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await until(lambda: not node.transfers)


async def test_cancels_every_choice_when_the_client_disconnects(api: Api, chat_body: ChatBody) -> None:
    api.node.script.pause_s = NEVER_S
    asking = asyncio.create_task(ask(api, "/v1/chat/completions", chat_body(n=4, stream=True)))
    await until(lambda: len(api.node.generations) == 4)
    await disconnect(asking)
    await until(lambda: all(g.cancelled.is_set() for g in api.node.generations))


async def test_reset_connection_cancels_the_request(api: Api, chat_body: ChatBody) -> None:
    api.node.script.pause_s = 0.01
    api.node.script.text = "x" * 1000
    async with aiohttp.ClientSession() as session:
        response = await session.post(api.url + "/v1/chat/completions", json=chat_body(stream=True))
        await response.content.readany()
        assert response.connection is not None
        transport: Any = response.connection.transport
        transport.abort()
        await until(lambda: api.node.generations[0].cancelled.is_set() and api.drain_gate.num_requests == 0)


async def test_closed_gate_rejects_new_and_waiting_requests_and_lets_running_ones_end(
    api: Api, chat_body: ChatBody
) -> None:
    api.node.script.pause_s = 0.02
    running = asyncio.create_task(api.post("/v1/chat/completions", chat_body()))
    await until(lambda: api.node.generations)
    api.node.state = ModelState.COLD
    api.node.load_gate = asyncio.Event()
    waiting = asyncio.create_task(api.post("/v1/messages", body("/v1/messages")))
    await until(lambda: api.node.loads)
    api.drain_gate.close()
    status, reply, _ = await waiting
    assert status == 529
    assert reply["error"]["type"] == "overloaded_error"
    status, reply, headers = await api.post("/v1/chat/completions", chat_body())
    assert (status, reply["error"]["code"]) == (503, "shutting_down")
    assert headers["retry-after"]
    assert (await api.get("/health"))[1]["status"] == "draining"
    assert await api.drain_gate.drained(30)
    status, reply, _ = await running
    assert reply["choices"][0]["message"]["content"] == "Hello there!"


async def test_concurrent_streams_leave_nothing_behind(api: Api, chat_body: ChatBody) -> None:
    api.node.script.pause_s = 0.01

    async def one(number: int) -> None:
        if number % 3:
            assert (await frames(api, "/v1/chat/completions", chat_body()))[-1].data == "[DONE]"
        else:
            asking = asyncio.create_task(ask(api, "/v1/chat/completions", chat_body(stream=True)))
            await asyncio.sleep(0.05)  # in any phase
            await disconnect(asking)

    await asyncio.gather(*(one(number) for number in range(60)))
    await until(lambda: api.drain_gate.num_requests == 0)
    await until(lambda: all(g.cancelled.is_set() for g in api.node.generations))
