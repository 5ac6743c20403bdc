"""Removes the billing line from Claude Code's system prompt, the only change ever made to a prompt.

The line differs for every request and comes first, so that no prefix would ever be cached. Proxies join it with other
text, or send it in another dialect. The setting `strip_billing_header` decides: that of the gateway for requests
through it, that of a node only for direct clients.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Raw

BILLING_HEADER = "x-anthropic-billing-header"
BILLED: Final[frozenset[str]] = frozenset(
    {
        *("anthropic_messages", "openai_chat", "openai_responses", "openai_compaction"),
        *("ollama_chat", "ollama_generate"),
    }
)
"""The dialects with system prompts, which may have the line."""

_MARK = BILLING_HEADER.encode()
_PAIRS: Final = r"(?:[ \t]*[\w.-]+=[^;\s]*(?:;|(?=\s|\Z)))+[ \t\r]*"
_LINE: Final = re.compile(rf"^[ \t]*{BILLING_HEADER}:(?:{_PAIRS}\n*|[^\n]*(?:\n+|\Z))", re.MULTILINE)
"""Text after the values is not part of it."""
_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_array_decoder = msgspec.json.Decoder(list[Raw])
_text_decoder = msgspec.json.Decoder(str)


def strip_billing_header(body: bytes) -> bytes:
    """`body` without that line in its system prompt; `body` itself when there is none.

    All other values keep their bytes. A body that cannot be read stays as it is; the parser of the dialect reports why.
    """
    if _MARK not in body:
        return body
    try:
        fields = _object_decoder.decode(body)
        edited = [_edit(fields, name, _strip_prompt) for name in ("system", "instructions")]
        edited += [_edit(fields, name, _strip_messages) for name in ("messages", "input")]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body
    return msgspec.json.encode(fields) if any(edited) else body


def _edit(fields: dict[str, Raw], name: str, strip: Callable[[Raw], Raw | None]) -> bool:
    """Replace a field by the result of `strip`, or remove it if that is None; True if the body changed."""
    value = fields.get(name)
    if value is None or _MARK not in bytes(value):
        return False
    kept = strip(value)
    if kept is None:
        del fields[name]
    else:
        fields[name] = kept
    return kept is not value


def _strip_prompt(prompt: Raw) -> Raw | None:
    """A system prompt, a text or an array of blocks, without the line; None if nothing is left."""
    if not bytes(prompt).lstrip().startswith(b"["):
        return _strip_text(prompt)
    blocks = _array_decoder.decode(prompt)
    kept = [_strip_block(block) for block in blocks]
    if all(new is old for new, old in zip(kept, blocks, strict=True)):
        return prompt
    left = [block for block in kept if block is not None]
    return Raw(msgspec.json.encode(left)) if left else None


def _strip_block(block: Raw) -> Raw | None:
    if _MARK not in bytes(block):
        return block
    fields = _object_decoder.decode(block)
    if not _edit(fields, "text", _strip_text):
        return block
    return Raw(msgspec.json.encode(fields)) if "text" in fields else None


def _strip_text(value: Raw) -> Raw | None:
    text = _text_decoder.decode(value)
    kept = _LINE.sub("", text)
    if kept == text:
        return value
    return Raw(msgspec.json.encode(kept)) if kept.strip() else None


def _strip_messages(messages: Raw) -> Raw:
    if not bytes(messages).lstrip().startswith(b"["):
        return messages  # the text of a user
    given = _array_decoder.decode(messages)
    kept = [_strip_message(message) for message in given]
    if all(new is old for new, old in zip(kept, given, strict=True)):
        return messages
    return Raw(msgspec.json.encode([message for message in kept if message is not None]))


def _strip_message(message: Raw) -> Raw | None:
    """Newer clients put system blocks into system messages. Messages of users are never changed."""
    if _MARK not in bytes(message):
        return message
    fields = _object_decoder.decode(message)
    if bytes(fields.get("role", b"")) not in (b'"system"', b'"developer"'):
        return message
    if not _edit(fields, "content", _strip_prompt):
        return message
    return Raw(msgspec.json.encode(fields)) if "content" in fields else None
