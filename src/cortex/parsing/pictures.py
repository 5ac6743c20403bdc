"""Pictures of a body: finds their addresses and puts files in their place, and counts them where the dialect has them.
Pure.

A gateway relays bodies, and a picture in one has megabytes of base64 but few tokens. Most bodies have none and are not
parsed for that. The size of a picture follows from the header of its file.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import MalformedJSON
from cortex.wire.fields.body import Fields, replace_fields
from cortex.wire.pictures.files import MAX_PICTURES
from cortex.wire.pictures.header import UnreadablePicture, format_of, read_header

_MAX_HEAD_CHARACTERS: Final = 1 << 17
"""How much of a file is read, from its start: cameras put a small copy of the picture before its size."""
_MAX_URL_HEAD: Final = 256
_TOKEN_SIDE: Final = 28
"""Pixels to the side of a token in models with many of them."""
_LEAST_TOKENS, _MOST_TOKENS = 256, 16_384


def has_any(text: bytes, marks: tuple[bytes, ...]) -> bool:
    """Whether one of `marks` is in `text`. `find`, because `in` first tries the mark as the number of a byte: raising
    that error takes ten times as long as the search in a short text."""
    for mark in marks:  # noqa: SIM110  a generator takes longer than the searches
        if text.find(mark) >= 0:
            return True
    return False


_CONVERSATIONS = ("messages", "input")
_INNER = ("content", "output")
_MAX_DEPTH = 4
"""A picture in a document in the result of a tool in a message."""
_MARKS = (b'"image_url"', b'"input_image"', b'"image"')
_STARTS = (b'"http', b'"HTTP', b'"Http')


class PictureUrl(NamedTuple):
    url: str
    param: str
    """Where it is in the body."""


def may_have_urls(body: bytes) -> bool:
    """Whether it is worth parsing `body` for addresses of pictures. One that is overlooked is rejected by the node."""
    return has_any(body, _MARKS) and has_any(body, _STARTS)


def find_urls(body: bytes) -> tuple[PictureUrl, ...]:
    """The addresses of pictures in a conversation. Raises MalformedJSON."""
    fields = _conversations(body)
    return tuple(PictureUrl(url, param) for name, value in fields.items() for _, _, url, param in _holders(value, name))


def inline(body: bytes, files: Mapping[str, bytes]) -> bytes:
    """`body` with the files in place of their addresses; other fields stay as they are. Raises MalformedJSON."""
    fields = _conversations(body)
    for name, value in fields.items():
        for holder, key, url, _ in list(_holders(value, name)):
            if url in files:
                holder[key] = _in_place(key, files[url])
    return replace_fields(body, fields)


def _in_place(key: str, file: bytes) -> Any:
    media_type = f"image/{format_of(file) or 'png'}"
    text = binascii.b2a_base64(file, newline=False).decode()
    if key == "source":
        return {"type": "base64", "media_type": media_type, "data": text}
    return f"data:{media_type};base64,{text}"


def _conversations(body: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {name: msgspec.json.decode(raw[name]) for name in _CONVERSATIONS if name in raw}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise MalformedJSON(f"The body is not valid JSON: {str(problem)[:200]}") from None


def _holders(value: Any, path: str, depth: int = 0) -> Iterator[tuple[dict[str, Any], str, str, str]]:
    """Object, key, address and place of each picture that is an address."""
    if depth > _MAX_DEPTH:
        return
    for index, item in enumerate(value) if isinstance(value, list) else ():
        if not isinstance(item, dict):
            continue
        at = f"{path}[{index}]"
        picture, source = item.get("image_url"), item.get("source")
        if item.get("type") in ("image_url", "input_image"):
            if isinstance(picture, dict) and _is_address(picture.get("url")):
                yield picture, "url", picture["url"], at
            elif isinstance(picture, str) and _is_address(picture):
                yield item, "image_url", picture, at
        elif item.get("type") == "image" and isinstance(source, dict) and _is_address(source.get("url")):
            yield item, "source", source["url"], at
        for name in _INNER:
            yield from _holders(item.get(name), f"{at}.{name}", depth + 1)


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and value.strip()[:8].lower().startswith(("http://", "https://"))


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
