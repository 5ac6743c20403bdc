from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from cortex.wire import failure_report, usage_report
from cortex.wire.dialects import ROUTES
from cortex.wire.errors import LoadFailed, Overloaded, Recovering
from cortex.wire.node import ModelState, SamplingDefaults
from cortex.wire.sse import Frame, Parser

from ..conftest import Api

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100},
}


def body(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "org/tiny", **BODIES[path], **fields}


def text_of(reply: dict[str, Any]) -> str:
    """The text of a whole response in any dialect."""
    if "choices" in reply:
        choice = reply["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    parts = reply["content"] if "content" in reply else reply["output"][0]["content"]
    return str(parts[0]["text"])


async def frames(api: Any, path: str, request: dict[str, Any]) -> list[Frame]:
    async with api.client.post(api.url + path, json={**request, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no"
        return Parser().feed(await response.read())


async def test_openai_sdk_uses_chat_completions(api: Any, openai_client: openai.AsyncOpenAI) -> None:
    api.node.script.cached = 3
    reply = await openai_client.chat.completions.create(model="org/tiny", messages=[{"role": "user", "content": "hi"}])
    assert reply.choices[0].message.content == "Hello there!"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(api.node.submitted[0].prompt)
    assert reply.usage.completion_tokens == 13
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    async with openai_client.chat.completions.stream(
        model="org/tiny", messages=[{"role": "user", "content": "hi"}], stream_options={"include_usage": True}
    ) as stream:
        streamed = await stream.get_final_completion()
    assert streamed.choices[0].message.content == "Hello there!"
    assert streamed.usage == reply.usage


async def test_openai_sdk_uses_responses_and_completions(api: Any, openai_client: openai.AsyncOpenAI) -> None:
    response = await openai_client.responses.create(model="org/tiny", input="hi", instructions="be brief")
    assert response.output_text == "Hello there!"
    async with openai_client.responses.stream(model="org/tiny", input="hi") as stream:
        assert (await stream.get_final_response()).output_text == "Hello there!"
    completion = await openai_client.completions.create(model="org/tiny", prompt="hi", echo=True)
    assert completion.choices[0].text == "hiHello there!"
    _, tokenized, _ = await api.post("/tokenize", {"model": "org/tiny", "prompt": "hi"})
    completion = await openai_client.completions.create(model="org/tiny", prompt=tokenized["tokens"], echo=True)
    assert completion.choices[0].text == "hiHello there!"


async def test_anthropic_sdk_uses_tools_and_thinking(api: Any, anthropic_client: anthropic.AsyncAnthropic) -> None:
    api.node.script.text = (
        'Let me see.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    )
    tools: Any = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
    async with anthropic_client.messages.stream(
        model="org/tiny",
        max_tokens=500,
        messages=[{"role": "user", "content": "weather in Ulm?"}],
        tools=tools,
        thinking={"type": "enabled", "budget_tokens": 1024},
    ) as stream:
        message = await stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert message.content[2].input == {"city": "Ulm"}  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(api.node.script.text) + 1


@pytest.mark.parametrize("path", ROUTES)
async def test_stop_string_ends_the_response_and_cancels_the_sequence(api: Any, path: str, until: Any) -> None:
    api.node.script.text = "one two three"
    field = "stop_sequences" if path == "/v1/messages" else "stop"
    status, reply, _ = await api.post(path, body(path, **{field: ["two"]}))
    assert status == 200
    assert text_of(reply) == "one "
    await until(lambda: api.node.generations[0].cancelled.is_set())


async def test_sampling_comes_from_the_request_then_the_model_then_defaults(api: Any, chat_body: Any) -> None:
    await api.post("/v1/chat/completions", chat_body(top_k=5, seed=7, n=2))
    first, second = api.node.submitted
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (0.6, 5, 1.0)
    assert (first.sampling.seed, second.sampling.seed) == (7, 8)
    assert first.max_tokens == api.node.context_tokens - len(first.prompt)
    assert first.stop_token_ids == api.node.text_model.eos_ids


async def test_operators_sampling_comes_before_the_models_own_and_after_the_request(api: Any, chat_body: Any) -> None:
    api.node.sampling = SamplingDefaults(temperature=0.2, top_p=0.9, repetition_penalty=1.1)
    await api.post("/v1/chat/completions", chat_body(top_p=0.5))
    sampling = api.node.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.2, 0.5, 1.1)


async def test_applies_ignore_eos_and_max_tokens(api: Any, chat_body: Any) -> None:
    _, reply, _ = await api.post("/v1/chat/completions", chat_body(ignore_eos=True, max_tokens=4))
    assert reply["choices"][0]["message"]["content"] == "Hell"
    assert reply["choices"][0]["finish_reason"] == "length"
    assert api.node.submitted[0].stop_token_ids == ()


def several_choices(path: str) -> dict[str, Any]:
    """Two choices, in dialects that know more than one."""
    return {"n": 2} if path in ("/v1/chat/completions", "/v1/completions") else {}


FROM_GATEWAY = {"x-cortex-principal": "alice"}


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}], ids=["unasked", "asked"])
async def test_reports_usage_to_a_gateway_in_a_header_or_behind_the_last_event(
    api: Any, path: str, options: dict[str, Any]
) -> None:
    api.node.script.cached = 2
    request = body(path, **several_choices(path))
    async with api.client.post(api.url + path, json=request, headers=FROM_GATEWAY) as response:
        usage = usage_report.from_header(response.headers[usage_report.HEADER].encode())
    assert usage is not None
    assert usage.prompt_tokens == len(api.node.submitted[0].prompt)
    assert usage.cached_tokens == 2
    assert usage.completion_tokens == 13 * request.get("n", 1)
    async with api.client.post(
        api.url + path, json={**request, **options, "stream": True}, headers=FROM_GATEWAY
    ) as response:
        data = await response.read()
    assert usage_report.from_stream(data) == usage
    assert data.endswith(usage_report.comment(usage)), "however long the last event is"
    assert data.count(usage_report.comment(usage)) == 1


@pytest.mark.parametrize("path", ROUTES)
async def test_reports_usage_to_a_gateway_when_a_stream_fails(api: Any, path: str) -> None:
    api.node.script.fails_after = 3
    api.node.script.error = Recovering("the device failed")
    async with api.client.post(api.url + path, json=body(path, stream=True), headers=FROM_GATEWAY) as response:
        received = await response.read()
    usage = usage_report.from_stream(received)
    assert usage is not None
    assert usage.prompt_tokens == len(api.node.submitted[0].prompt)
    assert usage.completion_tokens == 3
    assert failure_report.from_stream(received) == "recovering"


@pytest.mark.parametrize("path", ROUTES)
async def test_reports_no_usage_to_other_clients(api: Any, path: str) -> None:
    async with api.client.post(api.url + path, json=body(path)) as response:
        assert usage_report.HEADER not in response.headers
    async with api.client.post(api.url + path, json=body(path, stream=True)) as response:
        assert b": usage" not in await response.read()


async def test_passes_on_principal_and_request_id(api: Any, chat_body: Any) -> None:
    _, _, headers = await api.post(
        "/v1/chat/completions", chat_body(), **{"x-cortex-principal": "alice", "x-request-id": "abc-1"}
    )
    assert api.node.submitted[0].principal == "alice"
    assert headers["x-request-id"] == "abc-1"
    _, _, headers = await api.post("/v1/chat/completions", chat_body(), **{"x-request-id": "no spaces, please"})
    assert len(headers["x-request-id"]) == 32


async def test_lists_dropped_tools_in_a_header(api: Any, chat_body: Any) -> None:
    clock = {"type": "function", "function": {"name": "clock"}}
    request = chat_body(tools=[{"type": "web_search"}, {"type": "bad\r\nx: y"}, clock])
    _, _, headers = await api.post("/v1/chat/completions", request)
    assert headers["x-cortex-dropped-tools"] == "web_search, badx: y"


async def test_returns_several_choices_with_their_indexes(api: Any, chat_body: Any) -> None:
    _, reply, _ = await api.post("/v1/chat/completions", chat_body(n=3, logprobs=True, top_logprobs=2))
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in reply["choices"]} == {"Hello there!"}
    assert reply["usage"]["completion_tokens"] == 3 * 13
    assert reply["usage"]["prompt_tokens"] == len(api.node.submitted[0].prompt)
    assert len(reply["choices"][1]["logprobs"]["content"]) == 13
    assert reply["choices"][0]["logprobs"]["content"][0]["token"] == "H"
    received = await frames(api, "/v1/chat/completions", chat_body(n=2))
    assert received[-1].data == "[DONE]"


async def received_until(response: aiohttp.ClientResponse, mark: bytes, count: int) -> bytes:
    """What the node sends until it has sent `mark` that often."""
    data = b""
    while data.count(mark) < count:
        piece = await response.content.readany()
        assert piece, data
        data += piece
    return data


@pytest.mark.parametrize("keepalive_s", [0.05])
@pytest.mark.parametrize("path", ROUTES)
async def test_sends_keepalives_while_there_is_no_output(api: Any, path: str, keepalive_s: float) -> None:
    keepalive = b"event: ping" if path == "/v1/messages" else b": keepalive"
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
async def test_loads_a_cold_model_for_the_first_request(api: Any, chat_body: Any, stream: bool, until: Any) -> None:
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


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_error_before_the_first_output_is_an_http_error_in_the_dialect(api: Any, path: str, stream: bool) -> None:
    api.node.submit_error = Overloaded("the queue is full", retry_after_s=7)
    status, reply, headers = await api.post(path, body(path, stream=stream))
    assert status == (529 if path == "/v1/messages" else 503)
    assert reply["error"]["message"] == "the queue is full"
    assert reply["error"]["type"] == ("overloaded_error" if path == "/v1/messages" else "server_error")
    assert headers["retry-after"] == "7"


@pytest.mark.parametrize("path", ROUTES)
async def test_error_after_the_first_output_is_an_event_of_the_stream(api: Any, path: str) -> None:
    api.node.script.fails_after = 3
    api.node.script.error = Recovering("the device failed")
    last = (await frames(api, path, body(path)))[-1]
    assert "the device failed" in last.data
    assert last.event == {"/v1/messages": "error", "/v1/responses": "response.failed"}.get(path, "message")
    status, reply, _ = await api.post(path, body(path))
    assert status == (529 if path == "/v1/messages" else 503)
    assert reply["error"]["message"] == "the device failed"


@pytest.mark.parametrize("path", ROUTES)
async def test_unexpected_exception_is_an_internal_error_without_details(api: Any, path: str) -> None:
    api.node.script.fails_after = 0
    status, reply, _ = await api.post(path, body(path))
    assert status == 500
    assert "a bug" not in json.dumps(reply)
    api.node.script.fails_after = 3
    last = (await frames(api, path, body(path)))[-1]
    assert "Internal error" in last.data
    assert "a bug" not in last.data


@pytest.mark.parametrize("keepalive_s", [0.05])
async def test_error_after_keepalives_is_an_event_of_the_stream(api: Any, chat_body: Any) -> None:
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
    api: Any, openai_client: openai.AsyncOpenAI, anthropic_client: anthropic.AsyncAnthropic
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
async def test_rejects_invalid_requests_in_the_dialect(api: Any, path: str) -> None:
    for data, expected_status in (
        (b"{", 400),
        (b"{}", 400),
        (json.dumps(body(path, temperature=-1)).encode(), 400),
        (json.dumps(body(path, model="org/tny")).encode(), 404),
        (b"x" * 1_100_000, 413),
    ):
        status, reply, _ = await api.post(path, data)
        assert status == expected_status
        assert reply["error"]["message"]
        assert ("code" in reply["error"]) is (path != "/v1/messages")
    assert not api.node.submitted


async def ask(api: Any, path: str, request: dict[str, Any]) -> None:
    async with api.client.post(api.url + path, json=request) as response:
        await response.read()


async def disconnect(asking: asyncio.Task[None]) -> None:
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode", "load"])
async def test_disconnected_client_frees_everything_in_every_phase(
    api: Any, path: str, stream: bool, phase: str, until: Any
) -> None:
    if phase == "prefill":
        api.node.script.first_s = 30
    elif phase == "decode":
        api.node.script.pause_s = 30
    else:
        api.node.state = ModelState.COLD
        api.node.load_s = 30
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


async def test_cancels_every_choice_when_the_client_disconnects(api: Any, chat_body: Any, until: Any) -> None:
    api.node.script.pause_s = 30
    asking = asyncio.create_task(ask(api, "/v1/chat/completions", chat_body(n=4, stream=True)))
    await until(lambda: len(api.node.generations) == 4)
    await disconnect(asking)
    await until(lambda: all(g.cancelled.is_set() for g in api.node.generations))


async def test_reset_connection_cancels_the_request(api: Any, chat_body: Any, until: Any) -> None:
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
    api: Any, chat_body: Any, until: Any
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


async def test_concurrent_streams_leave_nothing_behind(api: Any, chat_body: Any, until: Any) -> None:
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


async def test_accepts_a_principal_that_is_not_utf8(api: Any) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    data = json.dumps({"model": "org/tiny", "prompt": "hi"}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-cortex-principal: \xff\xfe\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(data), data)
    )
    async with asyncio.timeout(30):
        reply = await reader.read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 200")
    principal = api.node.submitted[0].principal
    assert principal
    assert principal.encode()


async def test_serves_a_large_prompt_and_rejects_an_invalid_large_body(api: Any) -> None:
    api.node.context_tokens = 10_000_000
    long = "x" * 500_000
    assert (await api.post("/v1/completions", {"model": "org/tiny", "prompt": long, "max_tokens": 3}))[0] == 200
    status, reply, _ = await api.post("/v1/completions", {"model": "org/tiny", "prompt": long, "temperature": "hot"})
    assert (status, reply["error"]["param"]) == (400, "temperature")


async def test_completions_continue_every_prompt_of_a_list(api: Any, openai_client: openai.AsyncOpenAI) -> None:
    prompts = ["ab", "cde"]
    whole = await openai_client.completions.create(model="org/tiny", prompt=prompts, n=2, echo=True, max_tokens=3)
    expected = ["abHel", "abHel", "cdeHel", "cdeHel"]
    assert [(choice.index, choice.text) for choice in whole.choices] == list(enumerate(expected))
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    assert {bytes(job.prompt) for job in api.node.submitted} == {bytes(api.node.text_model.encode(p)) for p in prompts}

    texts = dict.fromkeys(range(4), "")
    finished = []
    stream = await openai_client.completions.create(
        model="org/tiny",
        prompt=[api.node.text_model.encode(prompt) for prompt in prompts],
        n=2,
        echo=True,
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finished += [choice.index] if choice.finish_reason else []
        usage = chunk.usage
    assert [texts[index] for index in range(4)] == expected
    assert sorted(finished) == [0, 1, 2, 3]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 12)


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_tokens_returns_the_prompt_alone(api: Any, *, stream: bool) -> None:
    body = {"model": "org/tiny", "prompt": ["ab", "c"], "echo": True, "max_tokens": 0, "stream": stream}
    if stream:
        received = [json.loads(frame.data) for frame in (await frames(api, "/v1/completions", body))[:-1]]
        choices = [choice for chunk in received for choice in chunk["choices"]]
        assert ["".join(c["text"] for c in choices if c["index"] == index) for index in (0, 1)] == ["ab", "c"]
    else:
        status, reply, _ = await api.post("/v1/completions", body)
        assert status == 200
        assert [(c["index"], c["text"], c["finish_reason"]) for c in reply["choices"]] == [
            (0, "ab", "length"),
            (1, "c", "length"),
        ]
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (3, 0)
    assert not api.node.submitted


@pytest.mark.parametrize("path", ROUTES)
async def test_rejects_a_body_that_is_declared_as_something_else_than_json(api: Any, path: str) -> None:
    status, reply, _ = await api.post(path, body(path), **{"content-type": "text/plain"})
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
