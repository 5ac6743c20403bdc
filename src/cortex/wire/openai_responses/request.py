"""Parses a responses body into a `GenerateRequest`. Fields that we use are validated, others are ignored."""

from __future__ import annotations

from typing import Any

from cortex.wire import body as wire_body
from cortex.wire.body import LARGEST_COUNT, LARGEST_INTEGER, Fields
from cortex.wire.openai_chat.request import read_function, resolve_tool_choice, restrict_tool_choice
from cortex.wire.openai_responses.items import read_input
from cortex.wire.requests import GenerateRequest, Message, OutputFormat, Sampling, Text, Tool, ToolChoice
from cortex.wire.sampling import MAX_TEMPERATURE, MAX_TOP_LOGPROBS, read_effort, read_response_format, read_stops

ECHOED = (
    "instructions",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "text",
    "tool_choice",
    "tools",
    "truncation",
    "user",
)
"""Request fields that the response object repeats as the client wrote them."""


def parse(body: bytes) -> GenerateRequest:
    """Raises `MalformedJSON`, `MissingModel`, `InvalidValue` or `UnsupportedModality`."""
    fields = wire_body.parse(body)
    model = fields.model()
    _reject_stored_state(fields)
    dropped: list[str] = []
    messages = read_input(fields, dropped)
    if instructions := fields.text("instructions"):
        messages.insert(0, Message(role="system", parts=(Text(text=instructions),)))
    tools = _read_tools(fields, dropped)
    reasoning = fields.object("reasoning")
    template_args = fields.mapping("chat_template_kwargs") or {}
    return GenerateRequest(
        model=model,
        messages=tuple(messages),
        tools=tools,
        tool_choice=_read_tool_choice(fields, tools, dropped),
        output=_read_output(fields),
        thinking=read_effort(reasoning.text("effort") if reasoning else None),
        sampling=_read_sampling(fields),
        stream=fields.flag("stream") or False,
        include_usage=True,
        template_args=template_args,
        user=fields.text("user"),
        metadata={name: fields.raw(name) for name in ECHOED if name in fields},
        dropped_tools=tuple(dropped),
    )


def _reject_stored_state(fields: Fields) -> None:
    """Responses are not stored, so that a request cannot refer to an earlier one."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if name in fields:
            raise fields.invalid(name, "responses are not stored here; send the whole conversation in 'input'")
    if fields.flag("background"):
        raise fields.invalid("background", "responses are not stored here; use 'stream' for long responses")


def _read_sampling(fields: Fields) -> Sampling:
    top_logprobs = fields.integer("top_logprobs", low=0, high=MAX_TOP_LOGPROBS) or 0
    wanted = top_logprobs > 0 or "message.output_text.logprobs" in fields.texts("include")
    return Sampling(
        temperature=fields.number("temperature", low=0, high=MAX_TEMPERATURE),
        top_p=fields.number("top_p", low=0, high=1),
        top_k=fields.integer("top_k", low=0, high=LARGEST_COUNT),
        min_p=fields.number("min_p", low=0, high=1),
        presence_penalty=fields.number("presence_penalty", low=-2, high=2),
        frequency_penalty=fields.number("frequency_penalty", low=-2, high=2),
        seed=fields.integer("seed", low=-LARGEST_INTEGER, high=LARGEST_INTEGER),
        max_tokens=fields.integer("max_output_tokens", low=1, high=LARGEST_COUNT),
        stop=read_stops(fields, "stop"),
        logprobs=wanted,
        top_logprobs=top_logprobs,
    )


def _read_output(fields: Fields) -> OutputFormat | None:
    text = fields.object("text")
    output = text.object("format") if text else None
    return read_response_format(output) if output else None


def _read_tools(fields: Fields, dropped: list[str]) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for tool in fields.objects("tools"):
        kind = tool.text("type") or "function"
        if kind == "function":
            tools.append(read_function(tool.object("function") or tool))
        else:
            dropped.append(kind)
    return tuple(tools)


def _read_tool_choice(fields: Fields, tools: tuple[Tool, ...], dropped: list[str]) -> ToolChoice:
    parallel = fields.flag("parallel_tool_calls") is not False
    mode: Any = fields.raw("tool_choice")
    name: str | None = None
    if isinstance(mode, dict):
        choice = fields.object("tool_choice")
        assert choice is not None
        if choice.text("type") == "allowed_tools":
            resolved = resolve_tool_choice(fields, choice.text("mode") or "auto", None, parallel, tools, dropped)
            return restrict_tool_choice(resolved, choice, tools)
        name, mode = choice.text("name"), "named"
    return resolve_tool_choice(fields, str(mode or "auto"), name, parallel, tools, dropped)
