"""Media of a request that a server must not get: those that it would fetch by their addresses, or read from its own
files, and files that are no pictures in the place of pictures. Pure.

Servers take media in many places, and fields that are not known here may be one. So everything in a body is checked but
the fields that are known to hold none (`FieldTable.inert`), and text where it is only text.
"""

from __future__ import annotations

import binascii
import json
import re
import string
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from cortex.wire.errors import InvalidValue, shorten
from cortex.wire.fields.tables.table import FieldTable
from cortex.wire.pictures.files import header_of
from cortex.wire.pictures.header import format_of
from cortex.wire.pictures.parts import from_base64, from_url
from cortex.wire.requests import PicturePart

_ADDRESS = re.compile(r"(?:https?|wss?|ftps?|file|data):|[a-z][a-z0-9+.-]*:[/\\]{2}", re.IGNORECASE)
"""Also without slashes: some libraries add them."""
_INNER_ADDRESS = re.compile(r"[^\s/]*:[/\\]{2}\S*")
"""An address behind a prefix, such as `blob:` or `<`, which some libraries strip. Unlike one in a sentence."""
_PATH = re.compile(r"[/\\~.]|[a-z]:[/\\]", re.IGNORECASE)
_FOLDER = re.compile(r"[/\\~]|\.\.?[/\\]|[a-z]:[/\\]|.*[/\\]\.\.[/\\]", re.IGNORECASE | re.DOTALL)
"""The start of a text that is a path, while a name may have slashes and dots."""
_BLANK = re.compile(r"[\s\x00-\x20\x7f-\xa0\xad\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]*")
"""What servers may strip: spaces, control characters and characters without a width."""
_HEAD = re.compile(r"(?:[\t\r\n]*+[^\t\r\n]){0,64}")
_IGNORED_IN_ADDRESSES = str.maketrans("", "", "\t\r\n")
"""As URLs are read by browsers and by Python."""
_SCALARS = frozenset((bool, int, float, type(None)))
"""Types of values with neither texts nor other values in them."""
_TEXTS = frozenset(
    (
        *("text", "content", "prompt_string", "refusal", "title", "description", "summary", "instruction"),
        *("thinking", "reasoning", "reasoning_content", "signature", "encrypted_content"),
        *("name", "role", "type", "id", "call_id", "tool_call_id", "arguments", "input", "output"),
    )
)
"""Fields whose texts are never addresses, whatever they hold."""
_CHOICES = frozenset(("id", "name"))
"""Those of them that choose a voice or an adapter where any field may be a path."""
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
"""Fields of functions, of their schemas, and notes on texts: full of addresses that nobody fetches, but for those of
`_REFERENCES`."""
_REFERENCES = frozenset(("$ref", "$dynamicRef", "$recursiveRef"))
"""Fields of a schema whose addresses libraries fetch, unless they are places in the schema itself."""
_MEDIA = frozenset(
    (
        *("image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "mask", "masks"),
        *("video", "videos", "audio", "audios", "wav", "pdf", "pdfs", "media", "modal", "multimodal", "mm"),
        *("url", "urls", "uri", "uris", "path", "paths", "file", "files", "src", "href"),
    )
)
"""Words in the names of fields that hold media: nothing but a file may stand in those that end with one, and no path in
the others."""
_NAMES = frozenset(
    (
        *("adapter", "adapters", "checkpoint", "ckpt", "embedding", "embeddings", "lora", "loras", "vae"),
        *("ref", "refs", "reference", "references", "speaker", "speakers", "speech", "template", "voice", "voices"),
    )
)
"""Words at the end of the names of fields that choose something of the server's, which some servers take as a path."""
_ENCODED = frozenset(("data", "bytes", "b64", "base64"))
_HOLDERS = _ENCODED | {"input", "inputs", "prompt", "prompts"}
"""Words that may follow those of media. Behind the first ones nothing but base64 can stand."""
_PROSE = frozenset(
    (
        *("text", "texts", "caption", "description", "lyrics", "style", "words", "hotwords"),
        *("input", "inputs", "prompt", "prompts", "instruction", "instructions"),
    )
)
"""Words at the end of the names of fields with text that may begin like a path."""
_KINDS = frozenset(
    ("image", "images", "img", "picture", "pictures", "photo", "audio", "speech", "sound", "video", "videos")
)
_KIND_WORDS = _KINDS | {"url", "base64", "b64", "embedding", "embeddings", "embed", "query", "document", "input"}
_KIND_FIELDS = frozenset(
    (
        *("modality", "inputmodality", "inputmodalities", "inputtype", "inputtypes", "inputkind", "inputformat"),
        *("task", "tasktype", "type", "datatype", "mediatype", "contenttype"),
    )
)
"""Fields that say what the inputs are, without case and separators."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
_MAX_PATH_CHARACTERS = 4096
_MAX_COMPONENT_CHARACTERS = 255
_SLASHES = re.compile(rb"/{2,}")
_BASE64 = bytes(string.ascii_letters + string.digits + "+/-_", "ascii")
_MIN_FILE_CHARACTERS = 24
_MAX_PARSED = 100_000
"""Values in one field of a form: objects and arrays take many times the memory of their text."""
_SIGNATURE_CHARACTERS = 64
_SIGNATURES = (b"RIFF", b"ID3", b"OggS", b"fLaC", b"FORM", b"\x1aE\xdf\xa3", b"%PDF", b"#!AMR", b"PK\x03\x04")
"""First bytes of files with sound, videos and documents, besides pictures."""


def check_media(body: Mapping[str, Any], table: FieldTable) -> None:
    """Raises InvalidValue for media that are not in the body: the model's server would fetch them from inside its own
    network, or from its files, for a client that may reach neither. Also for files that are no pictures, in the place
    of pictures."""
    plain = _fields_of_no_kind(table)
    are_texts = plain.issuperset(body) or not any(
        _names_media(name, value, table) for name, value in body.items() if name not in plain
    )
    for name, value in body.items():
        if type(value) in _SCALARS:
            continue
        if name in table.contents and are_texts:
            _check_contents(value, name, opens_paths=table.opens_paths)
        elif name not in table.inert:
            _check("image" if name in table.contents else name, value, name, opens_paths=table.opens_paths)
        else:
            _check_references(value, name)


def check_form(fields: Iterable[tuple[str, str]], table: FieldTable) -> None:
    """The same for the texts in a form or a query, which may be JSON. Raises InvalidValue."""
    for name, text in fields:
        value = _parsed(text)
        if not isinstance(value, str):
            check_media({name: value}, table)
        elif name not in table.contents and name not in table.inert:
            _check(name, value, name, opens_paths=table.opens_paths)


def _parsed(text: str) -> Any:
    """The object, array or text of a text that is JSON, otherwise the text. Raises InvalidValue."""
    start = _blank_end(text)
    if text[start : start + 1] not in ("{", "[", '"'):
        return text
    if sum(map(text.count, ",[{")) > _MAX_PARSED:
        raise InvalidValue("A field of the form is JSON with too many values; send fewer.")
    try:
        return json.loads(text[start:], object_pairs_hook=_object, parse_int=float, strict=False)
    except json.JSONDecodeError:
        return text
    except RecursionError:
        raise InvalidValue("A field of the form is nested too deeply; flatten it.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises InvalidValue: which of two equal names a server takes is not known."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise InvalidValue("An object in the form has the same name twice; send each name once.")
    return values


@cache
def _fields_of_no_kind(table: FieldTable) -> frozenset[str]:
    """The fields of a table that do not say what the inputs are."""
    return frozenset(name for name in table.names if "".join(_words(name)) not in _KIND_FIELDS)


def _names_media(name: str, value: Any, table: FieldTable) -> bool:
    """Whether a field says that the inputs are no texts."""
    field = "".join(_words(name))
    if field not in _KIND_FIELDS or (table.opens_paths and field != "modality"):
        return False  # speech and pictures are what opaque routes make of texts
    for kind in value if isinstance(value, list) else (value,):
        words = frozenset(_words(kind)) if isinstance(kind, str) else frozenset()
        if field == "modality" and kind is not None and words != {"text"}:
            return True
        if not _KINDS.isdisjoint(words) and words <= _KIND_WORDS:
            return True
    return False


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


def _check_contents(value: Any, path: str, *, opens_paths: bool) -> None:
    """A field with texts: those are none, whatever they hold."""
    if isinstance(value, list):
        for number, inner in enumerate(value):
            if opens_paths or not _is_plain(inner):
                _check_contents(inner, f"{path}[{number}]", opens_paths=opens_paths)
    elif isinstance(value, dict):
        _check("", value, path, opens_paths=opens_paths)


def _is_plain(value: Any) -> bool:
    """Whether a message or an input is only text, as most are."""
    if not isinstance(value, dict):
        return isinstance(value, str)
    for name, inner in value.items():  # noqa: SIM110  a generator takes twice as long
        if not isinstance(inner, str) or name not in _TEXTS:
            return False
    return True


def _check(name: str, value: Any, path: str, *, opens_paths: bool) -> None:
    if isinstance(value, dict):
        if (picture := _picture(value, path)) is not None:
            header_of(picture)
        for each, inner in value.items():
            is_text = each in _TEXTS and isinstance(inner, str) and not (opens_paths and each in _CHOICES)
            if each in _TREES:
                _check_references(inner, f"{path}.{each}")
            elif not is_text:
                inner_name = f"{name}_{each}" if each in _HOLDERS else each
                _check(inner_name, inner, f"{path}.{each}", opens_paths=opens_paths)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check(name, inner, f"{path}[{number}]", opens_paths=opens_paths)
    elif isinstance(value, str) and value and _is_elsewhere(name, value, opens_paths=opens_paths):
        raise InvalidValue(
            f"{shorten(path)}: this model's server may not fetch {shorten(value)}; send the media in the request, as a "
            "`data:` URL with base64, or as a file of a form.",
            param=shorten(path),
        )


def _check_references(value: Any, path: str) -> None:
    """What may be a schema, or its text. Raises InvalidValue."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        value = _parsed(value)
    if isinstance(value, list):
        for number, inner in enumerate(value):
            _check_references(inner, f"{path}[{number}]")
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check_references(inner, f"{path}.{name}")
            if name in _REFERENCES and isinstance(inner, str) and not inner.startswith("#"):
                raise InvalidValue(
                    f"{shorten(path)}: this model's server may not fetch the schema {shorten(inner)}; put it into "
                    "`$defs`, and refer to it with `#/$defs/…`.",
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


def _is_elsewhere(name: str, value: str, *, opens_paths: bool) -> bool:
    """Whether a text is an address or, in a field for media, anything but a file itself. `opens_paths`: whether any
    field may be one for media."""
    if _is_data(value):
        return False
    value = value[_blank_end(value) :]
    head = _HEAD.match(value)[0].translate(_IGNORED_IN_ADDRESSES)  # type: ignore[index]  # it matches any text
    if _ADDRESS.match(head) or _INNER_ADDRESS.fullmatch(head):
        return True
    words = _words(name)
    if not words:
        return False
    last, has_media = words[-1], not _MEDIA.isdisjoint(words)
    if last in _MEDIA:
        return not _is_file(value)
    if last in _HOLDERS and has_media:
        if _PATH.match(head):
            return not _is_file(value)
        return last in _ENCODED and not _is_encoded(value)
    if last in _NAMES or ((has_media or opens_paths) and last not in _PROSE):
        return _FOLDER.match(value.translate(_IGNORED_IN_ADDRESSES)) is not None and not _is_file(value)
    return False


def _blank_end(text: str) -> int:
    return _BLANK.match(text).end()  # type: ignore[union-attr]  # it matches any text


def _is_file(text: str) -> bool:
    """Whether a text is base64 of a file. A path can be valid base64, too, and even begin like a file: sound begins
    with `//`. So a text is no such file while it could be opened as a path."""
    plain = _base64_of(text)
    if plain is None or len(plain) < _MIN_FILE_CHARACTERS:
        return False
    has_signature = _has_signature(plain)
    if has_signature and not plain.startswith((b"//", b"/+")):
        return True
    return not _may_be_path(plain) and (has_signature or len(plain) > _MAX_PATH_CHARACTERS)


def _is_encoded(text: str) -> bool:
    """Whether a text is base64, of a file or of any bytes if it has no slashes, which relative paths have."""
    plain = _base64_of(text)
    return plain is not None and (b"/" not in plain or _is_file(text))


def _base64_of(text: str) -> bytes | None:
    """A text of base64 without spaces and padding; None: it is none. The alphabet may be that of URLs, and the padding
    may be missing."""
    try:
        padded = text.encode("ascii").translate(None, b" \t\r\n")
    except UnicodeEncodeError:
        return None
    padding = padded.translate(None, _BASE64)
    plain = padded.removesuffix(padding)
    if len(plain) + len(padding) != len(padded) or len(plain) % 4 == 1:
        return None
    return plain if not padding or padding == b"=" * (-len(plain) % 4) else None


def _may_be_path(plain: bytes) -> bool:
    """Whether an operating system could open base64 as a path. It has no dots, so only repeated slashes make it shorter
    than it looks."""
    for part in (plain[: 4 * _MAX_PATH_CHARACTERS], plain):  # the first is enough for most files
        path = _SLASHES.sub(b"/", part)
        if len(path) > _MAX_PATH_CHARACTERS or max(map(len, path.split(b"/"))) > _MAX_COMPONENT_CHARACTERS:
            return False
    return True


def _has_signature(plain: bytes) -> bool:
    head = plain[: min(len(plain), _SIGNATURE_CHARACTERS) // 4 * 4]
    data = binascii.a2b_base64(head.replace(b"-", b"+").replace(b"_", b"/"))
    return format_of(data) is not None or data.startswith(_SIGNATURES) or data[4:8] == b"ftyp" or _is_mp3(data)


def _is_mp3(data: bytes) -> bool:
    """A frame of MPEG audio, also of AAC: its sync word, and no reserved values behind it."""
    if len(data) < 4 or data[0] != 0xFF:
        return False
    is_aac = data[1] & 0xF6 == 0xF0
    is_mpeg = data[1] & 0xE0 == 0xE0 and data[1] & 0x18 != 0x08 and data[1] & 0x06 and data[2] & 0xF0 != 0xF0
    return is_aac or bool(is_mpeg and data[2] & 0x0C != 0x0C)
