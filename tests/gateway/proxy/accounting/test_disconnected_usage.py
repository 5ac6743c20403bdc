"""A client that disconnects in the middle of a response is charged for what was done until then, and for no more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import ClientResponse, web

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.wire.events import Usage
from cortex.wire.node.headers import TOKEN_LIMIT
from cortex.wire.node.protocol import ModelState

from ....waiting import until
from ...fake_neuron import GB
from ...fake_responses import begin_stream, chunk, hang

if TYPE_CHECKING:
    from ...fake_neuron import FakeNeuron, Respond, StartNeuron
    from ...started_gateway import Client, StartGateway


USED = Usage(prompt_tokens=31, cached_tokens=16, completion_tokens=9, reasoning_tokens=2)
BALANCE = 1000


async def endless(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    while True:
        await response.write(chunk(body["model"], {"content": "x"}))
        await asyncio.sleep(0.01)


async def silent(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await hang()


async def rejecting(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no"}}, status=400)


class Caller:
    """A client with a key, whose requests reserve 100 tokens and their prompt."""

    def __init__(self, client: Client, node: FakeNeuron, key: NewKey) -> None:
        self.client = client
        self.node = node
        self.headers = {"authorization": f"Bearer {key.text}", "x-request-id": "r1"}

    def post(self, **fields: Any) -> AbstractAsyncContextManager[ClientResponse]:
        body = {"model": "a", "messages": [], "max_tokens": 100, **fields}
        return self.client.session.post(self.client.url + "/v1/chat/completions", json=body, headers=self.headers)

    async def disconnect_early(self, *, stream: bool) -> None:
        async with self.post(stream=stream) as response:
            await response.content.readany()

    async def has_reservation(self) -> bool:
        """Whether a request for the whole balance gets less than was not spent."""
        self.node.respond = rejecting
        async with self.post(max_tokens=BALANCE) as response:
            assert response.status == 400
        return int(self.node.seen[-1].headers[TOKEN_LIMIT]) < BALANCE - 100

    def counted(self, kind: str) -> float:
        prefix = f'cortex_{kind}_tokens_total{{key="alice",model="a"}} '
        lines = [line for line in self.client.metrics().splitlines() if line.startswith(prefix)]
        return float(lines[0].removeprefix(prefix)) if lines else 0.0


StartCaller = Callable[..., Awaitable[Caller]]


@pytest.fixture
async def start_caller(neurons: StartNeuron, start_gateway: StartGateway) -> StartCaller:
    async def start(response: Respond, **costs: Any) -> Caller:
        key = generate("alice", balance_tokens=BALANCE)
        node = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY}, respond=response, costs=costs)
        return Caller(await start_gateway(node, keys=(key.section,)), node, key)

    return start


@pytest.mark.parametrize("stream", [True, False])
async def test_settles_with_the_usage_that_the_node_reports(start_caller: StartCaller, stream: bool) -> None:
    caller = await start_caller(endless if stream else silent, r1=USED)
    request = asyncio.create_task(caller.disconnect_early(stream=stream))
    await until(lambda: caller.node.seen)
    if stream:
        await request
    else:
        assert await caller.has_reservation()
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
    await until(lambda: caller.counted("completion"))
    assert (caller.counted("prompt"), caller.counted("cached_prompt"), caller.counted("completion")) == (31, 16, 9)
    assert not await caller.has_reservation()


async def test_estimates_usage_by_size_when_the_node_does_not_know_it(start_caller: StartCaller) -> None:
    caller = await start_caller(endless)
    await caller.disconnect_early(stream=True)
    await until(lambda: caller.counted("prompt"))
    assert not await caller.has_reservation()


@pytest.mark.parametrize("is_foreign", [True, False])
async def test_speech_is_not_free_for_who_disconnects_before_its_first_byte(
    neurons: StartNeuron, start_gateway: StartGateway, is_foreign: bool
) -> None:
    key = generate("alice", balance_tokens=BALANCE)
    costs = {"r1": USED}  # no node counts tokens of speech: it must not be waited for
    node = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY}, respond=silent, costs=costs)
    catalogue = Catalogue(models=(ModelSpec(id="a", tokens_per_request=70, harness="speech"),))
    own, foreign = ((), (node,)) if is_foreign else ((node,), ())
    client = await start_gateway(*own, foreign=foreign, keys=(key.section,), catalogue=catalogue)
    caller = Caller(client, node, key)
    url = client.url + "/v1/audio/speech"
    request = asyncio.create_task(client.session.post(url, json={"model": "a"}, headers=caller.headers))
    await until(lambda: node.seen)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    await until(lambda: "cortex_client_disconnects_total{phase=" in client.metrics())
    assert caller.counted("prompt") == 70


async def test_estimates_usage_by_size_when_the_node_died(start_caller: StartCaller) -> None:
    caller = await start_caller(endless, r1=USED)
    async with caller.post(stream=True) as response:
        await response.content.readany()
        await caller.node.stop()
        await response.read()
    await until(lambda: caller.counted("prompt"))
    assert 0 < caller.counted("prompt") < USED.prompt_tokens
    assert caller.client.gateway.dispatcher.in_flight == {}


async def test_shutdown_waits_for_the_usage_of_disconnected_clients(start_caller: StartCaller) -> None:
    caller = await start_caller(endless, r1=USED)
    request = asyncio.create_task(caller.disconnect_early(stream=True))
    await until(lambda: caller.node.seen)
    await caller.client.gateway.close()
    with contextlib.suppress(Exception):
        await request
    assert (caller.counted("prompt"), caller.counted("completion")) == (31, 9)


async def test_requests_with_one_id_of_the_client_are_settled_separately(start_caller: StartCaller) -> None:
    caller = await start_caller(endless, r1=USED)
    await caller.disconnect_early(stream=True)
    await until(lambda: caller.counted("completion") == USED.completion_tokens)
    await caller.disconnect_early(stream=True)
    await until(lambda: caller.counted("completion") == 2 * USED.completion_tokens)
    attempts = [seen.headers["x-cortex-attempt-id"] for seen in caller.node.seen]
    assert len(set(attempts)) == len(attempts) == 2
    assert {seen.headers["x-request-id"] for seen in caller.node.seen} == {"r1"}
