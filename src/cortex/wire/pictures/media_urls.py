"""Media of a conversation that a server would fetch by their addresses. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from cortex.wire.errors import InvalidValue, MalformedJSON, shorten

_ADDRESS = re.compile(r"\s*([a-z][a-z0-9+.-]*://|file:)", re.IGNORECASE)
_TEXTS = frozenset({"text", "refusal", "thinking", "reasoning"})
"""Fields of a part that are never an address, whatever they hold."""
_MARKS = (b'url"', b":/", rb":\/", b"file:", rb"\u")
"""One of these is in every body that `check_media` rejects: any character may also be written as an escape."""


def may_have_addresses(chat: bytes) -> bool:
    """Whether it is worth parsing `chat` for `check_media`."""
    lowered = chat.lower()  # a pattern that ignores case takes ten times as long, on the loop
    return any(mark in lowered for mark in _MARKS)


def check_media(chat: bytes) -> None:
    """Raises InvalidValue for media in a chat request that are not in it: the model's server would fetch them from
    inside its own network, or from its files, for a client that may reach neither. Raises MalformedJSON."""
    try:
        raw = msgspec.json.decode(chat, type=dict[str, msgspec.Raw]).get("messages")
        messages = None if raw is None else msgspec.json.decode(raw)
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list | dict):
                _check("", content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise MalformedJSON(f"The body is not valid JSON: {str(problem)[:200]}") from None


def _check(name: str, value: Any) -> None:
    if isinstance(value, dict):
        for each, inner in value.items():
            if each not in _TEXTS:
                _check(each, inner)
    elif isinstance(value, list):
        for inner in value:
            _check(name, inner)
    elif isinstance(value, str) and _is_address(name, value):
        raise InvalidValue(
            f"this model's server may not fetch {shorten(value)}; send the media in the request, as a `data:` URL "
            "with base64",
            param="messages",
        )


def _is_address(name: str, value: str) -> bool:
    """A path is one too where the field is for URLs."""
    is_data = value[:5].lower() == "data:"
    return not is_data and (name.lower().endswith("url") or _ADDRESS.match(value) is not None)
