"""Bodies that the API of a dialect rejects are rejected here: a client's mistake must not stay hidden."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import InvalidValue

from ..fields.test_numbers import BODIES

USAGE = {"include_usage": True}
CALL = {"type": "function_call", "call_id": "1", "name": "f"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def said(role: str) -> list[dict[str, str]]:
    return [{"role": role, "content": "hi"}]


def called(arguments: object) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def thinking(budget: int) -> dict[str, Any]:
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}


CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("openai_chat", {"stream_options": USAGE}, "stream_options"),
    ("openai_chat", {"stream_options": USAGE, "stream": False}, "stream_options"),
    ("openai_chat", {"stream_options": USAGE, "stream": True}, None),
    ("openai_chat", {"stream_options": None}, None),
    ("openai_completions", {"stream_options": USAGE}, "stream_options"),
    ("openai_completions", {"stream_options": USAGE, "stream": True}, None),
    ("openai_responses", {"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ("openai_responses", {"stream_options": {"include_obfuscation": False}, "stream": True}, None),
    ("openai_chat", {"messages": said("robot")}, "messages[0].role"),
    *(("openai_chat", {"messages": said(role)}, None) for role in ("system", "developer", "user", "assistant", "tool")),
    ("openai_responses", {"input": said("robot")}, "input[0].role"),
    *(("openai_responses", {"input": said(role)}, None) for role in ("system", "developer", "user", "assistant")),
    ("anthropic_messages", {"messages": said("robot")}, "messages[0].role"),
    *(("anthropic_messages", {"messages": said(role)}, None) for role in ("system", "user", "assistant")),
    ("anthropic_messages", {"messages": said("developer")}, "messages[0].role"),
    *(
        (dialect, {"messages": [{"role": role, **content}]}, "messages[0].content")
        for dialect, roles in (
            ("openai_chat", ("system", "user")),
            ("anthropic_messages", ("system", "user", "assistant")),
        )
        for role in roles
        for content in ({}, {"content": None})
    ),
    ("openai_chat", {"messages": [{"role": "user", "content": ""}]}, None),
    ("openai_chat", {"messages": [{"role": "assistant", "content": None}]}, None),
    *(
        ("openai_chat", {"messages": [called(arguments)]}, param)
        for arguments, param in (
            (5, "messages[0].tool_calls[0].function.arguments"),
            (["x"], "messages[0].tool_calls[0].function.arguments"),
            ("{}", None),
            ({"x": 1}, None),
            (None, None),
        )
    ),
    ("openai_responses", {"input": [{**CALL, "arguments": 5}]}, "input[0].arguments"),
    ("ollama_chat", {"messages": said("robot")}, None),
    ("ollama_chat", {"messages": said("User")}, None),
    ("openai_chat", {"response_format": {}}, "response_format.type"),
    ("openai_chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        "openai_chat",
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
    ),
    ("openai_responses", {"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ("openai_completions", {"response_format": {}}, "response_format.type"),
    ("openai_responses", {"text": {"format": {}}}, "text.format.type"),
    ("openai_responses", {"text": {}}, None),
    ("anthropic_messages", {"output_config": {"format": {}}}, "output_config.format.type"),
    ("openai_chat", {"reasoning_effort": "extreme"}, "reasoning_effort"),
    *(("openai_chat", {"reasoning_effort": effort}, None) for effort in ("none", "minimal", "low", "xhigh", "max")),
    ("openai_responses", {"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
    ("openai_responses", {"reasoning": {"effort": "high"}}, None),
    ("anthropic_messages", {"output_config": {"effort": "minimal"}}, "output_config.effort"),
    ("anthropic_messages", {"output_config": {"effort": "max"}}, None),
    ("openai_chat", {"verbosity": "extreme"}, "verbosity"),
    ("openai_chat", {"verbosity": "high"}, None),
    ("openai_responses", {"text": {"verbosity": "extreme"}}, "text.verbosity"),
    ("openai_responses", {"text": {"verbosity": "medium"}}, None),
    ("openai_responses", {"include": ["everything"]}, "include"),
    ("openai_responses", {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}, None),
    ("anthropic_messages", {"max_tokens": None}, "max_tokens"),
    ("anthropic_messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ("anthropic_messages", {"tools": [TOOL, TOOL]}, "tools"),
    ("anthropic_messages", {"tools": [TOOL, {**TOOL, "name": "g"}]}, None),
    ("anthropic_messages", {"stop_sequences": "x"}, "stop_sequences"),
    ("anthropic_messages", {"stop_sequences": ["x", ""]}, None),
    ("anthropic_messages", {"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ("anthropic_messages", {"thinking": {"type": "adaptive"}}, None),
    ("anthropic_messages", {"max_tokens": 9, **thinking(9)}, "thinking.budget_tokens"),
    ("anthropic_messages", {"max_tokens": 9, **thinking(8)}, None),
    ("anthropic_messages", {"max_tokens": 9, **thinking(99), "tools": [TOOL]}, None),  # a budget of several calls
]


@pytest.mark.parametrize(("dialect", "fields", "param"), CASES)
def test_body_is_rejected_as_its_api_does(dialect: str, fields: dict[str, Any], param: str | None) -> None:
    body = msgspec.json.encode({"model": "m", **BODIES[dialect], **fields})
    if param is None:
        DIALECTS[dialect].parse(body)
        return
    with pytest.raises(InvalidValue) as caught:
        DIALECTS[dialect].parse(body)
    assert caught.value.param == param


def test_role_of_ollama_is_read_in_any_case() -> None:
    body = msgspec.json.encode({"model": "m", "messages": said("System")})
    assert DIALECTS["ollama_chat"].parse(body).messages[0].role == "system"
