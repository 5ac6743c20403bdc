"""Builds the chat-completions body for another server from our request."""

from __future__ import annotations

from typing import Any

import msgspec

from cortex.wire.dialects.openai_chat.request import CONTINUE, TEMPLATE_SWITCHES
from cortex.wire.dialects.openai_chat.stream import tool_call_body
from cortex.wire.errors import InvalidValue
from cortex.wire.pictures.files import data_url
from cortex.wire.requests import (
    GenerateRequest,
    Message,
    OutputFormat,
    Part,
    PicturePart,
    Reasoning,
    Text,
    ToolCall,
    ToolChoice,
    ToolResult,
    effort_of,
)


def build(request: GenerateRequest) -> bytes:
    """The body for `request`. It always requests usage, because every stream is metered. Raises InvalidValue for a
    request for no tokens, which servers either reject or take for one without a limit."""
    if request.sampling.max_tokens == 0:
        raise InvalidValue("The server of this model writes at least one token; ask for one or more.")
    body: dict[str, Any] = {
        "model": request.model,
        "messages": [_message_body(message) for message in request.messages],
        "stream": request.stream,
    }
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    # Few servers support lists of allowed tools, so the other tools are left out.
    if request.callable_tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "parameters": tool.parameters,
                    **({"description": tool.description} if tool.description is not None else {}),
                    **({"strict": True} if tool.strict else {}),
                },
            }
            for tool in request.callable_tools
        ]
        body["tool_choice"] = _tool_choice_body(request.tool_choice)
        if not request.tool_choice.parallel and request.tool_choice.mode != "named":
            body["parallel_tool_calls"] = False
    body |= _output_body(request.output)
    body |= _template_body(request)
    body |= _sampling_body(request)
    if request.prediction is not None:
        body["prediction"] = {"type": "content", "content": request.prediction}
    if request.user is not None:
        body["user"] = request.user
    if request.tenant:
        body["cache_salt"] = request.tenant.hex()
    return msgspec.json.encode(body)


def _sampling_body(request: GenerateRequest) -> dict[str, Any]:
    """Only the fields that the client set: the server keeps its own defaults and may not know our extensions."""
    given = msgspec.to_builtins(request.sampling)
    if "logit_bias" in given:
        given["logit_bias"] = {str(token): bias for token, bias in request.sampling.logit_bias.items()}
    return dict(given)


def _template_body(request: GenerateRequest) -> dict[str, Any]:
    thinking = request.thinking
    effort = thinking.effort or effort_of(thinking.budget_tokens)
    template_args = dict(request.template_args)
    if thinking.enabled is not None:
        template_args.setdefault("enable_thinking", thinking.enabled)
    switches = {name: template_args.pop(name) for name in TEMPLATE_SWITCHES if name in template_args}
    if switches.get(CONTINUE):
        switches.setdefault("add_generation_prompt", False)  # the two exclude each other on other servers
    return {
        **switches,
        **({"reasoning_effort": effort} if effort is not None else {}),
        **({"chat_template_kwargs": template_args} if template_args else {}),
    }


def _output_body(output: OutputFormat | None) -> dict[str, Any]:
    if output is None:
        return {}
    match output.kind:
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            return {
                "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": output.schema}}
            }
        case "choice":
            return {"structured_outputs": {"choice": list(output.choices)}}
        case kind:
            return {"structured_outputs": {kind: output.text}}


def _tool_choice_body(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.mode == "named":
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode


def _message_body(message: Message) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role}
    if message.name is not None:
        body["name"] = message.name
    if message.role == "tool":
        results = [part for part in message.parts if isinstance(part, ToolResult)]
        body["tool_call_id"] = results[0].call_id if results else ""
        body["content"] = _content_body(results[0].marked_parts if results else ())
        return body
    reasoning = "".join(part.text for part in message.parts if isinstance(part, Reasoning))
    calls = [tool_call_body(part) for part in message.parts if isinstance(part, ToolCall)]
    body["content"] = _content_body(message.parts)
    if calls:
        body["tool_calls"] = calls
        body["content"] = body["content"] or None
    if reasoning:
        body["reasoning_content"] = reasoning
    return body


def _content_body(parts: tuple[Part, ...] | tuple[Text | PicturePart, ...]) -> str | list[dict[str, Any]]:
    """A single text is a plain string, which every server accepts; other content is an array of parts."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Text):
            content.append({"type": "text", "text": part.text})
        elif isinstance(part, PicturePart):
            content.append({"type": "image_url", "image_url": _picture_body(part)})
    if not content:
        return ""
    if len(content) == 1 and content[0]["type"] == "text":
        return str(content[0]["text"])
    return content


def _picture_body(picture: PicturePart) -> dict[str, str]:
    body = {"url": picture.url or data_url(picture)}
    if picture.detail != "auto":
        body["detail"] = picture.detail
    return body
