"""The inference routes of a node: what clients and gateways get in every dialect."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest

from cortex.wire.errors import Recovering
from cortex.wire.fields.request_class import RequestClass, level_of, tier_of
from cortex.wire.node import failure_report, usage_report
from cortex.wire.node.headers import PROMPT_TOKENS, TOKEN_LIMIT
from cortex.wire.node.load_options import SamplingDefaults

from ....waiting import WAIT_S, until
from ..conftest import Api, ChatBody
from .route_calls import BODIES, ROUTES, ask, body, frames, text_of


async def test_openai_sdk_uses_chat_completions(api: Api, openai_client: openai.AsyncOpenAI) -> None:
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


async def test_openai_sdk_uses_responses_and_completions(api: Api, openai_client: openai.AsyncOpenAI) -> None:
    response = await openai_client.responses.create(model="org/tiny", input="hi", instructions="be brief")
    assert response.output_text == "Hello there!"
    async with openai_client.responses.stream(model="org/tiny", input="hi") as stream:
        assert (await stream.get_final_response()).output_text == "Hello there!"
    completion = await openai_client.completions.create(model="org/tiny", prompt="hi", echo=True)
    assert completion.choices[0].text == "hiHello there!"
    _, tokenized, _ = await api.post("/tokenize", {"model": "org/tiny", "prompt": "hi"})
    completion = await openai_client.completions.create(model="org/tiny", prompt=tokenized["tokens"], echo=True)
    assert completion.choices[0].text == "hiHello there!"


async def test_anthropic_sdk_uses_tools_and_thinking(api: Api, anthropic_client: anthropic.AsyncAnthropic) -> None:
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
    assert message.content[2].input == {"city": "Ulm"}
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == len(api.node.script.text) + 1


@pytest.mark.parametrize("path", ROUTES)
async def test_stop_string_ends_the_response_and_cancels_the_sequence(api: Api, path: str) -> None:
    api.node.script.text = "one two three"
    field = "stop_sequences" if path == "/v1/messages" else "stop"
    status, reply, _ = await api.post(path, body(path, **{field: ["two"]}))
    assert status == 200
    assert text_of(reply) == "one "
    await until(lambda: api.node.generations[0].cancelled.is_set())


async def test_sampling_comes_from_the_request_then_the_model_then_defaults(api: Api, chat_body: ChatBody) -> None:
    await api.post("/v1/chat/completions", chat_body(top_k=5, seed=7, n=2))
    first, second = api.node.submitted
    assert (first.sampling.temperature, first.sampling.top_k, first.sampling.top_p) == (0.6, 5, 1.0)
    assert (first.sampling.seed, second.sampling.seed) == (7, 8)
    assert first.max_tokens == api.node.context_tokens - len(first.prompt)
    assert first.stop_token_ids == api.node.text_model.eos_ids


async def test_operators_sampling_comes_before_the_models_own_and_after_the_request(
    api: Api, chat_body: ChatBody
) -> None:
    api.node.sampling = SamplingDefaults(temperature=0.2, top_p=0.9, repetition_penalty=1.1)
    await api.post("/v1/chat/completions", chat_body(top_p=0.5))
    sampling = api.node.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.2, 0.5, 1.1)


async def test_applies_ignore_eos_and_max_tokens(api: Api, chat_body: ChatBody) -> None:
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
    api: Api, path: str, options: dict[str, Any]
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
    comment = usage_report.comment(usage).rstrip()
    assert data.rstrip().endswith(comment), "however long the last event is"
    assert data.count(comment) == 1


@pytest.mark.parametrize("path", ROUTES)
async def test_reports_usage_to_a_gateway_when_a_stream_fails(api: Api, path: str) -> None:
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
async def test_reports_no_usage_to_other_clients(api: Api, path: str) -> None:
    async with api.client.post(api.url + path, json=body(path)) as response:
        assert usage_report.HEADER not in response.headers
    async with api.client.post(api.url + path, json=body(path, stream=True)) as response:
        assert b": usage" not in await response.read()


@pytest.mark.parametrize("path", BODIES)
async def test_uses_no_more_tokens_than_a_gateway_allows(api: Api, path: str) -> None:
    await ask(api, path, body(path))
    num_prompt_tokens = len(api.node.submitted[-1].prompt)

    async def send(limit: object) -> tuple[int, str | None]:
        headers = {TOKEN_LIMIT: str(limit)}
        async with api.client.post(api.url + path, json=body(path), headers=headers) as response:
            return response.status, response.headers.get(PROMPT_TOKENS)

    assert await send(num_prompt_tokens + 5) == (200, None)
    assert api.node.submitted[-1].max_tokens == 5
    num_submitted = len(api.node.submitted)
    assert await send(num_prompt_tokens) == (429, str(num_prompt_tokens))
    assert (await send("many"))[0] == 400
    assert len(api.node.submitted) == num_submitted


async def test_passes_on_principal_and_request_id(api: Api, chat_body: ChatBody) -> None:
    _, _, headers = await api.post(
        "/v1/chat/completions", chat_body(), **{"x-cortex-principal": "alice", "x-request-id": "abc-1"}
    )
    assert api.node.submitted[0].principal == "alice"
    assert headers["x-request-id"] == "abc-1"
    _, _, headers = await api.post("/v1/chat/completions", chat_body(), **{"x-request-id": "no spaces, please"})
    assert len(headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("headers", "fields", "expected"),
    [
        ({}, {}, "default"),
        ({}, {"service_tier": "flex"}, "flex"),
        ({"x-cortex-class": "idle"}, {"service_tier": "flex"}, "flex"),  # only a gateway says so
        ({"x-cortex-principal": "alice"}, {"service_tier": "auto"}, "default"),
        ({"x-cortex-principal": "alice", "x-cortex-class": "idle"}, {}, "idle"),
        ({"x-cortex-principal": "alice", "x-cortex-class": "default"}, {"service_tier": "priority"}, "default"),
    ],
)
async def test_class_is_what_the_gateway_says_or_what_a_client_without_one_asks_for(
    api: Api, chat_body: ChatBody, headers: dict[str, str], fields: dict[str, Any], expected: RequestClass
) -> None:
    status, reply, _ = await api.post("/v1/chat/completions", chat_body(**fields), **headers)
    assert status == 200, reply
    assert api.node.submitted[-1].level == level_of(expected)
    if "service_tier" in fields:
        assert reply["service_tier"] == tier_of(expected)


async def test_tenant_is_made_of_what_the_gateway_says_and_of_the_salt(api: Api, chat_body: ChatBody) -> None:
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        for header in ({}, {"x-cortex-tenant": "01" * 16}, {"x-cortex-tenant": "02" * 16}):
            status, reply, _ = await api.post("/v1/chat/completions", chat_body(**salt), **header)
            assert status == 200, reply
    tenants = [request.tenant for request in api.node.submitted]
    assert len(set(tenants)) == 9
    assert tenants[0] == b""
    assert {len(tenant) for tenant in tenants[1:]} == {16}
    await api.post("/v1/chat/completions", chat_body(cache_salt="a"), **{"x-cortex-tenant": "01" * 16})
    assert api.node.submitted[-1].tenant == tenants[4]


async def test_lists_dropped_tools_in_a_header(api: Api, chat_body: ChatBody) -> None:
    clock = {"type": "function", "function": {"name": "clock"}}
    request = chat_body(tools=[{"type": "web_search"}, {"type": "bad\r\nx: y"}, clock])
    _, _, headers = await api.post("/v1/chat/completions", request)
    assert headers["x-cortex-dropped-tools"] == "web_search, badx: y"


async def test_returns_several_choices_with_their_indexes(api: Api, chat_body: ChatBody) -> None:
    _, reply, _ = await api.post("/v1/chat/completions", chat_body(n=3, logprobs=True, top_logprobs=2))
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in reply["choices"]} == {"Hello there!"}
    assert reply["usage"]["completion_tokens"] == 3 * 13
    assert reply["usage"]["prompt_tokens"] == len(api.node.submitted[0].prompt)
    assert len(reply["choices"][1]["logprobs"]["content"]) == 12, "the end token is not part of the text"
    assert reply["choices"][0]["logprobs"]["content"][0]["token"] == "H"
    received = await frames(api, "/v1/chat/completions", chat_body(n=2))
    assert received[-1].data == "[DONE]"


async def test_accepts_a_principal_that_is_not_utf8(api: Api) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    data = json.dumps({"model": "org/tiny", "prompt": "hi"}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-cortex-principal: \xff\xfe\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(data), data)
    )
    async with asyncio.timeout(WAIT_S):
        reply = await reader.read()
    writer.close()
    assert reply.startswith(b"HTTP/1.1 200")
    principal = api.node.submitted[0].principal
    assert principal
    assert principal.encode()


async def test_completions_continue_every_prompt_of_a_list(api: Api, openai_client: openai.AsyncOpenAI) -> None:
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
@pytest.mark.parametrize(("echo", "texts"), [(True, ["ab", "c"]), (False, ["", ""])])
async def test_response_without_tokens_is_the_echo_alone(
    api: Api, *, stream: bool, echo: bool, texts: list[str]
) -> None:
    body = {"model": "org/tiny", "prompt": ["ab", "c"], "echo": echo, "max_tokens": 0, "stream": stream}
    if stream:
        received = [json.loads(frame.data) for frame in (await frames(api, "/v1/completions", body))[:-1]]
        choices = [choice for chunk in received for choice in chunk["choices"]]
        assert ["".join(c["text"] for c in choices if c["index"] == index) for index in (0, 1)] == texts
    else:
        status, reply, _ = await api.post("/v1/completions", body)
        assert status == 200
        assert [(c["index"], c["text"], c["finish_reason"]) for c in reply["choices"]] == [
            (0, texts[0], "length"),
            (1, texts[1], "length"),
        ]
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (3, 0)
    assert [job.max_tokens for job in api.node.submitted] == [1, 1]  # of which nothing is returned
