from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.openai_responses import parse
from cortex.wire.errors import InvalidValue
from cortex.wire.requests import (
    GenerateRequest,
    Message,
    OutputFormat,
    PicturePart,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)


def read(**fields: Any) -> GenerateRequest:
    return parse(msgspec.json.encode({"model": "m", "input": "hello", **fields}))


def test_parses_string_input_with_instructions() -> None:
    assert read(instructions="be brief").messages == (
        Message(role="system", parts=(Text(text="be brief"),)),
        Message(role="user", parts=(Text(text="hello"),)),
    )


def test_joins_items_of_one_assistant_turn() -> None:
    request = read(
        input=[
            {"role": "developer", "content": "rules"},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "hi"},
                    {"type": "input_image", "image_url": "https://example.org/x.png", "detail": "auto"},
                ],
            },
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "calling"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}'},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": {"city": "Bonn"}},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
            {"role": "assistant", "content": "done"},
            {"role": "assistant", "content": "really"},
            {"type": "web_search_call", "id": "ws"},
        ]
    )
    assert request.messages == (
        Message(role="developer", parts=(Text(text="rules"),)),
        Message(
            role="user",
            parts=(Text(text="hi"), PicturePart(url="https://example.org/x.png", param="input[1].content[1]")),
        ),
        Message(
            role="assistant",
            parts=(
                Reasoning(text="hm"),
                Text(text="calling"),
                ToolCall(id="c1", name="weather", arguments='{"city": "Ulm"}'),
                ToolCall(id="c2", name="weather", arguments='{"city":"Bonn"}'),
            ),
        ),
        Message(role="tool", parts=(ToolResult(call_id="c1", parts=(Text(text="rain"),)),)),
        Message(role="tool", parts=(ToolResult(call_id="c2", parts=(Text(text="sun"),)),)),
        Message(role="assistant", parts=(Reasoning(text="so"), Text(text="done"))),
        Message(role="assistant", parts=(Text(text="really"),)),
    )
    assert request.dropped_tools == ("web_search_call",)


@pytest.mark.parametrize("kind", ["computer_call", "mcp_call", "new"])
def test_rejects_items_that_the_model_would_not_see(kind: str) -> None:
    with pytest.raises(InvalidValue, match=f"'{kind}' are not supported") as caught:
        read(input=[{"role": "user", "content": "x"}, {"type": kind, "id": "i"}])
    assert caught.value.param == "input[1].type"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "mcp", "server_label": "s"}])
def test_rejects_a_choice_among_tools_that_do_not_run_here(choice: Any) -> None:
    with pytest.raises(InvalidValue, match="mcp"):
        read(tools=[{"type": "mcp"}], tool_choice=choice)


def test_repeats_only_the_tools_that_are_in_force() -> None:
    weather = {"type": "function", "name": "weather"}
    patch = {"type": "custom", "name": "patch"}
    request = read(tools=[weather, {"type": "computer"}, patch, {"type": "file_search"}])
    assert request.metadata["tools"] == [weather, patch]
    assert request.dropped_tools == ("computer", "file_search")


def test_shows_a_custom_tool_to_the_model_as_a_function_with_one_text() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    tools = [{"type": "custom", "name": "patch", "description": "Edits.", "format": grammar}]
    request = read(tools=tools, tool_choice={"type": "custom", "name": "patch"})
    (tool,) = request.tools
    assert tool.is_custom
    assert tool.parameters["required"] == ["input"]
    assert tool.parameters["additionalProperties"] is False
    assert tool.description == 'Edits.\n\nThe input must match this Lark grammar:\nstart: "x"'
    assert request.unenforced == ("tools[0].format",)
    assert request.tool_choice == ToolChoice(mode="named", name="patch", parallel=False)
    for format, param in (({"type": "json"}, "type"), ({"type": "grammar", "syntax": "ebnf"}, "syntax")):
        with pytest.raises(InvalidValue) as caught:
            read(tools=[{"type": "custom", "name": "patch", "format": format}])
        assert caught.value.param == f"tools[0].format.{param}"


def test_drops_and_lists_unsupported_tools() -> None:
    weather = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
    request = read(
        tools=[weather, {"type": "web_search"}, {"type": "image_generation"}],
        tool_choice={"type": "function", "name": "weather"},
    )
    assert request.tools == (Tool(name="weather", parameters={"type": "object"}, strict=True),)
    assert request.dropped_tools == ("web_search", "image_generation")
    assert request.tool_choice == ToolChoice(mode="named", name="weather", parallel=False)


def test_parses_options() -> None:
    request = read(
        max_output_tokens=9,
        reasoning={"effort": "high", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"a": 1}, "strict": True}, "verbosity": "low"},
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        store=False,
        metadata={"k": "v"},
        top_logprobs=3,
    )
    assert request.sampling.max_tokens == 9
    assert request.sampling.logprobs is True
    assert request.output == OutputFormat(kind="json_schema", schema={"a": 1}, param="text.format")
    assert request.thinking.effort == "high"
    assert request.metadata["metadata"] == {"k": "v"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("background", True),
        ("input", None),
        ("input", []),
        ("max_output_tokens", 0),
        ("temperature", -1),
    ],
)
def test_rejects_stored_state_and_unsupported_values(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        read(**{field: value})
    assert caught.value.param == field


def test_rejects_a_reference_to_a_stored_item() -> None:
    with pytest.raises(InvalidValue, match="send the item itself"):
        read(input=[{"type": "item_reference", "id": "msg_1"}])


def test_allowed_tools_restrict_the_choice() -> None:
    tools = [{"type": "function", "name": name} for name in ("weather", "other")]
    allowed = [{"type": "function", "name": "weather"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    request = read(tools=[*tools, {"type": "web_search"}], tool_choice=choice)
    assert request.tool_choice == ToolChoice(mode="required", allowed=("weather",))
    assert [tool.name for tool in request.callable_tools] == ["weather"]
