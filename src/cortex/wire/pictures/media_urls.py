"""Media of a request that a server must not get: those that it would fetch by their addresses, or read from its own
files, and files that are no pictures in the place of pictures. Pure.

Servers take media in many places, and fields that are not known here may be one. So everything in a body is checked but
the fields that are known to hold none (`FieldTable.inert`), and text where it is only text.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any

from cortex.wire.errors import InvalidValue, shorten
from cortex.wire.fields.tables.table import FieldTable
from cortex.wire.pictures.files import header_of
from cortex.wire.pictures.header import format_of
from cortex.wire.pictures.parts import from_base64, from_url
from cortex.wire.requests import PicturePart

_ADDRESS = re.compile(r"(?:https?|wss?|ftps?|file|data):|[a-z][a-z0-9+.-]*:[/\\]{2}", re.IGNORECASE)
"""Also without slashes: some libraries add them."""
_PATH = re.compile(r"[/\\~.]|[a-z]:[/\\]", re.IGNORECASE)
_FOLDER = re.compile(r"[/\\~]|\.\.?[/\\]|[a-z]:[/\\]|.*[/\\]\.\.[/\\]", re.IGNORECASE | re.DOTALL)
"""The start of a text that is a path, while a name may have slashes and dots."""
_SPACES = "".join(map(chr, range(33)))
_IGNORED_IN_ADDRESSES = str.maketrans("", "", "\t\r\n")
"""As URLs are read by browsers and by Python."""
_TEXTS = frozenset(
    (
        *("text", "content", "prompt_string", "refusal", "title", "description", "summary", "instruction"),
        *("thinking", "reasoning", "reasoning_content", "signature", "encrypted_content"),
        *("name", "role", "type", "id", "call_id", "tool_call_id", "arguments", "input", "output"),
    )
)
"""Fields whose texts are never addresses, whatever they hold."""
_TREES = frozenset(
    (
        "function",
        "custom",
        "parameters",
        "input_schema",
        "json_schema",
        "schema",
        "annotations",
        "citations",
        "metadata",
    )
)
"""Fields of functions, of their schemas, and notes on texts: full of addresses that nobody fetches."""
_MEDIA = frozenset(
    (
        *("image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "mask", "masks"),
        *("video", "videos", "audio", "audios", "wav", "media", "multimodal", "mm"),
        *("url", "urls", "uri", "uris", "path", "paths", "file", "files", "src", "href"),
    )
)
"""Words in the names of fields that hold media, at their end."""
_NAMES = frozenset(
    (
        *("adapter", "adapters", "checkpoint", "ckpt", "embedding", "embeddings", "lora", "loras", "vae"),
        *("reference", "references", "speaker", "speakers", "template", "voice", "voices"),
    )
)
"""Words at the end of the names of fields that choose something of the server's, which some servers take as a path."""
_HOLDERS = frozenset(("data", "input", "inputs", "bytes", "b64", "base64", "prompt", "prompts"))
"""Words that may follow those."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
_HEAD_CHARACTERS = 64
_MAX_ADDRESS_CHARACTERS = 8192
"""No path is longer."""
_SIGNATURES = (b"RIFF", b"ID3", b"OggS", b"fLaC", b"FORM", b"\x1aE\xdf\xa3", b"%PDF", b"#!AMR", b"PK\x03\x04")
"""First bytes of files with sound, videos and documents, besides pictures."""


def check_media(body: Mapping[str, Any], table: FieldTable) -> None:
    """Raises InvalidValue for media that are not in the body: the model's server would fetch them from inside its own
    network, or from its files, for a client that may reach neither. Also for files that are no pictures, in the place
    of pictures."""
    are_texts = body.get("modality") in (None, "text") and body.get("input_type") != "image"
    for name, value in body.items():
        if name in table.contents and are_texts:
            _check_contents(value, name)
        elif name not in table.inert:
            _check("image" if name in table.contents else name, value, name)


def check_form(fields: Iterable[tuple[str, str]], table: FieldTable) -> None:
    """The same for the texts in a form or a query. Raises InvalidValue."""
    for name, value in fields:
        if name not in table.contents and name not in table.inert:
            _check(name, value, name)


def _check_contents(value: Any, path: str) -> None:
    """A field with texts: those are none, whatever they hold."""
    if isinstance(value, list):
        for number, inner in enumerate(value):
            if not _is_plain(inner):
                _check_contents(inner, f"{path}[{number}]")
    elif isinstance(value, dict):
        _check("", value, path)


def _is_plain(value: Any) -> bool:
    """Whether a message or an input is only text, as most are."""
    if not isinstance(value, dict):
        return isinstance(value, str)
    for name, inner in value.items():  # noqa: SIM110  a generator takes twice as long
        if not isinstance(inner, str) or name not in _TEXTS:
            return False
    return True


def _check(name: str, value: Any, path: str) -> None:
    if isinstance(value, dict):
        if (image := _picture(value, path)) is not None:
            header_of(image)
        for each, inner in value.items():
            if each not in _TREES and not (each in _TEXTS and isinstance(inner, str)):
                _check(f"{name}_{each}" if each in _HOLDERS else each, inner, f"{path}.{each}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check(name, inner, f"{path}[{number}]")
    elif isinstance(value, str) and value and _is_elsewhere(name, value):
        raise InvalidValue(
            f"{shorten(path)}: this model's server may not fetch {shorten(value)}; send the media in the request, as a "
            "`data:` URL with base64, or as a file of a form.",
            param=shorten(path),
        )


def _picture(part: dict[str, Any], path: str) -> PicturePart | None:
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


def _is_elsewhere(name: str, value: str) -> bool:
    """Whether a text is an address or, in a field for media, anything but a file itself."""
    if _is_data(value):
        return False
    head = value[:_HEAD_CHARACTERS].translate(_IGNORED_IN_ADDRESSES).lstrip(_SPACES)
    if _ADDRESS.match(head):
        return True
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or len(value) > _MAX_ADDRESS_CHARACTERS:
        return False
    if words[-1] in _MEDIA:
        return not _is_file(value)
    if words[-1] in _NAMES:
        return _FOLDER.match(value.translate(_IGNORED_IN_ADDRESSES).lstrip(_SPACES)) is not None and not _is_file(value)
    is_held = words[-1] in _HOLDERS and not _MEDIA.isdisjoint(words)
    return is_held and _PATH.match(head) is not None and not _is_file(value)


def _is_file(text: str) -> bool:
    """Whether a text is base64 of a file: a path can be valid base64, but not that of any file."""
    head = text[:_HEAD_CHARACTERS].translate(_IGNORED_IN_ADDRESSES).replace("-", "+").replace("_", "/")
    try:
        data = binascii.a2b_base64(head[: len(head) // 4 * 4], strict_mode=True)
    except ValueError:
        return False
    return format_of(data) is not None or data.startswith(_SIGNATURES) or data[4:8] == b"ftyp" or _is_mp3(data)


def _is_mp3(data: bytes) -> bool:
    """A frame of MPEG audio, also of AAC: its sync word, and no reserved values behind it."""
    if len(data) < 4 or data[0] != 0xFF:
        return False
    is_aac = data[1] & 0xF6 == 0xF0
    is_mpeg = data[1] & 0xE0 == 0xE0 and data[1] & 0x18 != 0x08 and data[1] & 0x06 and data[2] & 0xF0 != 0xF0
    return is_aac or bool(is_mpeg and data[2] & 0x0C != 0x0C)
