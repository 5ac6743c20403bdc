"""Tools that the client runs, of types that OpenAI publishes: what the model sees, and what the client gets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.openai_responses import parse
from cortex.wire.dialects.openai_responses.stream import Encoder, fold
from cortex.wire.errors import InvalidValue
from cortex.wire.events import AnyEvent, Finish, Start, ToolCallDelta, ToolCallStart, ToolCallStop, Usage
from cortex.wire.requests import GenerateRequest, Text, ToolCall, ToolChoice, ToolResult

NAMESPACE = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "The user's files.",
    "tools": [
        {"type": "function", "name": "read", "description": "Reads.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "patch"},
    ],
}
TOOLS = [NAMESPACE, {"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]


def read(**fields: Any) -> GenerateRequest:
    return parse(msgspec.json.encode({"model": "m", "input": "x", "tools": TOOLS} | fields))


def respond(name: str, arguments: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The item of a call in the whole response, and the events of a stream."""
    events: list[AnyEvent] = [
        Start(id="id", model="m", created=1, prompt_tokens=2, cached_tokens=0),
        ToolCallStart(call=0, id="call_1", name=name),
        *(ToolCallDelta(call=0, arguments=arguments[at : at + 7]) for at in range(0, len(arguments), 7)),
        ToolCallStop(call=0),
        Finish(reason="tool_calls", usage=Usage(prompt_tokens=2, completion_tokens=3)),
    ]
    asked = read()
    encoder = Encoder(asked, id="resp_1", created=1, model="m")
    frames = b"".join(encoder.encode(event) for event in events).decode()
    streamed = [msgspec.json.decode(line[6:]) for line in frames.splitlines() if line.startswith("data: ")]
    (item,) = msgspec.json.decode(fold(events, asked, id="resp_1", created=1, model="m"))["output"]
    assert streamed[-1]["response"]["output"] == [item]
    (done,) = (event for event in streamed if event["type"] == "response.output_item.done")
    (added,) = (event for event in streamed if event["type"] == "response.output_item.added")
    assert done["item"] == item
    assert added["item"]["id"] == item["id"]
    assert added["item"]["type"] == item["type"]
    return item, streamed


def test_the_model_sees_functions() -> None:
    request = read()
    assert [tool.name for tool in request.tools] == [
        "mcp__files__read",
        "mcp__files__patch",
        "local_shell",
        "shell",
        "apply_patch",
    ]
    assert request.tools[0].description == "mcp__files: The user's files.\n\nReads."
    assert not request.dropped_tools
    assert request.metadata["tools"] == TOOLS
    for tool in request.tools:
        assert set(tool.parameters.get("required", ())) <= set(tool.parameters.get("properties", ()))


def test_names_of_namespaces_must_be_distinct() -> None:
    same = {"type": "function", "name": "mcp__files__read"}
    with pytest.raises(InvalidValue, match="two tools are named 'mcp__files__read'"):
        read(tools=[same, NAMESPACE])


def test_a_container_of_the_vendor_does_not_run_here() -> None:
    tools = [NAMESPACE, {"type": "shell", "environment": {"type": "container_auto"}}]
    assert read(tools=tools).dropped_tools == ("shell",)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "local_shell"}, ToolChoice(mode="named", name="local_shell", parallel=False)),
        (
            {"type": "function", "namespace": "mcp__files", "name": "read"},
            ToolChoice(mode="named", name="mcp__files__read", parallel=False),
        ),
        (
            {"type": "allowed_tools", "tools": [{"type": "namespace", "name": "mcp__files"}, {"type": "shell"}]},
            ToolChoice(allowed=("mcp__files__read", "mcp__files__patch", "shell")),
        ),
    ],
)
def test_they_can_be_chosen(choice: dict[str, Any], expected: ToolChoice) -> None:
    assert read(tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        (
            "mcp__files__read",
            '{"path": "a"}',
            {"type": "function_call", "name": "read", "namespace": "mcp__files", "arguments": '{"path": "a"}'},
        ),
        (
            "mcp__files__patch",
            '{"input": "+a"}',
            {"type": "custom_tool_call", "name": "patch", "namespace": "mcp__files", "input": "+a"},
        ),
        (
            "local_shell",
            '{"command": ["ls", "-l"], "timeout_ms": 9}',
            {
                "type": "local_shell_call",
                "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 9},
            },
        ),
        (
            "local_shell",
            '{"command": "ls -l"}',
            {"type": "local_shell_call", "action": {"type": "exec", "command": ["bash", "-lc", "ls -l"], "env": {}}},
        ),
        (
            "shell",
            '{"commands": ["ls", "pwd"]}',
            {
                "type": "shell_call",
                "action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None},
            },
        ),
        (
            "apply_patch",
            '{"type": "create_file", "path": "a", "diff": "+x"}',
            {"type": "apply_patch_call", "operation": {"type": "create_file", "path": "a", "diff": "+x"}},
        ),
        (
            "apply_patch",
            '{"type": "delete_file", "path": "a", "diff": ""}',
            {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        ),
        (
            "apply_patch",
            '{"type": "update_file", "path": "a"}',
            {"type": "function_call", "name": "apply_patch", "arguments": '{"type": "update_file", "path": "a"}'},
        ),
        ("shell", '{"comm', {"type": "function_call", "name": "shell", "arguments": '{"comm'}),
    ],
)
def test_calls_are_items_of_their_type(name: str, arguments: str, expected: dict[str, Any]) -> None:
    item, _ = respond(name, arguments)
    assert item.pop("id")
    assert item == expected | {"call_id": "call_1", "status": "completed"}


def test_calls_and_results_come_back() -> None:
    called = [
        respond("mcp__files__read", '{"path":"a"}')[0],
        {"type": "function_call_output", "call_id": "call_1", "output": "1"},
        respond("local_shell", '{"command":["ls"]}')[0],
        {"type": "local_shell_call_output", "id": "call_1", "output": "2"},
        respond("shell", '{"commands":["ls"]}')[0],
        {"type": "shell_call_output", "call_id": "call_1", "output": [{"stdout": "3"}]},
        respond("apply_patch", '{"type":"delete_file","path":"a"}')[0],
        {"type": "apply_patch_call_output", "call_id": "call_1", "status": "failed", "output": "no file"},
    ]
    parts = [part for message in read(input=called).messages for part in message.parts]
    assert parts == [
        ToolCall(id="call_1", name="mcp__files__read", arguments='{"path":"a"}'),
        ToolResult(call_id="call_1", parts=(Text(text="1"),)),
        ToolCall(id="call_1", name="local_shell", arguments='{"command":["ls"]}'),
        ToolResult(call_id="call_1", parts=(Text(text="2"),)),
        ToolCall(id="call_1", name="shell", arguments='{"commands":["ls"]}'),
        ToolResult(call_id="call_1", parts=(Text(text='[{"stdout":"3"}]'),)),
        ToolCall(id="call_1", name="apply_patch", arguments='{"type":"delete_file","path":"a"}'),
        ToolResult(call_id="call_1", parts=(Text(text="no file"),), is_error=True),
    ]
