"""Parses a responses body into a `GenerateRequest`. The field table has the treatment of each field."""

from __future__ import annotations

from typing import Any

import msgspec

from cortex.wire.dialects.openai_responses.client_tools import SHAPES, add_tool, check_names, full_name
from cortex.wire.dialects.openai_responses.fields import FIELDS, TOOLS
from cortex.wire.dialects.openai_responses.items import read_input
from cortex.wire.errors import shorten
from cortex.wire.fields.body import LARGEST_COUNT, Fields
from cortex.wire.fields.prediction import read_prediction
from cortex.wire.fields.request_class import TIER, asked_class
from cortex.wire.fields.sampling import (
    MAX_TOP_LOGPROBS,
    check_verbosity,
    read_effort,
    read_output_format,
    read_sampling,
    read_stream_options,
    read_truncation,
)
from cortex.wire.fields.tools import ToolList
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import GenerateRequest, Message, Sampling, Text, Thinking, ToolChoice
from cortex.wire.tenant import read_tenant

ECHOED = (
    "instructions",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "text",
    "tool_choice",
    "tools",
    "truncation",
    "user",
)
"""Request fields that the response object repeats as the client wrote them."""

INCLUDABLE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
)
"""What `include` may name. Only the last has anything to add here."""


def read_summary(fields: Fields) -> RequestSummary:
    """Raises `MissingModel` or `InvalidValue`."""
    limit = fields.integer("max_output_tokens", low=1, high=LARGEST_COUNT)
    return msgspec.structs.replace(
        read_state(fields), stream=fields.flag("stream") or False, completion_limit=limit, num_choices=1
    )


def read_state(fields: Fields) -> RequestSummary:
    """The summary of a request that generates nothing: its model and what it refers to. Raises `MissingModel` or
    `InvalidValue`."""
    conversation = fields.raw("conversation")
    if isinstance(conversation, dict):
        conversation = Fields(conversation, "conversation").required_text("id")
    elif conversation is not None:
        conversation = fields.required_text("conversation")
    previous = fields.text("previous_response_id")
    if conversation is not None and previous is not None:
        raise fields.invalid("conversation", "use either it or 'previous_response_id', not both")
    return RequestSummary(
        fields.model(),
        False,
        0,
        1,
        store=fields.flag("store"),
        previous_response_id=previous,
        background=fields.flag("background") or False,
        conversation_id=conversation,
    )


def parse(body: bytes) -> GenerateRequest:
    """Raises `MalformedJSON`, `MissingModel`, `InvalidValue` or `UnsupportedModality`."""
    fields = FIELDS.read(body)
    summary = read_summary(fields)
    noted: list[str] = []
    messages = read_input(fields, noted)
    if instructions := fields.text("instructions"):
        messages.insert(0, Message(role="system", parts=(Text(text=instructions),)))
    found = _read_tools(fields)
    reasoning = fields.object("reasoning")
    text = fields.object("text")
    if text is not None:
        check_verbosity(text)
    read_stream_options(fields)
    return GenerateRequest(
        model=summary.model,
        messages=tuple(messages),
        truncate_prompt_tokens=read_truncation(fields),
        tools=tuple(found.tools),
        tool_choice=_read_tool_choice(fields, found),
        output=read_output_format(fields, text.object("format") if text else None),
        prediction=read_prediction(fields),
        thinking=_read_thinking(reasoning),
        sampling=_read_sampling(fields, summary),
        stream=summary.stream,
        include_usage=True,
        template_args=fields.mapping("chat_template_kwargs") or {},
        user=fields.text("user"),
        metadata=_read_echoed(fields),
        truncate=_read_truncation(fields),
        dropped_tools=(*noted, *found.dropped),
        unenforced=tuple(found.unenforced),
        ignored_fields=fields.unknown,
        tenant=read_tenant(fields),
        request_class=asked_class(fields, FIELDS.envelope),
        echoes_tier=TIER in fields,
    )


def _read_echoed(fields: Fields) -> dict[str, Any]:
    """The fields that the response repeats, with the tools that are in force."""
    echoed = {name: fields.raw(name) for name in ECHOED if name in fields}
    if "tools" in echoed:
        known = {kind.name for kind in TOOLS}
        echoed["tools"] = [tool for tool in echoed["tools"] if tool.get("type", "function") in known]
    return echoed


def _read_thinking(reasoning: Fields | None) -> Thinking:
    if reasoning is None:
        return Thinking()
    thinking = read_effort(reasoning, "effort")
    for name in ("summary", "generate_summary"):
        if (style := reasoning.text(name)) is not None:
            if style not in ("auto", "concise", "detailed"):
                raise reasoning.invalid(name, "it must be `auto`, `concise` or `detailed`")
            return msgspec.structs.replace(thinking, summarized=True)
    return thinking


def _read_truncation(fields: Fields) -> bool:
    given = fields.text("truncation") or "disabled"
    if given not in ("auto", "disabled"):
        raise fields.invalid("truncation", "it must be `auto` or `disabled`")
    return given == "auto"


def _read_sampling(fields: Fields, summary: RequestSummary) -> Sampling:
    top_logprobs = fields.integer("top_logprobs", low=0, high=MAX_TOP_LOGPROBS) or 0
    included = fields.texts("include")
    for name in included:
        if name not in INCLUDABLE:
            raise fields.invalid("include", f"'{shorten(name)}' is not known; use {', '.join(INCLUDABLE)}")
    wanted = top_logprobs > 0 or "message.output_text.logprobs" in included
    return msgspec.structs.replace(
        read_sampling(fields),
        max_tokens=summary.completion_limit,
        logprobs=wanted,
        top_logprobs=top_logprobs,
    )


def _read_tools(fields: Fields) -> ToolList:
    found = ToolList()
    for tool in fields.objects("tools"):
        add_tool(found, tool, tool.text("type") or "function")
    check_names(found, fields)
    return found


def _read_tool_choice(fields: Fields, found: ToolList) -> ToolChoice:
    parallel = fields.flag("parallel_tool_calls") is not False
    if not isinstance(fields.raw("tool_choice"), dict):
        return found.resolve(fields, fields.text("tool_choice") or "auto", None, parallel=parallel)
    choice = fields.object("tool_choice")
    assert choice is not None
    match choice.text("type"):
        case "allowed_tools":
            resolved = found.resolve(fields, choice.text("mode") or "auto", None, parallel=parallel)
            return found.restrict(resolved, choice)
        case "function" | "custom" | None:
            name = choice.text("name")
            name = full_name(choice.text("namespace"), name) if name else None
            return found.resolve(fields, "named", name, parallel=parallel)
        case kind if kind in SHAPES:
            return found.resolve(fields, "named", kind, parallel=parallel)
        case other:
            raise fields.invalid("tool_choice", f"tools of type '{shorten(other)}' do not run here; name a function")
