"""Ollama's `/api/chat`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from cortex.wire.dialects.dialect import Dialect
from cortex.wire.dialects.ollama import request
from cortex.wire.dialects.ollama.fields import CHAT, CHAT_PRESET
from cortex.wire.dialects.ollama.lines import (
    CONTENT_TYPE,
    KEEPALIVE,
    OLLAMA,
    LineEncoder,
    loading_line,
    stream_error,
    whole_body,
)
from cortex.wire.fields.body import Fields
from cortex.wire.fields.tools import ToolList, read_arguments
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import (
    GenerateRequest,
    Message,
    Part,
    PicturePart,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
)

_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_summary(fields: Fields) -> RequestSummary:
    """Raises `MissingModel` or `InvalidValue`."""
    return request.read_summary(fields, loads_only=fields.is_empty("messages"))


def pictures(fields: Fields) -> Iterator[str]:
    """All pictures that `parse` finds, in base64, unchecked."""
    for message in fields.objects("messages"):
        yield from message.texts("images")


def parse(body: bytes) -> GenerateRequest:
    """Raises `MalformedJSON`, `MissingModel` or `InvalidValue`."""
    fields = CHAT.read(body)
    found = ToolList()
    for tool in fields.objects("tools"):
        found.add(tool, tool.text("type") or "function")
    calls = _OpenCalls()
    messages = tuple(_read_message(message, calls) for message in fields.objects("messages"))
    return msgspec.structs.replace(
        request.read_request(fields, read_summary(fields)),
        messages=messages,
        tools=tuple(found.tools),
        tool_choice=found.resolve(fields, "auto", None, parallel=True),
        dropped_tools=tuple(found.dropped),
        unenforced=tuple(found.unenforced),
        truncate=fields.flag("truncate") or False,
    )


class _OpenCalls:
    """The calls whose results have not been read. Ollama's results often name the tool only, or nothing."""

    def __init__(self) -> None:
        self._open: list[ToolCall] = []
        self._num_calls = 0

    def add(self, call: Fields) -> ToolCall:
        function = call.object("function") or call
        id = call.text("id") or f"call_{self._num_calls}"
        self._num_calls += 1
        read = ToolCall(id=id, name=function.required_text("name"), arguments=read_arguments(function, "arguments"))
        self._open.append(read)
        return read

    def take(self, id: str | None, name: str | None) -> str:
        """The id of the call that a result belongs to: the one with its id, else the oldest open one of its name,
        else the oldest."""
        if id is None:
            named = [call for call in self._open if name is None or call.name == name]
            oldest = next(iter(named or self._open), None)
            id = oldest.id if oldest is not None else name or ""
        self._open = [call for call in self._open if call.id != id]
        return id


def _read_message(fields: Fields, calls: _OpenCalls) -> Message:
    """One message. An unknown role becomes `user`, because templates only know the standard roles."""
    role = _ROLES.get(fields.required_text("role").lower(), "user")
    content: list[Text | PicturePart] = []
    if text := fields.text("content"):
        content.append(Text(text=text))
    content += request.read_pictures(fields)
    if role == "tool":
        name = fields.text("tool_name") or fields.text("name")
        call_id = calls.take(fields.text("tool_call_id"), name)
        return Message(role="tool", parts=(ToolResult(call_id=call_id, parts=tuple(content)),), name=name)
    if role != "assistant":
        return Message(role=role, parts=tuple(content))
    parts: list[Part] = []
    if thinking := fields.text("thinking"):
        parts.append(Reasoning(text=thinking))
    parts += content
    parts += [calls.add(call) for call in fields.objects("tool_calls")]
    return Message(role="assistant", parts=tuple(parts))


def _shape(*, text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


DIALECT = Dialect(
    name="ollama_chat",
    path="/api/chat",
    fields=CHAT,
    conversation=("messages",),
    read_summary=read_summary,
    parse=parse,
    new_encoder=partial(LineEncoder, _shape),
    fold=partial(whole_body, _shape),
    stream_error=stream_error,
    id_prefix="ollama-",
    family=OLLAMA,
    content_type=CONTENT_TYPE,
    keepalive=KEEPALIVE,
    preset=CHAT_PRESET,
    picture_marks=(b'"images"',),
    pictures=pictures,
    loading_chunk=partial(loading_line, _shape),
)
