from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.anthropic_messages import parse
from cortex.wire.errors import InvalidValue, UnsupportedModality
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

BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abc;"}
HELLO = [{"role": "user", "content": "hello"}]


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "max_tokens": 10, "messages": HELLO, **fields})


def read(**fields: Any) -> GenerateRequest:
    return parse(body(**fields))


def test_parses_a_conversation_with_every_kind_of_block() -> None:
    request = read(
        system=[
            {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "be kind"},
        ],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
                    {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}},
                    {"type": "document", "source": {"type": "text", "data": "a text"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "I call"},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "oops", "is_error": True},
                    {"type": "text", "text": "and now?"},
                ],
            },
            {"role": "system", "content": "a reminder"},
        ],
    )
    assert request.messages == (
        Message(role="system", parts=(Text(text="be brief"), Text(text="be kind"))),
        Message(
            role="user",
            parts=(
                Text(text="look"),
                PicturePart(data=b"\0", media_type="image/png", param="messages[0].content[1]"),
                PicturePart(url="https://example.org/x.png", param="messages[0].content[2]"),
                Text(text="a text"),
            ),
        ),
        Message(
            role="assistant",
            parts=(
                Reasoning(text="hm", signature="s"),
                Text(text="I call"),
                ToolCall(id="t1", name="weather", arguments='{"city":"Ulm"}'),
            ),
        ),
        Message(role="tool", parts=(ToolResult(call_id="t1", parts=(Text(text="rain"),)),)),
        Message(role="tool", parts=(ToolResult(call_id="t2", parts=(Text(text="oops"),), is_error=True),)),
        Message(role="user", parts=(Text(text="and now?"),)),
        Message(role="system", parts=(Text(text="a reminder"),)),
    )


def test_parsing_keeps_the_billing_line() -> None:
    system = [BILLING, {"type": "text", "text": "be brief"}]
    assert read(system=system).messages[0].parts == (Text(text=BILLING["text"]), Text(text="be brief"))


def test_parses_tools_and_tool_choice() -> None:
    weather = {"name": "weather", "description": "d", "input_schema": {"type": "object"}}
    request = read(
        tools=[weather, {"type": "code_execution_20250825", "name": "code_execution"}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert request.tools == (Tool(name="weather", description="d", parameters={"type": "object"}),)
    assert request.tool_choice == ToolChoice(mode="required", parallel=False)
    assert request.dropped_tools == ("code_execution_20250825",)
    assert read(tools=[weather], tool_choice={"type": "tool", "name": "weather"}).tool_choice.name == "weather"
    assert read(tools=[weather], tool_choice={"type": "none"}).tool_choice.mode == "none"
    with pytest.raises(InvalidValue) as caught:
        read(tools=[weather], tool_choice={"type": "tool", "name": "wether"})
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, Thinking(shown=False, off_by_default=True)),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2001},
            Thinking(enabled=True, budget_tokens=2000),
        ),
        ({"thinking": {"type": "disabled"}}, Thinking(enabled=False, shown=False)),
        ({"thinking": {"type": "adaptive"}}, Thinking()),
        ({"output_config": {"effort": "high"}}, Thinking(effort="high", shown=False, off_by_default=True)),
    ],
)
def test_parses_thinking(fields: dict[str, Any], thinking: Thinking) -> None:
    assert read(**fields).thinking == thinking


def test_parses_output_format() -> None:
    output = {"type": "json_schema", "schema": {"a": 1}}
    for body, param in (
        ({"output_config": {"format": output}}, "output_config.format"),
        ({"output_format": output}, "output_format"),
    ):
        assert read(**body).output == OutputFormat(kind="json_schema", schema={"a": 1}, param=param)


def test_parses_sampling_and_user() -> None:
    request = read(stop_sequences=["END"], temperature=1, top_k=5, metadata={"user_id": "u"}, service_tier="auto")
    assert (request.sampling.stop, request.sampling.max_tokens, request.user) == (("END",), 10, "u")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
    ],
)
def test_rejects_invalid_value_and_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("kind", ["server_tool_use", "web_search_tool_result", "container_upload", "mcp_tool_use"])
def test_rejects_blocks_that_the_model_would_not_see(kind: str) -> None:
    blocks = [{"type": "text", "text": "x"}, {"type": kind, "id": "t9"}]
    with pytest.raises(InvalidValue, match=kind) as caught:
        read(messages=[*HELLO, {"role": "assistant", "content": blocks}])
    assert caught.value.param == "messages[1].content[1].type"


@pytest.mark.parametrize("choice", [None, {"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_rejects_a_request_whose_only_tools_run_on_a_server(choice: Any) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    with pytest.raises(InvalidValue, match="web_search_20250305 do not run here"):
        read(tools=[search], tool_choice=choice)
    assert read(tools=[search], tool_choice={"type": "none"}).dropped_tools == ("web_search_20250305",)


def test_rejects_pdf_instead_of_dropping_it() -> None:
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
    with pytest.raises(UnsupportedModality):
        read(messages=[{"role": "user", "content": [pdf]}])


def test_parses_token_count_request_without_max_tokens() -> None:
    counted = parse(msgspec.json.encode({"model": "m", "messages": HELLO}), generates=False)
    assert counted.messages == read().messages


def test_continues_a_conversation_that_ends_with_the_assistant() -> None:
    prefilled = read(messages=[*HELLO, {"role": "assistant", "content": "The answer is"}])
    assert prefilled.template_args == {"continue_final_message": True}
    assert read().template_args == {}
    called = [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]
    assert read(messages=called).template_args == {}


def test_rejects_a_conversation_without_content() -> None:
    with pytest.raises(InvalidValue, match="no message has content") as caught:
        read(messages=[{"role": "system", "content": []}])
    assert caught.value.param == "messages"
