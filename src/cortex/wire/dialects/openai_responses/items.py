"""Reads input items of the responses dialect into messages.

The dialect splits one assistant turn into several items (reasoning, message, calls). They are joined again, because
chat templates expect one turn.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from cortex.wire.dialects.openai_responses.client_tools import CALLS, OUTPUTS, full_name, read_call
from cortex.wire.dialects.openai_responses.fields import ITEMS
from cortex.wire.errors import UnsupportedModality, shorten
from cortex.wire.fields.body import Fields, json_text
from cortex.wire.fields.custom_tools import arguments_of
from cortex.wire.fields.tables.table import Treatment
from cortex.wire.fields.tools import read_arguments
from cortex.wire.pictures.parts import PICTURE_PARTS, picture_urls, read_url_part
from cortex.wire.requests import Message, Part, PicturePart, Reasoning, Role, Text, ToolCall, ToolResult

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
}

_RESULTS = OUTPUTS | {"function_call_output", "custom_tool_call_output"}
_WITHOUT_EFFECT = frozenset(kind.name for kind in ITEMS if kind.treatment is Treatment.TOLERATED)


def read_input(fields: Fields, noted: list[str]) -> list[Message]:
    """The conversation in `input`. Types of items without effect are added to `noted`; others that are not known raise
    `InvalidValue`, because the model would not see them."""
    given = fields.raw("input")
    if isinstance(given, str):
        return [Message(role="user", parts=(Text(text=given),))]
    if not isinstance(given, list) or not given:
        raise fields.invalid("input", "it is required: a string or an array of items")
    conversation = _Conversation()
    for item in fields.objects("input"):
        _read_item(item, conversation, noted)
    return conversation.close()


def pictures(fields: Fields) -> Iterator[str]:
    """The URLs of all pictures that `read_input` finds, unchecked."""
    if isinstance(fields.raw("input"), str):
        return
    for item in fields.objects("input"):
        kind = item.text("type") or "message"
        if kind == "message" and isinstance(item.raw("content"), list):
            yield from picture_urls(item, "content")
        elif kind in _RESULTS and _are_parts(item.raw("output")):
            yield from picture_urls(item, "output")


class _Conversation:
    """Messages so far, and the parts of an assistant turn that may continue."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._turn: list[Part] = []

    def add(self, message: Message) -> None:
        self._close_turn()
        self._messages.append(message)

    def add_reasoning(self, reasoning: Reasoning) -> None:
        if any(not isinstance(part, Reasoning) for part in self._turn):
            self._close_turn()
        self._turn.append(reasoning)

    def add_content(self, parts: list[Part]) -> None:
        if any(not isinstance(part, Reasoning) for part in self._turn):
            self._close_turn()
        self._turn += parts

    def add_call(self, call: ToolCall) -> None:
        self._turn.append(call)

    def close(self) -> list[Message]:
        self._close_turn()
        return self._messages

    def _close_turn(self) -> None:
        if self._turn:
            self._messages.append(Message(role="assistant", parts=tuple(self._turn)))
            self._turn = []


def _read_item(item: Fields, conversation: _Conversation, noted: list[str]) -> None:
    kind = item.text("type") or "message"
    match kind:
        case "message":
            role = item.role(_ROLES)
            parts: list[Part] = list(_read_content(item, "content"))
            if role == "assistant":
                conversation.add_content(parts)
            else:
                conversation.add(Message(role=role, parts=tuple(parts)))
        case "reasoning":
            if text := _reasoning_text(item):
                conversation.add_reasoning(Reasoning(text=text, signature=item.text("encrypted_content")))
        case "function_call":
            conversation.add_call(_read_call(item, read_arguments(item, "arguments")))
        case "custom_tool_call":
            conversation.add_call(_read_call(item, arguments_of(item.text("input") or "")))
        case _ if kind in CALLS:
            conversation.add_call(read_call(item, CALLS[kind]))
        case _ if kind in _RESULTS:
            result = ToolResult(
                call_id=item.text("call_id") or item.required_text("id"),
                parts=tuple(_read_content(item, "output", as_json=True)),
                is_error=item.text("status") == "failed",
            )
            conversation.add(Message(role="tool", parts=(result,)))
        case "compaction" | "compaction_summary":
            if (summary := shown(item.required_text("encrypted_content"))) is None:
                raise item.invalid("encrypted_content", "it was not made here; send what it sums up")
            conversation.add(Message(role="user", parts=(Text(text=summary),)))
        case "item_reference":
            raise item.invalid("type", "items are not stored here; send the item itself")
        case _ if kind in _WITHOUT_EFFECT:
            noted.append(kind)
        case _:
            raise item.invalid("type", f"items of type '{shorten(kind)}' are not supported; remove the item")


def _read_call(item: Fields, arguments: str) -> ToolCall:
    return ToolCall(
        id=item.text("call_id") or item.required_text("id"),
        name=full_name(item.text("namespace"), item.required_text("name")),
        arguments=arguments,
    )


def _reasoning_text(item: Fields) -> str:
    """The reasoning text if the client sent it, else its summary."""
    for name in ("content", "summary"):
        if text := "".join(part.text("text") or "" for part in item.objects(name)):
            return text
    return ""


def _read_content(item: Fields, name: str, *, as_json: bool = False) -> Iterator[Text | PicturePart]:
    """A string or parts. With `as_json`, any other value becomes its JSON text: a tool may return an object."""
    content = item.raw(name)
    if content is None or content == "":
        return
    if isinstance(content, str):
        yield Text(text=content)
    elif as_json and not _are_parts(content):
        yield Text(text=json_text(content))
    else:
        for part in item.objects(name):
            yield _read_part(part)


def _are_parts(content: Any) -> bool:
    """Whether the output of a tool has parts; other values are JSON."""
    return isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)


def _read_part(part: Fields) -> Text | PicturePart:
    match part.text("type"):
        case kind if kind in PICTURE_PARTS:
            return read_url_part(part)
        case "refusal":
            return Text(text=part.required_text("refusal"))
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text" | None:
            return Text(text=part.required_text("text"))
        case other:
            raise UnsupportedModality(
                f"Content of type '{shorten(other)}' is not supported by the models here; send text or pictures.",
                param=part.param("type"),
            )


_MARK = "cortex-summary-1."
_HEADING = "Summary of the conversation before this point:\n\n"


def encoded(summary: str) -> str:
    """The content of the item."""
    return _MARK + base64.b64encode(summary.encode()).decode()


def shown(content: str) -> str | None:
    """The text that a model sees instead of the item; None for content that is not ours."""
    if not content.startswith(_MARK):
        return None
    try:
        return _HEADING + base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
