"""Finds the addresses of pictures in a body, and puts files in their place. Pure."""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from cortex.wire.errors import MalformedJSON
from cortex.wire.fields.raw_fields import replace_fields
from cortex.wire.pictures.header import format_of


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
        image, source = item.get("image_url"), item.get("source")
        if item.get("type") in ("image_url", "input_image"):
            if isinstance(image, dict) and _is_address(image.get("url")):
                yield image, "url", image["url"], at
            elif isinstance(image, str) and _is_address(image):
                yield item, "image_url", image, at
        elif item.get("type") == "image" and isinstance(source, dict) and _is_address(source.get("url")):
            yield item, "source", source["url"], at
        for name in _INNER:
            yield from _holders(item.get(name), f"{at}.{name}", depth + 1)


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and value.strip()[:8].lower().startswith(("http://", "https://"))
