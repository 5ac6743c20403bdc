"""Finds the pictures in a body without parsing it. Pure.

A gateway relays bodies, and a picture in one has megabytes of base64 but few tokens. Files are found by their first
characters in base64, in the fields that hold pictures, and their size follows from their headers.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from cortex.wire.byte_search import has_any
from cortex.wire.node.protocol import Dialect
from cortex.wire.pictures.header import UnreadablePicture, read_header

_STARTS: Final = (b"iVBORw0KGgo", b"/9j/", b"\\/9j\\/", b"R0lGOD", b"UklGR")
"""PNG, JPEG (some clients escape the slash), GIF and WebP."""
_FIELD: Final = re.compile(rb'"(?:url|image_url|data)"\s*:\s*"$')
_LISTED: Final = re.compile(rb'(?:"images"\s*:\s*|[\[,]\s*)"$')
_OLLAMA: Final[frozenset[Dialect]] = frozenset(("ollama_chat", "ollama_generate"))
_MAX_HEAD_CHARACTERS: Final = 1 << 17
"""How much of a file is read, from its start: cameras put a small copy of the picture before its size."""
_MAX_URL_HEAD: Final = 256
_MAX_LOOKED_AT: Final = 2048
"""What follows counts as text: looking at more would delay a loop."""
_TOKEN_SIDE: Final = 28
"""Pixels to the side of a token in models with many of them."""
_LEAST_TOKENS, _MOST_TOKENS = 256, 16_384


_MARKS: Final[dict[Dialect, tuple[bytes, ...]]] = {
    "openai_chat": (b";base64,", b";BASE64,"),
    "openai_responses": (b";base64,", b";BASE64,"),
    "openai_compaction": (b";base64,", b";BASE64,"),
    "anthropic_messages": (b'"base64"',),
    "ollama_chat": (b'"images"',),
    "ollama_generate": (b'"images"',),
}
"""One of these is in every body with a picture: most bodies have none, and are searched no further. Those of a dialect
begin with the same byte, which is found fastest."""


class FoundPictures(NamedTuple):
    num_bytes: int
    """The bytes of the body that are files."""
    num_tokens: int
    """About the most that they take in a prompt. The node counts them for its model."""


_NONE: Final = FoundPictures(0, 0)


def find_pictures(body: bytes, dialect: Dialect) -> FoundPictures:
    """The pictures in `body` whose files it contains."""
    marks = _MARKS.get(dialect)
    if marks is None or marks[0][0] not in body or not has_any(body, marks):
        return _NONE
    num_bytes = num_tokens = 0
    for start, end in _files(body, dialect in _OLLAMA):
        num_bytes += end - start
        num_tokens += _num_tokens(body[start : min(end, start + _MAX_HEAD_CHARACTERS)])
    return FoundPictures(num_bytes, num_tokens)


def _files(body: bytes, is_ollama: bool) -> Iterator[tuple[int, int]]:
    num_looked_at = 0
    for mark in _STARTS:
        at = body.find(mark)
        while at >= 0 and num_looked_at < _MAX_LOOKED_AT:
            num_looked_at += 1
            end = at + len(mark)
            if at and body[at - 1] in b'",' and _is_picture(body, at, is_ollama):
                end = max(end, body.find(b'"', at))
                yield at, end
            at = body.find(mark, end)


def _is_picture(body: bytes, at: int, is_ollama: bool) -> bool:
    """Whether the text that begins at `at`, or the URL that it ends, is in a field for pictures."""
    quote = at - 1
    if body[quote] == ord(","):
        quote = body.rfind(b'"', max(0, at - _MAX_URL_HEAD), at)
        if quote < 0 or not body[quote + 1 : at].lower().endswith(b";base64,"):
            return False
    before = body[max(0, quote - 40) : quote + 1]
    return _FIELD.search(before) is not None or (is_ollama and _LISTED.search(before) is not None)


def _num_tokens(text: bytes) -> int:
    text = text.replace(b"\\", b"")
    try:
        header = read_header(binascii.a2b_base64(text[: len(text) // 4 * 4]))
    except (UnreadablePicture, ValueError):
        return _MOST_TOKENS
    num_tokens = -(-header.width // _TOKEN_SIDE) * -(-header.height // _TOKEN_SIDE)
    return min(max(num_tokens, _LEAST_TOKENS), _MOST_TOKENS)
