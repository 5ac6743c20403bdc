"""Ollama's `/api/generate`: one prompt, as a conversation of one turn or (`raw`) as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from cortex.wire.dialects.ollama import chat, request
from cortex.wire.dialects.ollama.fields import GENERATE, GENERATE_PRESET
from cortex.wire.dialects.ollama.lines import LineEncoder, loading_line, whole_body
from cortex.wire.fields.body import Fields
from cortex.wire.request_summary import RequestSummary
from cortex.wire.requests import GenerateRequest, Message, PicturePart, Text


def read_summary(fields: Fields) -> RequestSummary:
    """Raises `MissingModel` or `InvalidValue`."""
    return request.read_summary(fields, loads_only=all(map(fields.is_empty, ("prompt", "images", "suffix"))))


def pictures(fields: Fields) -> tuple[str, ...]:
    """All pictures that `parse` finds, in base64, unchecked."""
    return fields.texts("images")


def parse(body: bytes) -> GenerateRequest:
    """Raises `MalformedJSON`, `MissingModel` or `InvalidValue`."""
    fields = GENERATE.read(body)
    read = request.read_request(fields, read_summary(fields))
    prompt, system, pictures = fields.text("prompt") or "", fields.text("system"), request.read_pictures(fields)
    if suffix := fields.text("suffix"):
        if pictures or system:
            raise fields.invalid("suffix", "what is filled in is text only; leave out 'images' and 'system'")
        return msgspec.structs.replace(read, prompt=prompt, suffix=suffix)
    if read.loads_only:
        return read
    if fields.flag("raw"):
        if pictures or system:
            raise fields.invalid("raw", "a raw prompt is text only; leave out 'images' and 'system'")
        return msgspec.structs.replace(read, prompt=prompt)
    messages: list[Message] = []
    if system:
        messages.append(Message(role="system", parts=(Text(text=system),)))
    parts: list[Text | PicturePart] = [Text(text=prompt)] if prompt else []
    messages.append(Message(role="user", parts=(*parts, *pictures)))
    return msgspec.structs.replace(read, messages=tuple(messages))


def _shape(*, text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    fields: dict[str, Any] = {"response": text}
    if thinking:
        fields["thinking"] = thinking
    if calls:
        fields["tool_calls"] = calls
    return fields


DIALECT = dataclasses.replace(
    chat.DIALECT,
    name="ollama_generate",
    path="/api/generate",
    fields=GENERATE,
    conversation=("system", "prompt"),
    read_summary=read_summary,
    parse=parse,
    new_encoder=partial(LineEncoder, _shape),
    fold=partial(whole_body, _shape),
    is_chat=False,
    client_fields={"messages": "prompt"},
    preset=GENERATE_PRESET,
    pictures=pictures,
    loading_chunk=partial(loading_line, _shape),
)
