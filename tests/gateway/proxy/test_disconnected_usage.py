"""Whoever leaves in the middle of an answer pays for what was done until then, and for no more."""

import asyncio
import contextlib

import pytest
from fake_neuron import GB, begin_stream, chunk, until

from cortex.gateway.ledger.keys import generate
from cortex.wire.events import Usage
from cortex.wire.node import ModelState

COST = Usage(prompt_tokens=31, cached_tokens=16, completion_tokens=9, reasoning_tokens=2)


async def endless(node, request, body):
    response = await begin_stream(request)
    while True:
        await response.write(chunk(body["model"], {"content": "x"}))
        await asyncio.sleep(0.01)


async def silent(node, request, body):
    await asyncio.sleep(60)


@pytest.fixture
async def keyed(neurons, start_gateway):
    async def start(answer, **costs):
        key = generate("alice", balance_tokens=1000)
        beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY}, answer=answer, costs=costs)
        client = await start_gateway(beast, keys=(key.section,))
        account = client.gateway._metering._ledger.account(key.section)

        async def leave(stream: bool) -> None:
            headers = {"authorization": f"Bearer {key.text}", "x-request-id": "r1"}
            body = {"model": "a", "messages": [], "max_tokens": 100, "stream": stream}
            async with client.session.post(client.url + "/v1/chat/completions", json=body, headers=headers) as response:
                await response.content.readany()

        return client, beast, account, leave

    return start


@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_node_says_was_used_is_settled(keyed, stream):
    client, beast, account, leave = await keyed(endless if stream else silent, r1=COST)
    asked = asyncio.create_task(leave(stream))
    await until(lambda: beast.seen)
    if stream:
        await asked
    else:
        assert account.reserved_tokens > 0
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked
    await until(lambda: account.reserved_tokens == 0)
    assert account.total_spent() == 40
    text = client.metrics()
    assert 'cortex_prompt_tokens_total{key="alice",model="a"} 31.0' in text
    assert 'cortex_cached_prompt_tokens_total{key="alice",model="a"} 16.0' in text
    assert 'cortex_completion_tokens_total{key="alice",model="a"} 9.0' in text


async def test_where_the_node_does_not_know_a_stream_is_billed_by_its_size(keyed):
    _, _, account, leave = await keyed(endless)
    await leave(stream=True)
    await until(lambda: account.reserved_tokens == 0)
    assert account.total_spent() > 0


async def test_a_node_that_died_is_billed_by_what_it_had_said(keyed):
    client, beast, account, leave = await keyed(endless, r1=COST)
    asked = asyncio.create_task(leave(stream=True))
    await until(lambda: beast.seen)
    await beast.stop()
    with contextlib.suppress(Exception):
        await asked
    await until(lambda: account.reserved_tokens == 0)
    assert client.gateway.dispatcher.in_flight == {}


async def test_shutting_down_settles_what_is_still_open(keyed):
    client, beast, account, leave = await keyed(endless, r1=COST)
    asked = asyncio.create_task(leave(stream=True))
    await until(lambda: beast.seen)
    await client.gateway.server.close()
    await client.gateway._services.disconnected_usage.close()
    await asked
    assert (account.reserved_tokens, account.total_spent()) == (0, 40)
