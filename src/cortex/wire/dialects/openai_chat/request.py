"""Parses a chat-completions body into a `GenerateRequest`. The field table has the treatment of each field."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from cortex.wire.dialects.openai_chat.fields import FIELDS
from cortex.wire.errors import UnsupportedModality, shorten
from cortex.wire.fields.body import LARGEST_COUNT, Fields
from cortex.wire.fields.custom_tools import arguments_of
from cortex.wire.fields.prediction import read_prediction
from cortex.wire.fields.request_class import TIER, asked_class
from cortex.wire.fields.sampling import (
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    check_verbosity,
    read_effort,
    read_limits,
    read_output_format,
    read_prompt_logprobs,
    read_sampling,
    read_stream_options,
    read_truncation,
)
from cortex.wire.fields.tools import ToolList, read_arguments, read_function
from cortex.wire.pictures.parts import PICTURE_PARTS, picture_urls, read_url_part
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import (
    GenerateRequest,
    Message,
    Part,
    PicturePart,
    Reasoning,
    Role,
    Sampling,
    Text,
    Thinking,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from cortex.wire.tenant import read_tenant

CONTINUE = "continue_final_message"
TEMPLATE_SWITCHES = (CONTINUE, "add_generation_prompt")

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def read_summary(fields: Fields) -> RequestSummary:
    """Raises `MissingModel` or `InvalidValue`."""
    max_tokens, n = read_limits(fields)
    newer = fields.integer("max_completion_tokens", low=1, high=LARGEST_COUNT)
    return RequestSummary(fields.model(), fields.flag("stream") or False, newer or max_tokens, n)


def read_counted_summary(fields: Fields) -> RequestSummary:
    """As `read_summary`, for requests that generate no text; those for pictures are charged for each."""
    return RequestSummary(fields.model(), False, 0, fields.integer("n", low=1, high=MAX_CHOICES) or 1)


def pictures(fields: Fields) -> Iterator[str]:
    """The URLs of all pictures that `parse` finds, unchecked."""
    for message in fields.objects("messages"):
        if isinstance(message.raw("content"), list):
            yield from picture_urls(message, "content")


def parse(body: bytes) -> GenerateRequest:
    """Raises `MalformedJSON`, `MissingModel`, `InvalidValue` or `UnsupportedModality`."""
    fields = FIELDS.read(body)
    summary = read_summary(fields)
    if not fields.array("messages"):
        raise fields.invalid("messages", "it is required and must hold at least one message")
    check_verbosity(fields)
    found = _read_tools(fields)
    as_functions = bool(fields.array("functions"))
    stream_options = read_stream_options(fields)
    template_args = _read_template_args(fields)
    return GenerateRequest(
        model=summary.model,
        messages=tuple(_read_message(message) for message in fields.objects("messages")),
        truncate_prompt_tokens=read_truncation(fields),
        tools=tuple(found.tools),
        tool_choice=_read_tool_choice(fields, found, as_functions=as_functions),
        as_functions=as_functions,
        output=read_output_format(fields, fields.object("response_format")),
        prediction=read_prediction(fields),
        thinking=_read_thinking(fields, template_args),
        sampling=_read_chat_sampling(fields, summary),
        stream=summary.stream,
        include_usage=(stream_options.flag("include_usage") or False) if stream_options else False,
        continuous_usage=(stream_options.flag("continuous_usage_stats") or False) if stream_options else False,
        return_token_ids=fields.flag("return_token_ids") or False,
        timings=fields.flag("timings_per_token") or False,
        template_args=template_args,
        user=fields.text("user"),
        tenant=read_tenant(fields),
        request_class=asked_class(fields, FIELDS.envelope),
        echoes_tier=TIER in fields,
        dropped_tools=tuple(found.dropped),
        unenforced=tuple(found.unenforced),
        ignored_fields=fields.unknown,
    )


def _read_chat_sampling(fields: Fields, summary: RequestSummary) -> Sampling:
    wanted = fields.flag("logprobs") or False
    top_logprobs = fields.integer("top_logprobs", low=0, high=MAX_TOP_LOGPROBS) or 0
    if top_logprobs and not wanted:
        raise fields.invalid("top_logprobs", "set 'logprobs' to true to get them")
    return msgspec.structs.replace(
        read_sampling(fields),
        max_tokens=summary.completion_limit,
        n=summary.num_choices,
        logprobs=wanted,
        top_logprobs=top_logprobs,
        prompt_logprobs=read_prompt_logprobs(fields),
    )


def _read_thinking(fields: Fields, template_args: dict[str, Any]) -> Thinking:
    """The template's switch takes precedence over `enable_thinking`, and that over the effort."""
    thinking = read_effort(fields, "reasoning_effort")
    switch = template_args.get("enable_thinking", template_args.get("thinking"))
    if not isinstance(switch, bool):
        switch = fields.flag("enable_thinking")
    budget = fields.integer("thinking_budget_tokens", low=-1, high=LARGEST_COUNT)
    if budget == 0 and switch is None:
        switch = False
    return msgspec.structs.replace(
        thinking,
        enabled=thinking.enabled if switch is None else switch,
        budget_tokens=budget if budget is not None and budget > 0 else None,
        shown=fields.flag("include_reasoning") is not False,
        inline=_is_inline(fields),
    )


def _is_inline(fields: Fields) -> bool:
    """Whether reasoning is to stay in the content."""
    form = fields.text("reasoning_format") or "auto"
    if form not in ("auto", "deepseek", "deepseek-legacy", "none"):
        raise fields.invalid("reasoning_format", f"'{shorten(form)}' is not known; use auto, deepseek or none")
    is_legacy = form == "deepseek-legacy" and fields.flag("stream") is True
    return form == "none" or is_legacy or fields.flag("separate_reasoning") is False


def _read_template_args(fields: Fields) -> dict[str, Any]:
    """`chat_template_kwargs`, and the two switches that self-hosted servers also accept as fields of the body."""
    template_args = dict(fields.mapping("chat_template_kwargs") or {})
    for name in TEMPLATE_SWITCHES:
        if (switch := fields.flag(name)) is not None:
            template_args[name] = switch
    return template_args


def _read_message(fields: Fields) -> Message:
    role = fields.role(_ROLES)
    name = fields.text("name")
    if role in ("system", "user") and fields.raw("content") is None:
        raise fields.invalid("content", "it is required: a string or an array of parts")
    content = tuple(_read_content(fields))
    if role == "tool":
        call_id = fields.text("tool_call_id") or name or ""
        results = tuple(part for part in content if isinstance(part, Text | PicturePart))
        return Message(role="tool", parts=(ToolResult(call_id=call_id, parts=results),), name=name)
    if role != "assistant":
        return Message(role=role, parts=content, name=name)
    parts: list[Part] = []
    if reasoning := fields.text("reasoning_content") or fields.text("reasoning"):
        parts.append(Reasoning(text=reasoning))
    parts += content
    parts += _read_tool_calls(fields)
    return Message(role="assistant", parts=tuple(parts), name=name)


def _read_content(fields: Fields) -> Iterator[Text | PicturePart | Reasoning]:
    content = fields.raw("content")
    if content is None or content == "":
        return
    if isinstance(content, str):
        yield Text(text=content)
        return
    if not isinstance(content, list):
        raise fields.invalid("content", "expected a string, an array of parts or null")
    for part in fields.objects("content"):
        yield _read_part(part)


def _read_part(part: Fields) -> Text | PicturePart | Reasoning:
    match part.text("type"):
        case kind if kind in PICTURE_PARTS:
            return read_url_part(part)
        case "refusal":
            return Text(text=part.required_text("refusal"))
        case "thinking" | "reasoning":
            return Reasoning(text=part.text("thinking") or part.text("text") or "")
        case "text" | "input_text" | "output_text" | None:
            return Text(text=part.required_text("text"))
        case other:
            raise UnsupportedModality(
                f"Content of type '{shorten(other)}' is not supported by the models here; send text or pictures.",
                param=part.param("type"),
            )


def _read_tool_calls(fields: Fields) -> Iterator[ToolCall]:
    for index, call in enumerate(fields.objects("tool_calls")):
        if (custom := call.object("custom")) is not None:
            text = custom.text("input") or ""
            yield ToolCall(
                id=call.text("id") or f"call_{index}", name=custom.required_text("name"), arguments=arguments_of(text)
            )
            continue
        function = call.object("function") or call
        yield ToolCall(
            id=call.text("id") or f"call_{index}",
            name=function.required_text("name"),
            arguments=read_arguments(function, "arguments"),
        )
    if (legacy := fields.object("function_call")) is not None:
        name = legacy.required_text("name")
        yield ToolCall(id=name, name=name, arguments=read_arguments(legacy, "arguments"))


def _read_tools(fields: Fields) -> ToolList:
    found = ToolList()
    for tool in fields.objects("tools"):
        found.add(tool, tool.text("type") or "function")
    found.tools += [read_function(function) for function in fields.objects("functions")]
    return found


def _read_tool_choice(fields: Fields, found: ToolList, *, as_functions: bool) -> ToolChoice:
    """The choice among tools, or with `as_functions` among functions: their dialect has one call per response."""
    parallel = not as_functions and fields.flag("parallel_tool_calls") is not False
    field = "function_call" if as_functions and "function_call" in fields else "tool_choice"
    resolve = partial(
        found.resolve, fields, parallel=parallel, choice=field, listed="functions" if as_functions else "tools"
    )
    if not isinstance(fields.raw(field), dict):
        return resolve(fields.text(field) or "auto", None)
    named = fields.object(field)
    assert named is not None
    if (allowed := named.object("allowed_tools")) is not None:
        return found.restrict(resolve(allowed.text("mode") or "auto", None), allowed)
    function = named.object("function") or named.object("custom") or named
    return resolve("named", function.text("name"))
