from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.openai_chat import build, parse
from cortex.wire.errors import InvalidValue, UnsupportedModality
from cortex.wire.fields.tools import MAX_TOOLS
from cortex.wire.requests import (
    GenerateRequest,
    Message,
    OutputFormat,
    PicturePart,
    Reasoning,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def read(**body: Any) -> GenerateRequest:
    return parse(msgspec.json.encode({"model": "m", "messages": HELLO, **body}))


def test_parses_a_conversation_with_tools_reasoning_and_images() -> None:
    request = read(
        messages=[
            {"role": "system", "content": "be brief"},
            {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is this"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                    {"type": "image_url", "image_url": "https://example.org/cat.png"},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}},
                    {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "function", "name": "weather", "content": "sun"},
        ],
        tools=[WEATHER, {"type": "web_search"}, {"type": "namespace", "name": "x"}],
    )
    assert request.messages == (
        Message(role="system", parts=(Text(text="be brief"),)),
        Message(role="developer", parts=(Text(text="be kind"),)),
        Message(
            role="user",
            parts=(
                Text(text="what is this"),
                PicturePart(data=b"\0", media_type="image/png", param="messages[2].content[1]"),
                PicturePart(url="https://example.org/cat.png", param="messages[2].content[2]"),
            ),
        ),
        Message(
            role="assistant",
            parts=(
                Reasoning(text="hm"),
                ToolCall(id="c1", name="weather", arguments='{"city": "Ulm"}'),
                ToolCall(id="c2", name="weather", arguments='{"city":"Bonn"}'),
            ),
        ),
        Message(role="tool", parts=(ToolResult(call_id="c1", parts=(Text(text="rain"),)),)),
        Message(role="tool", parts=(ToolResult(call_id="weather", parts=(Text(text="sun"),)),), name="weather"),
    )
    assert request.tools == (Tool(name="weather", parameters={"type": "object"}),)
    assert request.dropped_tools == ("web_search", "namespace")


def test_parses_sampling_fields_and_extensions() -> None:
    sampling = read(
        temperature=0,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=2,
        logit_bias={"5": -100},
        seed=7,
        max_tokens=5,
        max_completion_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop="END",
        stop_token_ids=[3],
        n=2,
        logprobs=True,
        top_logprobs=20,
    ).sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens, sampling.stop) == (0, 0, 9, ("END",))
    assert (sampling.logit_bias, sampling.n, sampling.top_logprobs) == ({5: -100.0}, 2, 20)
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.stop_token_ids) == (True, 2, (3,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("min_p", -1),
        ("top_k", -2),
        ("n", 0),
        ("n", 1.5),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("top_logprobs", 21),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("stop", [1]),
        ("stop", ["x"] * 65),
        ("messages", []),
        ("messages", "hello"),
        ("tool_choice", "sometimes"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "unknown"}}),
        ("stream", "yes"),
    ],
)
def test_rejects_invalid_value_and_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(**{field: value})
    assert caught.value.param == field


def test_rejection_names_nested_fields() -> None:
    with pytest.raises(InvalidValue) as caught:
        read(top_logprobs=2)
    assert caught.value.param == "top_logprobs"
    with pytest.raises(InvalidValue) as caught:
        read(logit_bias={"cat": 1})
    assert caught.value.param == "logit_bias.cat"
    with pytest.raises(InvalidValue) as caught:
        read(messages=[{"role": "user", "content": [{"type": "text", "text": 3}]}])
    assert caught.value.param == "messages[0].content[0].text"


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": None},
        {"tools": []},
        {"stop": None},
        {"stop": [""]},
        {"stream_options": None},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"store": True, "metadata": {"a": "b"}, "verbosity": "low", "service_tier": None},
    ],
)
def test_ignores_fields_without_meaning_here(extra: dict[str, Any]) -> None:
    assert read(**extra) == read()


def test_rejects_audio_instead_of_dropping_it() -> None:
    with pytest.raises(UnsupportedModality) as caught:
        read(messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}])
    assert caught.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize(
    ("body", "param", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", OutputFormat(kind="json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"a": 1}}}},
            "response_format",
            OutputFormat(kind="json_schema", schema={"a": 1}),
        ),
        ({"guided_json": '{"a": 1}'}, "guided_json", OutputFormat(kind="json_schema", schema={"a": 1})),
        ({"guided_regex": "a+"}, "guided_regex", OutputFormat(kind="regex", text="a+")),
        ({"guided_grammar": "root ::= x"}, "guided_grammar", OutputFormat(kind="grammar", text="root ::= x")),
        ({"grammar": "root ::= x"}, "grammar", OutputFormat(kind="grammar", text="root ::= x")),
        ({"ebnf": "root ::= x"}, "ebnf", OutputFormat(kind="grammar", text="root ::= x")),
        ({"guided_choice": ["a", "b"]}, "guided_choice", OutputFormat(kind="choice", choices=("a", "b"))),
        (
            {"structured_outputs": {"json": {"a": 1}}},
            "structured_outputs.json",
            OutputFormat(kind="json_schema", schema={"a": 1}),
        ),
        (
            {"structured_outputs": {"choice": ["a"]}},
            "structured_outputs.choice",
            OutputFormat(kind="choice", choices=("a",)),
        ),
    ],
)
def test_parses_output_formats(body: dict[str, Any], param: str, expected: OutputFormat) -> None:
    request = read(**body)
    assert request.output == msgspec.structs.replace(expected, param=param)
    again = parse(build(request)).output
    assert again is not None
    assert msgspec.structs.replace(again, param=expected.param) == expected


def test_rejects_two_output_constraints() -> None:
    with pytest.raises(InvalidValue, match="both constrain the output"):
        read(guided_regex="a", response_format={"type": "json_object"})


@pytest.mark.parametrize(
    ("body", "thinking"),
    [
        ({}, Thinking()),
        ({"reasoning_effort": "high"}, Thinking(enabled=True, effort="high")),
        ({"reasoning_effort": "none"}, Thinking(enabled=False, effort="none")),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Thinking(enabled=False)),
        ({"enable_thinking": True}, Thinking(enabled=True)),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
            Thinking(enabled=False, effort="low"),
        ),
    ],
)
def test_parses_thinking_switches(body: dict[str, Any], thinking: Thinking) -> None:
    assert read(**body).thinking == thinking


@pytest.mark.parametrize(
    ("body", "is_inline"),
    [
        ({"reasoning_format": "none"}, True),
        ({"reasoning_format": "deepseek"}, False),
        ({"reasoning_format": "deepseek-legacy"}, False),
        ({"reasoning_format": "deepseek-legacy", "stream": True}, True),
        ({"separate_reasoning": False}, True),
    ],
)
def test_reasoning_stays_in_the_content_where_the_format_says_so(body: dict[str, Any], is_inline: bool) -> None:
    assert read(**body).thinking.inline is is_inline


def test_parses_tool_choices() -> None:
    assert read(tools=[WEATHER], tool_choice="required").tool_choice == ToolChoice(mode="required")
    named = {"type": "function", "function": {"name": "weather"}}
    assert read(tools=[WEATHER], tool_choice=named).tool_choice == ToolChoice(
        mode="named", name="weather", parallel=False
    )
    assert read(tools=[WEATHER], parallel_tool_calls=False).tool_choice.parallel is False
    with pytest.raises(InvalidValue, match="web_search do not run here"):
        read(tools=[{"type": "web_search"}], tool_choice="required")


def allowed_tools(mode: str, *names: str, **fields: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools, **fields}}


def test_allowed_tools_restrict_the_choice_but_not_the_prompt() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    request = read(tools=[WEATHER, other], tool_choice=allowed_tools("required", "weather"))
    assert request.tool_choice == ToolChoice(mode="required", allowed=("weather",))
    assert [tool.name for tool in request.tools] == ["weather", "other"]
    assert [tool.name for tool in request.callable_tools] == ["weather"]
    auto = read(tools=[WEATHER, other], tool_choice=allowed_tools("auto", "other"), parallel_tool_calls=False)
    assert auto.tool_choice == ToolChoice(mode="auto", parallel=False, allowed=("other",))
    assert read(tools=[WEATHER], tool_choice=allowed_tools("auto")).tool_choice.mode == "none"
    listless = {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}
    assert read(tools=[WEATHER], tool_choice=listless).tool_choice == ToolChoice(mode="required")
    searching = allowed_tools("auto", tools=[{"type": "web_search"}])
    assert read(tools=[WEATHER, {"type": "web_search"}], tool_choice=searching).tool_choice.mode == "none"
    with pytest.raises(InvalidValue, match="no tool named 'nothing'") as rejected:
        read(tools=[WEATHER], tool_choice=allowed_tools("auto", "nothing"))
    assert rejected.value.param == "tool_choice.allowed_tools.tools[0].name"


def test_upstream_request_has_only_the_allowed_tools() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    request = read(tools=[WEATHER, other], tool_choice=allowed_tools("required", "weather"))
    body = msgspec.json.decode(build(request))
    assert [tool["function"]["name"] for tool in body["tools"]] == ["weather"]
    assert body["tool_choice"] == "required"


def test_upstream_request_parses_back_to_the_same_request() -> None:
    request = read(
        messages=[
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "https://u"}],
            },
            {
                "role": "assistant",
                "reasoning": "hm",
                "content": "x",
                "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ],
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": True, "x": 1},
        temperature=0.5,
        stop=["a", "b"],
        logit_bias={"1": 2},
        n=3,
        logprobs=True,
        top_logprobs=2,
        seed=3,
        user="me",
        stream=True,
        stream_options={"include_usage": True},
    )
    assert parse(build(request)) == request


def test_request_for_no_tokens_is_not_sent_to_another_server() -> None:
    with pytest.raises(InvalidValue, match="at least one token"):
        build(read(n_predict=0))


def test_upstream_request_always_includes_usage() -> None:
    assert parse(build(read(stream=True))).include_usage is True


def test_parses_a_message_to_continue() -> None:
    request = read(continue_final_message=True, add_generation_prompt=False)
    assert request.template_args == {"continue_final_message": True, "add_generation_prompt": False}
    assert parse(build(request)) == request


def test_rejects_more_tools_than_a_model_can_choose_from() -> None:
    functions = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(MAX_TOOLS + 1)]
    assert len(read(tools=functions[:-1]).tools) == MAX_TOOLS
    with pytest.raises(InvalidValue, match=f"at most {MAX_TOOLS}") as rejected:
        read(tools=functions)
    assert rejected.value.param == "tools"


def test_repeated_allowed_tool_counts_once() -> None:
    request = read(tools=[WEATHER], tool_choice=allowed_tools("auto", "weather", "weather"))
    assert request.tool_choice.allowed == ("weather",)
