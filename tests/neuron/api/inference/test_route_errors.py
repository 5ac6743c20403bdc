"""Errors of the inference routes, in the dialect of the route and in every phase of a response."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from cortex.wire.errors import InvalidValue, LoadFailed, Overloaded, Recovering
from cortex.wire.node.protocol import ModelState
from cortex.wire.sse import Parser

from ....waiting import until
from ..conftest import Api, ChatBody
from .route_calls import ROUTES, body, frames, is_ollama, message_of, received_until


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_error_before_the_first_output_is_an_http_error_in_the_dialect(api: Api, path: str, stream: bool) -> None:
    api.node.submit_error = Overloaded("the queue is full", retry_after_s=7)
    status, reply, headers = await api.post(path, body(path, stream=stream))
    assert status == (529 if path == "/v1/messages" else 503)
    assert message_of(reply) == "the queue is full"
    if not is_ollama(path):
        assert reply["error"]["type"] == ("overloaded_error" if path == "/v1/messages" else "server_error")
    assert headers["retry-after"] == "7"


@pytest.mark.parametrize("path", ROUTES)
async def test_error_after_the_first_output_is_an_event_of_the_stream(
    api: Api, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    api.node.script.fails_after = 3
    api.node.script.error = Recovering("the device failed")
    last = (await frames(api, path, body(path)))[-1]
    await until(lambda: f"POST {path} 200 failed recovering: the device failed in " in caplog.text)
    assert "the device failed" in last.data
    assert last.event == {"/v1/messages": "error", "/v1/responses": "response.failed"}.get(path, "message")
    status, reply, _ = await api.post(path, body(path))
    assert status == (529 if path == "/v1/messages" else 503)
    assert message_of(reply) == "the device failed"


@pytest.mark.parametrize(
    ("path", "fields", "ours", "clients"),
    [
        ("/v1/chat/completions", {}, "messages", "messages"),
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "tools", "functions"),
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "tool_choice", "function_call"),
        ("/v1/responses", {}, "messages", "input"),
        ("/v1/responses/compact", {"input": "hi"}, "messages", "input"),
        ("/infill", {}, "suffix", "input_suffix"),
    ],
)
async def test_error_names_the_field_as_the_client_does(
    api: Api, path: str, fields: dict[str, Any], ours: str, clients: str
) -> None:
    api.node.submit_error = InvalidValue("it is wrong", param=ours)
    sent = {"model": "org/tiny", **fields} if path not in ROUTES else body(path, **fields)
    status, reply, _ = await api.post(path, sent)
    assert (status, reply["error"]["param"]) == (400, clients)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *(("/v1/chat/completions", "messages"), ("/v1/completions", "prompt"), ("/v1/responses", "input")),
        ("/infill", "input_prefix"),
    ],
)
@pytest.mark.parametrize("context_tokens", [2, 20], ids=["by its length", "by its tokens"])
async def test_prompt_that_is_too_long_is_said_to_be_in_the_field_of_its_dialect(
    api: Api, path: str, field: str, context_tokens: int
) -> None:
    api.node.context_tokens = context_tokens
    long = {"messages": [{"role": "user", "content": "x" * 100}]} if field == "messages" else {field: "x" * 100}
    status, reply, _ = await api.post(path, body(path, **long))
    assert (status, reply["error"]["code"], reply["error"]["param"]) == (400, "context_length_exceeded", field)


@pytest.mark.parametrize("path", ROUTES)
async def test_unexpected_exception_is_an_internal_error_without_details(api: Api, path: str) -> None:
    api.node.script.fails_after = 0
    status, reply, _ = await api.post(path, body(path))
    assert status == 500
    assert "a bug" not in json.dumps(reply)
    api.node.script.fails_after = 3
    last = (await frames(api, path, body(path)))[-1]
    assert "Internal error" in last.data
    assert "a bug" not in last.data


@pytest.mark.parametrize("keepalive_s", [0.05])
async def test_error_after_keepalives_is_an_event_of_the_stream(api: Api, chat_body: ChatBody) -> None:
    api.node.state = ModelState.COLD
    api.node.load_gate = asyncio.Event()
    api.node.load_error = LoadFailed("no such file")
    async with api.client.post(api.url + "/v1/chat/completions", json=chat_body(stream=True)) as response:
        assert response.status == 200
        await received_until(response, b": keepalive", 1)
        api.node.load_gate.set()
        received = Parser().feed(await response.read())
    assert json.loads(received[-1].data)["error"]["code"] == "load_failed"


async def test_rejects_a_prompt_over_the_context_with_both_counts(
    api: Api, openai_client: openai.AsyncOpenAI, anthropic_client: anthropic.AsyncAnthropic
) -> None:
    api.node.context_tokens = 20
    long: Any = [{"role": "user", "content": "x" * 100}]
    with pytest.raises(openai.BadRequestError) as rejected:
        await openai_client.chat.completions.create(model="org/tiny", messages=long)
    assert rejected.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 20 tokens" in rejected.value.message
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 19 maximum"):
        await anthropic_client.messages.create(model="org/tiny", max_tokens=5, messages=long)


@pytest.mark.parametrize("path", ROUTES)
async def test_rejects_invalid_requests_in_the_dialect(api: Api, path: str) -> None:
    for data, expected_status in (
        (b"{", 400),
        (b"{}", 400),
        (json.dumps(body(path, temperature=-1)).encode(), 400),
        (json.dumps(body(path, model="org/tny")).encode(), 404),
        (b"x" * 1_100_000, 413),
    ):
        status, reply, _ = await api.post(path, data)
        assert status == expected_status
        assert message_of(reply)
        assert ("code" in (reply if is_ollama(path) else reply["error"])) is (path != "/v1/messages")
    assert not api.node.submitted


async def test_serves_a_large_prompt_and_rejects_an_invalid_large_body(api: Api) -> None:
    api.node.context_tokens = 10_000_000
    long = "x" * 500_000
    assert (await api.post("/v1/completions", {"model": "org/tiny", "prompt": long, "max_tokens": 3}))[0] == 200
    status, reply, _ = await api.post("/v1/completions", {"model": "org/tiny", "prompt": long, "temperature": "hot"})
    assert (status, reply["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize("path", ROUTES)
async def test_rejects_a_body_that_is_declared_as_something_else_than_json(api: Api, path: str) -> None:
    declared = {"content-type": "text/plain"}
    if is_ollama(path):  # its clients declare nothing, and only web pages send their origin
        assert (await api.post(path, body(path), **declared))[0] == 200
        assert (await api.post(path, body(path), origin="http://evil.example", **declared))[0] in (403, 415)
        return
    status, reply, _ = await api.post(path, body(path), **declared)
    assert (status, reply["error"]["type"]) == (415, "invalid_request_error")
    assert not api.node.submitted


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_error_inside_a_stream_hides_details_where_the_gateway_says_so(
    api: Api, chat_body: Callable[..., dict[str, Any]], path: str
) -> None:
    api.node.script.fails_after = 2
    api.node.script.error = LoadFailed("no weights in /models/secret")
    text = {"/v1/responses": {"input": "hi"}, "/v1/completions": {"prompt": "hi"}}.get(path, {})
    body = chat_body(stream=True, max_tokens=20, **text)
    texts = []
    for headers in ({}, {"x-cortex-error-details": "none"}):
        async with api.client.post(api.url + path, json=body, headers=headers) as response:
            texts.append(await response.text())
    assert ["/models/secret" in text for text in texts] == [True, False]
    assert "could not be loaded" in texts[1]
