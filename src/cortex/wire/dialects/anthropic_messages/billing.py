"""Removes the billing line that Claude Code puts before its prompt: the only change ever made to a prompt.

The line differs for every request and comes first, so that no prefix would ever be cached. The setting
`strip_billing_header` decides: that of the gateway for requests through it, that of a node only for direct clients.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Raw

BILLING_HEADER = "x-anthropic-billing-header"

_MARK = BILLING_HEADER.encode()
_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_array_decoder = msgspec.json.Decoder(list[Raw])


class _Block(msgspec.Struct):
    text: str


_block_decoder = msgspec.json.Decoder(_Block)


def strip_billing_header(body: bytes) -> bytes:
    """`body` without the system blocks that have only that line; `body` itself when there is none.

    All other values keep their bytes. A body that cannot be read stays as it is; the parser of the dialect reports why.
    """
    if _MARK not in body:
        return body
    try:
        fields = _object_decoder.decode(body)
        edited = [_edit(fields, "system", _strip_blocks), _edit(fields, "messages", _strip_messages)]
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


def _strip_blocks(system: Raw) -> Raw | None:
    if not bytes(system).startswith(b"["):
        return system  # a plain string is a prompt of the application
    blocks = _array_decoder.decode(system)
    kept = [block for block in blocks if not _is_billing_line(block)]
    if len(kept) == len(blocks):
        return system
    return Raw(msgspec.json.encode(kept)) if kept else None


def _strip_messages(messages: Raw) -> Raw:
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
    if not _edit(fields, "content", _strip_blocks):
        return message
    return Raw(msgspec.json.encode(fields)) if "content" in fields else None


def _is_billing_line(block: Raw) -> bool:
    if _MARK not in bytes(block):
        return False
    text = _block_decoder.decode(block).text.strip()
    return text.startswith(BILLING_HEADER) and "\n" not in text
