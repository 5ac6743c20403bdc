"""Any dialect from a node that speaks only OpenAI chat, through real sockets and real SDKs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest
from aiohttp import web
from openai.types.responses import FunctionToolParam, Response

from cortex.ipc.fork_client import ForkServer

from ...waiting import until
from ..fake_neuron import GB
from ..fake_responses import USAGE, begin_stream, chunk, reset_connection, stream_chat

if TYPE_CHECKING:
    from ..fake_neuron import FakeNeuron, StartNeuron
    from ..started_gateway import Client, StartGateway


TOOL_DELTAS: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    {"reasoning_content": "The user "},
    {"reasoning_content": "wants weather."},
    {"content": "Looking."},
    {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
]
TOOL_MESSAGE = {
    "role": "assistant",
    "content": "Looking.",
    "reasoning_content": "The user wants weather.",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    ],
}
ANTHROPIC_TOOL: anthropic.types.ToolParam = {
    "name": "weather",
    "description": "d",
    "input_schema": {"type": "object", "properties": {}},
}


async def tool_response(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if body.get("stream"):
        return await stream_chat(request, body, TOOL_DELTAS, "tool_calls")
    choice = {"index": 0, "message": TOOL_MESSAGE, "finish_reason": "tool_calls"}
    return web.json_response(
        {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        | {"usage": USAGE}
    )


Foreign = tuple["FakeNeuron", "Client"]


@pytest.fixture
async def foreign(neurons: StartNeuron, start_gateway: StartGateway) -> Foreign:
    node = await neurons("vllm", sizes={"m": GB}, respond=tool_response)
    return node, await start_gateway(foreign=(node,))


@pytest.mark.parametrize("stream", [True, False])
async def test_serves_messages_from_a_chat_only_node(foreign: Foreign, stream: bool) -> None:
    node, client = foreign
    sdk = anthropic.AsyncAnthropic(base_url=client.url, api_key="x", max_retries=0)
    fields: dict[str, Any] = {
        "model": "m",
        "max_tokens": 100,
        "system": "Be brief.",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [ANTHROPIC_TOOL],
        "messages": [{"role": "user", "content": "Weather in Oslo?"}],
    }
    if stream:
        async with sdk.messages.stream(**fields) as events:
            message = await events.get_final_message()
    else:
        message = await sdk.messages.create(**fields)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    thinking, _, call = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "The user wants weather."
    assert call.type == "tool_use"
    assert call.input == {"city": "Oslo"}
    assert message.stop_reason == "tool_use"
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (3, 4)
    assert message.usage.output_tokens == 3
    sent = node.seen[-1]
    assert sent.path == "/v1/chat/completions"
    assert sent.body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert sent.body["tools"][0]["function"]["name"] == "weather"
    assert sent.body["reasoning_effort"] == "low"
    assert 'cortex_completion_tokens_total{key="anonymous",model="m"} 3.0' in client.metrics()


@pytest.mark.parametrize("stream", [True, False])
async def test_serves_responses_from_a_chat_only_node(foreign: Foreign, stream: bool) -> None:
    _, client = foreign
    sdk = openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="x", max_retries=0)
    tool: FunctionToolParam = {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object"},
        "strict": False,
    }
    if stream:
        numbers = []
        response: Response | None = None
        async for event in await sdk.responses.create(model="m", input="hi", tools=[tool], stream=True):
            numbers.append(event.sequence_number)
            response = getattr(event, "response", response)
        assert numbers == sorted(set(numbers))
    else:
        response = await sdk.responses.create(model="m", input="hi", tools=[tool])
    assert response is not None
    assert response.usage is not None
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    call = response.output[2]
    assert call.type == "function_call"
    assert call.arguments == '{"city": "Oslo"}'
    assert response.usage.output_tokens == 3


async def test_relays_chat_byte_for_byte(foreign: Foreign) -> None:
    node, client = foreign
    text = await client.stream("/v1/chat/completions", {"model": "m", "messages": [], "stream": True, "odd": 1})
    assert text.startswith(chunk("m", TOOL_DELTAS[0]))
    assert node.seen[-1].body == {"model": "m", "messages": [], "stream": True, "odd": 1}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "expected", "kind"),
    [(400, 400, "invalid_request_error"), (401, 502, "api_error"), (429, 429, "rate_limit_error")],
)
async def test_foreign_error_is_reported_in_the_clients_dialect(
    foreign: Foreign, status: int, expected: int, kind: str, stream: bool
) -> None:
    node, client = foreign

    async def reject(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "because", "type": "x", "code": None}}, status=status)

    node.respond = reject
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "stream": stream}
    got, response = await client.post("/v1/messages", body)
    assert (got, response["type"], response["error"]) == (expected, "error", {"type": kind, "message": "because"})


async def test_client_gets_a_stream_from_a_foreign_node_that_does_not_stream(foreign: Foreign) -> None:
    node, client = foreign

    async def whole(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await tool_response(node, request, body | {"stream": False})

    node.respond = whole
    sdk = anthropic.AsyncAnthropic(base_url=client.url, api_key="x", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Weather in Oslo?"}]
    async with sdk.messages.stream(model="m", max_tokens=100, messages=messages) as events:
        message = await events.get_final_message()
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.usage.output_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_garbage_from_a_foreign_node_is_an_error(foreign: Foreign, stream: bool) -> None:
    node, client = foreign

    async def garbage(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        kind = "text/event-stream" if stream else "application/json"
        return web.Response(body=b"data: {oops\n\n" if stream else b"<html>", headers={"content-type": kind})

    node.respond = garbage
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "stream": stream}
    status, response = await client.post("/v1/messages", body)
    assert (status, response["error"]["type"]) == (502, "api_error")


async def test_stream_of_a_dead_foreign_node_ends_with_an_error_event(foreign: Foreign) -> None:
    node, client = foreign

    async def half(node: FakeNeuron, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chunk("m", {"content": "half"}))
        await asyncio.sleep(0.05)
        await reset_connection(request)

    node.respond = half
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "stream": True}
    text = await client.stream("/v1/messages", body)
    assert b"half" in text
    assert text.rstrip().split(b"\n\n")[-1].startswith(b"event: error")


async def test_body_that_cannot_be_translated_is_400(foreign: Foreign) -> None:
    _, client = foreign
    status, response = await client.post("/v1/messages", {"model": "m", "max_tokens": 5, "messages": "no"})
    assert (status, response["error"]["type"]) == (400, "invalid_request_error")


async def test_foreign_node_gets_its_key_and_no_other(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "s3cret")
    node = await neurons("vllm", sizes={"m": GB}, respond=tool_response)
    client = await start_gateway(foreign=(node,), key_env="THE_KEY")
    await client.post("/v1/chat/completions", {"model": "m", "messages": []}, Authorization="Bearer mine")
    assert node.seen[-1].headers["authorization"] == "Bearer s3cret"


@pytest.mark.parametrize("strip", [True, False])
async def test_removes_or_keeps_the_billing_header_as_configured(
    neurons: StartNeuron, start_gateway: StartGateway, strip: bool
) -> None:
    node = await neurons("vllm", sizes={"m": GB}, respond=tool_response)
    client = await start_gateway(foreign=(node,), strip_billing_header=strip)
    line = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
    body = {"model": "m", "max_tokens": 5, "system": [line], "messages": [{"role": "user", "content": "x"}]}
    assert (await client.post("/v1/messages", body))[0] == 200
    kept = [] if strip else [{"role": "system", "content": line["text"]}]
    assert node.seen[-1].body["messages"] == [*kept, {"role": "user", "content": "x"}]


@pytest.mark.parametrize("stream", [True, False])
async def test_drops_unsupported_tools_and_names_them(foreign: Foreign, stream: bool) -> None:
    node, client = foreign
    sdk = anthropic.AsyncAnthropic(base_url=client.url, api_key="x", max_retries=0)
    tools = [ANTHROPIC_TOOL, {"type": "web_search_20250305", "name": "web_search"}]
    fields: dict[str, Any] = {
        "model": "m",
        "max_tokens": 9,
        "tools": tools,
        "messages": [{"role": "user", "content": "x"}],
    }
    response = await sdk.messages.with_raw_response.create(**fields, stream=stream)
    assert response.headers["x-cortex-dropped-tools"] == "web_search_20250305"
    assert [tool["function"]["name"] for tool in node.seen[-1].body["tools"]] == ["weather"]


async def test_large_request_is_translated_while_the_gateway_serves_others(foreign: Foreign) -> None:
    node, client = foreign
    large = "word " * 100_000
    turns: list[anthropic.types.MessageParam] = [{"role": "user", "content": large}]
    sdk = anthropic.AsyncAnthropic(base_url=client.url, api_key="x", max_retries=0)
    message = await sdk.messages.create(model="m", max_tokens=100, messages=turns, tools=[ANTHROPIC_TOOL])
    call = message.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Oslo"}
    assert node.seen[-1].body["messages"] == turns
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await sdk.messages.create(model="m", max_tokens=100, messages=turns, extra_body={"temperature": "hot"})


@pytest.mark.parametrize("num_words", [1_000_000, 100_000], ids=["while it is read", "while it is translated"])
async def test_disconnected_client_ends_the_work_on_its_large_request(
    foreign: Foreign, monkeypatch: pytest.MonkeyPatch, num_words: int
) -> None:
    node, client = foreign
    starting, started = asyncio.Event(), asyncio.Event()
    start = ForkServer.start

    async def slow_start(fork_server: ForkServer) -> Any:
        starting.set()
        await started.wait()
        return await start(fork_server)

    monkeypatch.setattr(ForkServer, "start", slow_start)
    turns = [{"role": "user", "content": "word " * num_words}]
    body = {"model": "m", "max_tokens": 100, "messages": turns}
    request = asyncio.create_task(client.post("/v1/messages", body))
    await starting.wait()
    request.cancel()
    await until(lambda: "cortex_client_disconnects_total{phase=" in client.metrics())
    started.set()
    status, _ = await client.post("/v1/messages", body | {"messages": [{"role": "user", "content": "short"}]})
    assert status == 200
    assert len(node.seen) == 1
