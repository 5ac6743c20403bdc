"""Media of a conversation that a server must not get: those that it would fetch by their addresses, and files that are
no pictures in the place of pictures. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from cortex.wire.byte_search import has_any
from cortex.wire.errors import InvalidValue, MalformedJSON, shorten
from cortex.wire.pictures.files import header_of
from cortex.wire.pictures.parts import from_base64, from_url
from cortex.wire.requests import Image

_ADDRESS = re.compile(r"\s*([a-z][a-z0-9+.-]*://|file:)", re.IGNORECASE)
_TEXTS = frozenset({"text", "refusal", "thinking", "reasoning"})
"""Fields of a part that are never an address, whatever they hold."""
_MARKS_WITH_SLASH = (b":/", rb":\/")
_SLASH, _BACKSLASH = 0x2F, 0x5C
"""A single byte is found fastest, and a short text may have none."""


def may_have_media(body: bytes) -> bool:
    """Whether it is worth parsing `body` for `check_media`: one of these marks is in every body that it rejects, and
    any character may also be written as an escape."""
    lowered = body.lower()  # a pattern that ignores case takes ten times as long, on the loop
    if _SLASH in lowered and has_any(lowered, _MARKS_WITH_SLASH):
        return True
    if _BACKSLASH in lowered and lowered.find(rb"\u") >= 0:
        return True
    return lowered.find(b'url"') >= 0 or lowered.find(b'base64"') >= 0 or lowered.find(b"file:") >= 0


def check_media(body: bytes) -> None:
    """Raises InvalidValue for media in a conversation that are not in it: the model's server would fetch them from
    inside its own network, or from its files, for a client that may reach neither. Also for files that are no pictures,
    in the place of pictures. Raises MalformedJSON."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name in ("messages", "input"):
            turns = msgspec.json.decode(fields[name]) if name in fields else None
            for number, turn in enumerate(turns if isinstance(turns, list) else ()):
                for place in ("content", "output"):
                    content = turn.get(place) if isinstance(turn, dict) else None
                    if isinstance(content, list | dict):
                        _check("", content, f"{name}[{number}].{place}")
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise MalformedJSON(f"The body is not valid JSON: {str(problem)[:200]}") from None


def _check(name: str, value: Any, path: str) -> None:
    if isinstance(value, dict):
        if (image := _picture(value, path)) is not None:
            header_of(image)
        for each, inner in value.items():
            if each not in _TEXTS:
                _check(each, inner, f"{path}.{each}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check(name, inner, f"{path}[{number}]")
    elif isinstance(value, str) and _is_address(name, value):
        raise InvalidValue(
            f"this model's server may not fetch {shorten(value)}; send the media in the request, as a `data:` URL "
            "with base64",
            param=shorten(path),
        )


def _picture(part: dict[str, Any], path: str) -> Image | None:
    """The file of a part that is a picture in one of the dialects."""
    url, source = part.get("image_url"), part.get("source")
    if isinstance(url, dict):
        url = url.get("url")
    if isinstance(url, str) and _is_data(url):
        return from_url(url, path)
    if part.get("type") == "image" and isinstance(source, dict) and isinstance(source.get("data"), str):
        return from_base64(source["data"], "", path)
    return None


def _is_data(value: str) -> bool:
    return value.lstrip()[:5].lower() == "data:"


def _is_address(name: str, value: str) -> bool:
    """A path is one too where the field is for URLs."""
    return not _is_data(value) and (name.lower().endswith("url") or _ADDRESS.match(value) is not None)
