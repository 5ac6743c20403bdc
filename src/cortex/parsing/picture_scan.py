"""Counts the pictures of a body where its dialect has them. Pure.

A gateway relays bodies, and a picture in one has megabytes of base64 but few tokens. Most bodies have none and are not
parsed for that. The size of a picture follows from the header of its file.
"""

from __future__ import annotations

import binascii
from itertools import islice
from typing import Final, NamedTuple

from cortex.parsing.picture_urls import has_any
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.fields.body import Fields
from cortex.wire.pictures.files import MAX_PICTURES
from cortex.wire.pictures.header import UnreadablePicture, read_header

_MAX_HEAD_CHARACTERS: Final = 1 << 17
"""How much of a file is read, from its start: cameras put a small copy of the picture before its size."""
_MAX_URL_HEAD: Final = 256
_TOKEN_SIDE: Final = 28
"""Pixels to the side of a token in models with many of them."""
_LEAST_TOKENS, _MOST_TOKENS = 256, 16_384


class FoundPictures(NamedTuple):
    number: int
    num_bytes: int
    """The bytes of the body that are files."""
    num_tokens: int
    """About the most that they take in a prompt. The node counts them for its model."""


_NONE: Final = FoundPictures(0, 0, 0)


def may_have_pictures(body: bytes, dialect: str) -> bool:
    """Whether the conversation must be decoded to count its pictures."""
    marks = DIALECTS[dialect].picture_marks
    return bool(marks) and marks[0][0] in body and has_any(body, marks)


def find_pictures(body: bytes, fields: Fields, dialect: str) -> FoundPictures:
    """The pictures in `body`, which has `fields`. What is no picture counts as text, and so do pictures beyond those
    that one request may have. Raises InvalidValue for a conversation that the dialect does not read."""
    if not may_have_pictures(body, dialect):
        return _NONE
    number = num_bytes = num_tokens = 0
    for text in islice(DIALECTS[dialect].pictures(fields), MAX_PICTURES):
        start = _start_of_file(text)
        tokens = _num_tokens(text[start : start + _MAX_HEAD_CHARACTERS])
        number += 1
        if tokens is not None:
            num_bytes += len(text) - start
            num_tokens += tokens
    return FoundPictures(number, num_bytes, num_tokens)


def _start_of_file(text: str) -> int:
    """Where the base64 of a picture begins, which may be a URL."""
    head = text[:_MAX_URL_HEAD]
    return head.find(",") + 1 if head.lstrip()[:5].lower() == "data:" else 0


def _num_tokens(text: str) -> int | None:
    """About the most tokens of a file, by its first characters; None for one that is no picture."""
    try:
        plain = text.replace("-", "+").replace("_", "/")  # the alphabet for URLs
        header = read_header(binascii.a2b_base64(plain[: len(plain) // 4 * 4]))
    except (UnreadablePicture, ValueError):
        return None
    num_tokens = -(-header.width // _TOKEN_SIDE) * -(-header.height // _TOKEN_SIDE)
    return min(max(num_tokens, _LEAST_TOKENS), _MOST_TOKENS)
