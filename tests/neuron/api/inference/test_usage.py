"""The usage of requests whose clients disconnected."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from cortex.neuron.api.calls import ApiCall
from cortex.neuron.api.inference.usage import UsageRecords
from cortex.wire.errors import RouteNotFound

from ....waiting import NEVER_S, until


async def exposition(api: Any) -> str:
    async with api.client.get(api.url + "/metrics") as response:
        return str(await response.text())


@pytest.mark.parametrize("stream", [False, True])
async def test_reports_usage_up_to_the_disconnect(api: Any, chat_body: Any, stream: bool) -> None:
    api.node.script.pause_s = NEVER_S
    api.node.script.cached = 2

    async def send() -> None:
        headers = {"x-request-id": "same", "x-cortex-attempt-id": "a/b:1"}
        async with api.client.post(
            api.url + "/v1/chat/completions", json=chat_body(stream=stream), headers=headers
        ) as response:
            await response.read()

    request = asyncio.create_task(send())
    await until(lambda: api.node.num_taken_outputs)  # of the first token
    early = asyncio.create_task(api.client.get(api.url + "/requests/a/b:1/usage"))  # before the disconnect
    await api.get("/health")  # a whole request that begins after it
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    async with await early as response:
        usage = await response.json()
    num_prompt_tokens = len(api.node.submitted[0].prompt)
    assert {
        name: num_tokens for name, num_tokens in usage.items() if "prediction" not in name and "draft" not in name
    } == {
        "prompt_tokens": num_prompt_tokens,
        "cached_tokens": 2,
        "completion_tokens": 1,
        "reasoning_tokens": 0,
        "queued_ms": 0,
        "energy_mj": 0,
    }
    text = await exposition(api)
    assert f'neuron_prompt_tokens_total{{model="org/tiny"}} {num_prompt_tokens}.0' in text
    assert 'neuron_completion_tokens_total{model="org/tiny"} 1.0' in text


async def test_rejects_a_request_without_a_record() -> None:
    exchange: Any = SimpleNamespace(request=None)
    with pytest.raises(RouteNotFound, match="attempt unknown"):
        await UsageRecords(wait_s=0.01).get(ApiCall(exchange, {"id": "unknown"}))
