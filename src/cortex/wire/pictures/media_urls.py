"""Media of a conversation that a server must not get: those that it would fetch by their addresses, and files that are
no pictures in the place of pictures. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cortex.wire.errors import InvalidValue, shorten
from cortex.wire.pictures.files import header_of
from cortex.wire.pictures.parts import from_base64, from_url
from cortex.wire.requests import Image

_ADDRESS = re.compile(r"\s*([a-z][a-z0-9+.-]*://|file:)", re.IGNORECASE)
_TEXTS = frozenset({"text", "refusal", "thinking", "reasoning"})
"""Fields of a part that are never an address, whatever they hold."""


def check_media(body: Mapping[str, Any]) -> None:
    """Raises InvalidValue for media in a conversation that are not in it: the model's server would fetch them from
    inside its own network, or from its files, for a client that may reach neither. Also for files that are no pictures,
    in the place of pictures."""
    for name in ("messages", "input"):
        turns = body.get(name)
        for number, turn in enumerate(turns if isinstance(turns, list) else ()):
            for place in ("content", "output"):
                content = turn.get(place) if isinstance(turn, dict) else None
                if isinstance(content, list | dict):
                    _check("", content, f"{name}[{number}].{place}")


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
