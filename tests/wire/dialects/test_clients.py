"""Requests in the shape that agents send them, with every field they add; texts and schemas shortened."""

from __future__ import annotations

from typing import Any

import msgspec

from cortex.wire.dialects import anthropic_messages, openai_chat, openai_responses
from cortex.wire.requests import Reasoning, Text, Thinking, ToolCall, ToolResult

EPHEMERAL = {"type": "ephemeral"}
CLAUDE_CODE: dict[str, Any] = {
    "model": "claude-sonnet-4-5",
    "max_tokens": 32000,
    "stream": True,
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0"}'},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.ac5; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "\nUse tools.", "cache_control": EPHEMERAL},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}},
        {"name": "Read", "description": "Reads.", "input_schema": {"type": "object"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday.\n</system-reminder>"},
                {"type": "text", "text": "print it"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Let me.", "signature": "unsigned"},
                {"type": "text", "text": "Calling."},
                {"type": "tool_use", "id": "call_1", "name": "Bash", "input": {"command": "echo 42"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "tool_use_id": "call_1",
                    "type": "tool_result",
                    "content": "42",
                    "is_error": False,
                    "cache_control": EPHEMERAL,
                }
            ],
        },
    ],
}

CODEX: dict[str, Any] = {
    "model": "agent",
    "stream": True,
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0",
    "client_metadata": {"session_id": "0"},
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False, "parameters": {}},
        {"type": "namespace", "name": "multi_agent_v1", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "web_search", "external_web_access": True},
    ],
    "input": [
        {
            "type": "message",
            "id": "msg_0",
            "role": "developer",
            "content": [{"type": "input_text", "text": "You code."}],
        },
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Skills."}]},
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "print it"}]},
        {
            "type": "reasoning",
            "id": "rs_0",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Let me."}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "status": "completed",
            "id": "msg_3",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Calling.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_0",
            "name": "exec_command",
            "arguments": '{"cmd": "echo 42"}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "id": "fco_0", "call_id": "call_1", "output": "42"},
    ],
}


def test_parses_a_claude_code_request() -> None:
    request = anthropic_messages.parse(anthropic_messages.strip_billing_header(msgspec.json.encode(CLAUDE_CODE)))
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "tool"]
    assert request.messages[0].parts == (Text(text="You are an agent."), Text(text="\nUse tools."))
    assert request.messages[2].parts == (
        Reasoning(text="Let me.", signature="unsigned"),
        Text(text="Calling."),
        ToolCall(id="call_1", name="Bash", arguments='{"command":"echo 42"}'),
    )
    assert request.messages[3].parts == (ToolResult(call_id="call_1", parts=(Text(text="42"),)),)
    assert [tool.name for tool in request.tools] == ["Bash", "Read"]
    assert request.thinking == Thinking(enabled=True, budget_tokens=31999)
    assert not request.dropped_tools


def test_parses_a_codex_request() -> None:
    request = openai_responses.parse(msgspec.json.encode(CODEX))
    assert [message.role for message in request.messages] == ["developer", "developer", "user", "assistant", "tool"]
    assert request.messages[3].parts == (
        Reasoning(text="Let me."),
        Text(text="Calling."),
        ToolCall(id="call_1", name="exec_command", arguments='{"cmd": "echo 42"}'),
    )
    assert [tool.name for tool in request.tools] == ["exec_command", "multi_agent_v1__spawn"]
    assert request.dropped_tools == ("web_search",)
    assert request.thinking == Thinking(summarized=True)


def test_both_can_be_sent_to_a_chat_only_server() -> None:
    for request in (
        anthropic_messages.parse(msgspec.json.encode(CLAUDE_CODE)),
        openai_responses.parse(msgspec.json.encode(CODEX)),
    ):
        sent = openai_chat.parse(openai_chat.build(request))
        assert [message.role for message in sent.messages] == [message.role for message in request.messages]
        assert [tool.name for tool in sent.tools] == [tool.name for tool in request.tools]
        assert [part for part in sent.messages[-2].parts if isinstance(part, ToolCall)] == [
            part for part in request.messages[-2].parts if isinstance(part, ToolCall)
        ]
        assert sent.messages[-1] == request.messages[-1]
