"""Parses a chat-completions body into a `GenerateRequest`. Fields that we use are validated, others are ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from cortex.wire import body as wire_body
from cortex.wire.body import LARGEST_COUNT, Fields, json_text
from cortex.wire.errors import UnsupportedModality, shorten
from cortex.wire.requests import (
    GenerateRequest,
    Image,
    Message,
    Part,
    Reasoning,
    Role,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from cortex.wire.sampling import MAX_TOP_LOGPROBS, read_effort, read_output_format, read_sampling

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


def parse(body: bytes) -> GenerateRequest:
    """Raises `MalformedJSON`, `MissingModel`, `InvalidValue` or `UnsupportedModality`."""
    fields = wire_body.parse(body)
    model = fields.model()
    if not fields.array("messages"):
        raise fields.invalid("messages", "it is required and must hold at least one message")
    tools, dropped_tools = _read_tools(fields)
    stream_options = fields.object("stream_options")
    template_args = _read_template_args(fields)
    return GenerateRequest(
        model=model,
        messages=tuple(_read_message(message) for message in fields.objects("messages")),
        tools=tools,
        tool_choice=_read_tool_choice(fields, tools, dropped_tools),
        output=read_output_format(fields),
        thinking=_read_thinking(fields, template_args),
        sampling=_read_chat_sampling(fields),
        stream=fields.flag("stream") or False,
        include_usage=(stream_options.flag("include_usage") or False) if stream_options else False,
        template_args=template_args,
        user=fields.text("user"),
        dropped_tools=dropped_tools,
    )


def _read_chat_sampling(fields: Fields) -> Sampling:
    sampling = read_sampling(fields)
    wanted = fields.flag("logprobs") or False
    top_logprobs = fields.integer("top_logprobs", low=0, high=MAX_TOP_LOGPROBS) or 0
    if top_logprobs and not wanted:
        raise fields.invalid("top_logprobs", "set 'logprobs' to true to get them")
    max_tokens = fields.integer("max_completion_tokens", low=1, high=LARGEST_COUNT) or sampling.max_tokens
    return msgspec.structs.replace(sampling, logprobs=wanted, top_logprobs=top_logprobs, max_tokens=max_tokens)


def _read_thinking(fields: Fields, template_args: dict[str, Any]) -> Thinking:
    """The template's switch takes precedence over `enable_thinking`, and that over the effort."""
    thinking = read_effort(fields.text("reasoning_effort"))
    switch = template_args.get("enable_thinking", template_args.get("thinking"))
    if not isinstance(switch, bool):
        switch = fields.flag("enable_thinking")
    if switch is None:
        return thinking
    return msgspec.structs.replace(thinking, enabled=switch)


def _read_template_args(fields: Fields) -> dict[str, Any]:
    """`chat_template_kwargs`, and the two switches that self-hosted servers also accept as fields of the body."""
    template_args = dict(fields.mapping("chat_template_kwargs") or {})
    for name in TEMPLATE_SWITCHES:
        if (switch := fields.flag(name)) is not None:
            template_args[name] = switch
    return template_args


def _read_message(fields: Fields) -> Message:
    """One message. An unknown role becomes `user`, because templates only know the standard roles."""
    role = _ROLES.get(fields.required_text("role"), "user")
    name = fields.text("name")
    content = tuple(_read_content(fields))
    if role == "tool":
        call_id = fields.text("tool_call_id") or name or ""
        results = tuple(part for part in content if isinstance(part, Text | Image))
        return Message(role="tool", parts=(ToolResult(call_id=call_id, parts=results),), name=name)
    if role != "assistant":
        return Message(role=role, parts=content, name=name)
    parts: list[Part] = []
    if reasoning := fields.text("reasoning_content") or fields.text("reasoning"):
        parts.append(Reasoning(text=reasoning))
    parts += content
    parts += _read_tool_calls(fields)
    return Message(role="assistant", parts=tuple(parts), name=name)


def _read_content(fields: Fields) -> Iterator[Text | Image | Reasoning]:
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


def _read_part(part: Fields) -> Text | Image | Reasoning:
    match part.text("type"):
        case "image_url" | "input_image":
            holder = part.raw("image_url")
            image = part.object("image_url") if isinstance(holder, dict) else None
            return Image(url=image.required_text("url") if image else part.required_text("image_url"))
        case "refusal":
            return Text(text=part.required_text("refusal"))
        case "thinking" | "reasoning":
            return Reasoning(text=part.text("thinking") or part.text("text") or "")
        case "text" | "input_text" | "output_text" | None:
            return Text(text=part.required_text("text"))
        case other:
            raise UnsupportedModality(
                f"Content of type '{shorten(other)}' is not supported by the models here; send text or images.",
                param=part.param("type"),
            )


def _read_tool_calls(fields: Fields) -> Iterator[ToolCall]:
    for index, call in enumerate(fields.objects("tool_calls")):
        function = call.object("function") or call
        yield ToolCall(
            id=call.text("id") or f"call_{index}",
            name=function.required_text("name"),
            arguments=read_arguments(function, "arguments"),
        )
    if (legacy := fields.object("function_call")) is not None:
        name = legacy.required_text("name")
        yield ToolCall(id=name, name=name, arguments=read_arguments(legacy, "arguments"))


def read_arguments(fields: Fields, name: str) -> str:
    """The arguments of a call as JSON text, whether the client sent text or an object."""
    value = fields.raw(name)
    if value is None or value == "":
        return "{}"
    return value if isinstance(value, str) else json_text(value)


def _read_tools(fields: Fields) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    tools: list[Tool] = []
    dropped: list[str] = []
    for tool in fields.objects("tools"):
        kind = tool.text("type") or "function"
        if kind == "function":
            tools.append(read_function(tool.object("function") or tool))
        else:
            dropped.append(kind)
    tools += [read_function(function) for function in fields.objects("functions")]
    return tuple(tools), tuple(dropped)


def read_function(fields: Fields) -> Tool:
    """The definition of a function: name, description, parameters, strict."""
    return Tool(
        name=fields.required_text("name"),
        parameters=fields.mapping("parameters") or {},
        description=fields.text("description"),
        strict=fields.flag("strict") or False,
    )


def _read_tool_choice(fields: Fields, tools: tuple[Tool, ...], dropped: tuple[str, ...]) -> ToolChoice:
    parallel = fields.flag("parallel_tool_calls") is not False
    choice = fields.raw("tool_choice")
    if isinstance(choice, dict):
        named = fields.object("tool_choice")
        assert named is not None
        if (allowed := named.object("allowed_tools")) is not None:
            choice = resolve_tool_choice(fields, allowed.text("mode") or "auto", None, parallel, tools, dropped)
            return restrict_tool_choice(choice, allowed, tools)
        function = named.object("function") or named
        return resolve_tool_choice(fields, "named", function.text("name"), parallel, tools, dropped)
    return resolve_tool_choice(fields, fields.text("tool_choice") or "auto", None, parallel, tools, dropped)


def restrict_tool_choice(choice: ToolChoice, allowed: Fields, tools: Iterable[Tool]) -> ToolChoice:
    """`choice` restricted to the functions that `allowed` lists under `tools`; without a list, not restricted.

    Listed tools of other types are dropped, as they are in the request's own list.
    """
    if "tools" not in allowed or choice.mode == "none":
        return choice
    known = {tool.name for tool in tools}
    names: list[str] = []
    for entry in allowed.objects("tools"):
        if (entry.text("type") or "function") == "function":
            name = (entry.object("function") or entry).required_text("name")
            if name not in known:
                raise entry.invalid("name", f"no tool named '{shorten(name)}' is in 'tools'")
            names.append(name)
    if not names:
        return ToolChoice(mode="none", parallel=choice.parallel)
    return ToolChoice(mode=choice.mode, parallel=choice.parallel, allowed=tuple(names))


def resolve_tool_choice(
    fields: Fields, mode: str, name: str | None, parallel: bool, tools: Iterable[Tool], dropped: Iterable[str]
) -> ToolChoice:
    """The choice that is possible with the remaining tools.

    A required tool that was dropped makes the choice `auto`; one that the request never had is an error.
    """
    names = {tool.name for tool in tools}
    something_dropped = any(True for _ in dropped)
    match mode:
        case "auto" | "none":
            return ToolChoice(mode=mode, parallel=parallel)
        case "required" | "any":
            if names:
                return ToolChoice(mode="required", parallel=parallel)
            problem = "it requires a tool call but 'tools' is empty"
        case "named":
            if name in names:
                return ToolChoice(mode="named", name=name, parallel=parallel)
            problem = f"no tool named '{shorten(name or '')}' is in 'tools'"
        case other:
            problem = f"'{shorten(other)}' is not known; use auto, none, required or name a function"
            raise fields.invalid("tool_choice", problem)
    if something_dropped:
        return ToolChoice(parallel=parallel)
    raise fields.invalid("tool_choice", problem)
