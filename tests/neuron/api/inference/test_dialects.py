"""What clients of each dialect get for options and outputs that few of them use."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import TextBlock
from openai.types.chat import ChatCompletionMessageCustomToolCall
from openai.types.responses import ResponseCustomToolCall

from cortex.wire.sse import Parser

from ....waiting import until
from . import route_calls
from .route_calls import frames

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
SAID: Any = [{"role": "user", "content": "hi"}]


async def test_call_cut_by_the_limit_is_incomplete_in_responses(api: Any, openai_client: openai.AsyncOpenAI) -> None:
    api.node.script.text = CALL
    tools: Any = [{"type": "function", "name": "weather", "parameters": WEATHER}]
    request: Any = {"model": "org/tiny", "input": "hi", "tools": tools, "max_output_tokens": 62}
    whole = await openai_client.responses.create(**request)
    events = [event async for event in await openai_client.responses.create(**request, stream=True)]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert events[-1].type == "response.incomplete"
    streamed = events[-1].response
    for response in (whole, streamed):
        assert response.status == "incomplete"
        (item,) = response.output
        assert item.type == "function_call"
        assert item.status == "incomplete"
        assert item.arguments == '{"city": "Ulm", "'
    assert [event.item.status for event in done] == ["incomplete"]


async def test_call_cut_by_the_limit_has_no_invented_keys_in_messages(
    api: Any, anthropic_client: anthropic.AsyncAnthropic
) -> None:
    api.node.script.text = CALL
    tools: Any = [{"name": "weather", "input_schema": WEATHER}]
    for max_tokens, expected in ((62, {"city": "Ulm"}), (48, {})):
        message = await anthropic_client.messages.create(
            model="org/tiny", max_tokens=max_tokens, messages=SAID, tools=tools
        )
        assert message.stop_reason == "max_tokens"
        assert [block.input for block in message.content if block.type == "tool_use"] == [expected]


async def test_custom_tool_gets_free_text_in_responses(api: Any, openai_client: openai.AsyncOpenAI) -> None:
    text = 'line "one"\nzwei ✓ 😀\\'
    api.node.script.text = f"<tool_call>\n{json.dumps({'name': 'patch', 'arguments': {'input': text}})}\n</tool_call>"
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    tools: Any = [{"type": "custom", "name": "patch", "format": grammar}, {"type": "web_search"}]
    request: Any = {"model": "org/tiny", "input": "hi", "tools": tools}
    raw = await openai_client.responses.with_raw_response.create(**request)
    assert raw.headers["x-cortex-unenforced"] == "tools[0].format"
    assert raw.headers["x-cortex-dropped-tools"] == "web_search"
    whole = raw.parse()
    async with openai_client.responses.stream(**request) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.custom_tool_call_input.delta"]
        streamed = await stream.get_final_response()
    assert "".join(deltas) == text
    assert len(deltas) > 1
    for response in (whole, streamed):
        (item,) = response.output
        assert item.type == "custom_tool_call"
        assert isinstance(item, ResponseCustomToolCall)
        assert (item.name, item.input) == ("patch", text)
        assert [tool.type for tool in response.tools] == ["custom"]
    history = [{"role": "user", "content": "hi"}, whole.output[0].model_dump(exclude_none=True)]
    history.append({"type": "custom_tool_call_output", "call_id": whole.output[0].call_id, "output": "done"})
    await openai_client.responses.create(**{**request, "input": history})
    assert "zwei" in api.node.text_model.decode(api.node.submitted[-1].prompt)


async def test_custom_tool_gets_free_text_in_chat(api: Any, openai_client: openai.AsyncOpenAI) -> None:
    api.node.script.text = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>'
    tools: Any = [{"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}]
    reply = await openai_client.chat.completions.create(model="org/tiny", messages=SAID, tools=tools)
    calls = reply.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    assert call.type == "custom"
    assert call.custom.input == "a\nb"
    chunks = await openai_client.chat.completions.create(model="org/tiny", messages=SAID, tools=tools, stream=True)
    pieces = [
        piece.model_dump().get("custom", {}).get("input", "")
        async for chunk in chunks
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert "".join(pieces) == "a\nb"


@pytest.mark.parametrize(
    ("fields", "num_calls"),
    [
        ({"tools": [{"type": "function", "function": {"name": "weather"}}]}, 2),
        ({"tools": [{"type": "function", "function": {"name": "weather"}}], "parallel_tool_calls": False}, 1),
        ({"functions": [{"name": "weather"}]}, 1),
    ],
)
async def test_response_without_parallel_calls_ends_with_its_first_call(
    api: Any, chat_body: Any, fields: dict[str, Any], num_calls: int
) -> None:
    api.node.script.text = f"{CALL}\n{CALL}\nDone."
    _, reply, _ = await api.post("/v1/chat/completions", chat_body(**fields))
    message = reply["choices"][0]["message"]
    calls = message.get("tool_calls") or [message["function_call"]]
    assert len(calls) == num_calls
    if num_calls == 1:
        assert reply["choices"][0]["finish_reason"] in ("tool_calls", "function_call")
        assert message["content"] is None
        assert reply["usage"]["completion_tokens"] == len(CALL)
        await until(lambda: api.node.generations[0].cancelled.is_set())


@pytest.mark.parametrize("choice", ["auto", {"name": "weather"}])
async def test_functions_are_called_by_their_former_name(
    api: Any, openai_client: openai.AsyncOpenAI, choice: Any
) -> None:
    api.node.script.text = CALL
    request: Any = {
        "model": "org/tiny",
        "messages": SAID,
        "functions": [{"name": "weather", "parameters": WEATHER}],
        "function_call": choice,
    }
    reply = await openai_client.chat.completions.create(**request)
    assert reply.choices[0].finish_reason == "function_call"
    assert reply.choices[0].message.tool_calls is None
    called = reply.choices[0].message.function_call
    assert called is not None
    assert (called.name, json.loads(called.arguments)) == ("weather", {"city": "Ulm", "days": 2})
    chunks = [chunk async for chunk in await openai_client.chat.completions.create(**request, stream=True)]
    deltas = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
    assert deltas[0].name == "weather"
    assert "".join(delta.arguments or "" for delta in deltas) == called.arguments
    assert chunks[-1].choices[0].finish_reason == "function_call"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_chunks_and_whole_responses_have_timings_if_the_client_asks(api: Any, path: str) -> None:
    sent = route_calls.body(path, timings_per_token=True)
    chunks = [json.loads(frame.data) for frame in (await frames(api, path, sent))[:-1]]
    texts = [chunk for chunk in chunks if chunk["choices"] and "role" not in chunk["choices"][0].get("delta", {})]
    assert all(chunk["timings"]["prompt_n"] > 0 for chunk in texts)
    counts = [chunk["timings"]["predicted_n"] for chunk in texts]
    assert counts == sorted(counts)
    _, whole, _ = await api.post(path, sent)
    assert whole["timings"]["predicted_n"] == counts[-1] == whole["usage"]["completion_tokens"]
    assert "timings" not in (await api.post(path, route_calls.body(path)))[1]


@pytest.mark.parametrize(
    ("thinking", "switch", "kinds"),
    [
        (None, False, ["text"]),
        ({"type": "disabled"}, False, ["text"]),
        ({"type": "enabled", "budget_tokens": 400}, True, ["thinking", "text"]),
        ({"type": "adaptive"}, None, ["thinking", "text"]),
    ],
)
async def test_messages_think_only_if_asked_to(
    api: Any, anthropic_client: anthropic.AsyncAnthropic, thinking: Any, switch: bool | None, kinds: list[str]
) -> None:
    """The template is switched off, and a model that thinks all the same is not shown thinking."""
    api.node.script.text = ("" if switch else "<think>\n") + "Let me see.\n</think>\n\nI look."
    options: Any = {} if thinking is None else {"thinking": thinking}
    request: Any = {"model": "org/tiny", "max_tokens": 500, "messages": SAID, **options}
    whole = await anthropic_client.messages.create(**request)
    async with anthropic_client.messages.stream(**request) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == kinds
        last = message.content[-1]
        assert isinstance(last, TextBlock)
        assert last.text == "I look."
        assert message.usage.output_tokens == len(api.node.script.text) + 1
    prompt = api.node.text_model.decode(api.node.submitted[0].prompt)
    assert prompt.endswith("<think>\n") is (switch is True)


async def test_chat_leaves_reasoning_out_if_asked_to(api: Any, chat_body: Any) -> None:
    api.node.script.text = "<think>\nhm\n</think>\n\nyes"
    _, reply, _ = await api.post("/v1/chat/completions", chat_body(include_reasoning=False, logprobs=True))
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "yes", "refusal": None}
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    _, reply, _ = await api.post("/v1/chat/completions", chat_body())
    assert reply["choices"][0]["message"]["reasoning_content"] == "hm"


async def test_reports_usage_in_every_chunk_if_asked_to(api: Any, chat_body: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in (
        ("/v1/chat/completions", chat_body(stream=True, stream_options=options)),
        ("/v1/completions", {"model": "org/tiny", "prompt": "hi", "stream": True, "stream_options": options}),
    ):
        async with api.client.post(api.url + path, json=body) as response:
            frames = Parser().feed(await response.read())
        usages = [json.loads(frame.data)["usage"] for frame in frames if frame.data != "[DONE]"]
        counts = [usage["completion_tokens"] for usage in usages if usage is not None]
        assert len(counts) >= len(usages) - 1  # the first chunk has no tokens yet
        assert counts == sorted(counts)
        assert counts[-1] == 13
        assert {usage["prompt_tokens"] for usage in usages if usage is not None} == {len(api.node.submitted[-1].prompt)}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_returns_the_ids_of_tokens_if_asked_to(api: Any, chat_body: Any, path: str) -> None:
    def body(**fields: Any) -> dict[str, Any]:
        return chat_body(**fields) if "chat" in path else {"model": "org/tiny", "prompt": "hi", **fields}

    _, whole, _ = await api.post(path, body(return_token_ids=True, n=2))
    prompt, generated = [*api.node.submitted[-1].prompt], [*api.node.text_model.encode(api.node.script.text)]
    assert prompt
    for choice in whole["choices"]:
        assert choice["token_ids"][: len(generated)] == generated
        assert (whole if "chat" in path else choice)["prompt_token_ids"] == prompt
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])

    async with api.client.post(api.url + path, json=body(return_token_ids=True, stream=True)) as response:
        frames = Parser().feed(await response.read())
    chunks = [json.loads(frame.data) for frame in frames if frame.data != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice["token_ids"] or ()] == whole["choices"][0]["token_ids"]
    holders = chunks if "chat" in path else choices
    assert holders[0]["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in holder for holder in holders[1:])

    _, without, _ = await api.post(path, body())
    assert "token_ids" not in without["choices"][0]
    assert "prompt_token_ids" not in {**without, **without["choices"][0]}


async def test_lists_ignored_fields_and_unenforced_patterns_in_headers(api: Any, chat_body: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
    output = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    _, _, headers = await api.post("/v1/chat/completions", chat_body(frobnicate=1, response_format=output))
    assert headers["x-cortex-ignored-fields"] == "frobnicate"
    assert headers["x-cortex-unenforced"] == "schema.properties.a.pattern"


@pytest.mark.parametrize(("kept", "expected"), [(3, "rld"), (-1, None), (5000, None)])
async def test_keeps_the_end_of_a_prompt_that_is_to_be_truncated(api: Any, kept: int, expected: str | None) -> None:
    prompt = "hello world" * (400 if kept == -1 else 1)
    body = {"model": "org/tiny", "prompt": prompt, "truncate_prompt_tokens": kept, "max_tokens": 20, "echo": True}
    status, reply, _ = await api.post("/v1/completions", body)
    assert status == 200
    given = api.node.text_model.decode(api.node.submitted[0].prompt)
    if expected is None:
        expected = prompt[-(api.node.context_tokens - 20) :]
    assert given == expected
    assert reply["choices"][0]["text"] == expected + "Hello there!"
    _, reply, _ = await api.post("/v1/completions", {**body, "truncate_prompt_tokens": 0})
    assert reply["error"]["param"] == "truncate_prompt_tokens"


async def test_passes_on_allowed_tokens(api: Any, chat_body: Any) -> None:
    await api.post("/v1/chat/completions", chat_body(allowed_token_ids=[3, 5]))
    assert api.node.submitted[0].sampling.allowed_token_ids == (3, 5)


async def test_rejects_more_scores_of_prompts_than_a_response_should_hold(api: Any) -> None:
    body = {"model": "org/tiny", "prompt": ["x" * 1250] * 8, "echo": True, "logprobs": 5}
    status, reply, _ = await api.post("/v1/completions", body)
    assert (status, reply["error"]["param"]) == (400, "logprobs")
    assert "60000 log-probabilities of 10000 prompt tokens, at most 50000" in reply["error"]["message"]
    assert not api.node.submitted
