"""Finds the fields of a `multipart/form-data` body, and writes them again. No value is copied: it is two positions.

Servers disagree on what ends a line, on repeated and folded headers, and on what stands before the first field and
behind the last. So a server gets the values of a client between delimiters and headers that are written here, with a
boundary that no value contains. What could be read in two ways here is rejected.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

from cortex.wire.errors import CortexError, InvalidValue, UnsupportedMediaType, shorten

_TOKEN = r"[!#$%&'+.^_`|~0-9A-Za-z-]+"
"""Without `*`, which marks parameters that only some servers read (`boundary*=`, `boundary*0=`)."""
_KIND = re.compile(rf"({_TOKEN}/{_TOKEN})[ \t]*", re.ASCII)
_PARAMETER = re.compile(rf';[ \t]*(?:({_TOKEN}\*?)=(?:({_TOKEN})|"((?:[^"\\]|\\.)*)"))?[ \t]*', re.ASCII)


class MediaType(NamedTuple):
    kind: str
    """Lower-case, such as `application/json`."""
    parameters: dict[str, str]
    """By lower-case name."""

    def check_charset(self) -> None:
        """Raises UnsupportedMediaType for text that is not UTF-8."""
        charset = self.parameters.get("charset", "utf-8")
        if charset.lower() not in ("utf-8", "utf8", "us-ascii"):
            raise UnsupportedMediaType(f"The charset '{shorten(charset)}' is not read here; send UTF-8.")


def parse_media_type(text: str) -> MediaType:
    """Raises UnsupportedMediaType."""
    found = _KIND.match(text)
    parameters = None if found is None or not _is_plain(text) else parse_parameters(text[found.end() :])
    if found is None or parameters is None:
        raise UnsupportedMediaType(
            f"'{shorten(text)}' is not a plain media type; send one type, with each parameter once."
        )
    return MediaType(found[1].lower(), parameters)


def parse_parameters(text: str) -> dict[str, str] | None:
    """The parameters of a header, `; name=value` each; None where they could be read in another way. Only a name that
    ends with `*`, whose value is encoded, may be next to the same name without it."""
    parameters: dict[str, str] = {}
    position = 0
    while position < len(text):
        found = _PARAMETER.match(text, position)
        if found is None:
            return None
        position = found.end()
        if found[1] is not None:
            name = found[1].lower()
            if name in parameters:
                return None
            parameters[name] = found[2] if found[2] is not None else re.sub(r"\\(.)", r"\1", found[3])
    return parameters


def _is_plain(text: str) -> bool:
    """No parameter of a media type is encoded or has escapes."""
    return "*" not in text and "\\" not in text and text.isascii() and text.isprintable()


class BodyBytes(Protocol):
    """Bytes, or a file that is read where it is searched."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> bytes: ...
    def find(self, wanted: bytes, start: int = 0, end: int | None = None, /) -> int: ...


_MAX_PARTS = 512
_MAX_HEAD_BYTES = 16 * 1024
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+)[ \t]*:[ \t]*(.*?)[ \t]*", re.DOTALL)
_FORM_DATA = re.compile(r"form-data[ \t]*", re.IGNORECASE)
_ENCODED = re.compile(r"utf-8'[A-Za-z0-9-]*'((?:[A-Za-z0-9!#$&+.^_`|~-]|%[0-9A-Fa-f]{2})*)", re.IGNORECASE)
_TEXT = "text/plain"
_FILENAMES = ("filename", "filename*")
_PLAIN_ENCODINGS = ("7bit", "8bit", "binary")


class FormPart(NamedTuple):
    """One field."""

    name: str
    value_start: int
    value_end: int
    """Where the line break before the next delimiter begins."""
    filename: str | None = None
    """None: it is no file."""
    content_type: str | None = None


def boundary_of(content_type: str) -> bytes:
    """Raises InvalidValue or UnsupportedMediaType."""
    media_type = parse_media_type(content_type)
    media_type.check_charset()
    boundary = media_type.parameters.get("boundary", "")
    if not _BOUNDARY.fullmatch(boundary):
        raise InvalidValue("The multipart body has no boundary, or an invalid one; send it in the Content-Type.")
    return boundary.encode()


def new_boundary() -> bytes:
    """One that nobody can have guessed, so that no value contains it."""
    return b"cortex-" + secrets.token_hex(16).encode()


def parts(data: BodyBytes, boundary: bytes) -> tuple[FormPart, ...]:
    """The fields, in order. Raises InvalidValue for a body that is not whole."""
    delimiter = b"--" + boundary
    start = _checked(data, delimiter, 0) if data[: len(delimiter)] == delimiter else _next(data, delimiter, 0)
    found: list[FormPart] = []
    while data[start + len(delimiter) : start + len(delimiter) + 2] != b"--":
        if len(found) >= _MAX_PARTS:
            raise InvalidValue(f"The multipart body has over {_MAX_PARTS} fields; send fewer.")
        head_start = start + len(delimiter)
        head_end = data.find(b"\r\n\r\n", head_start, head_start + _MAX_HEAD_BYTES)
        if head_end < 0:
            raise _broken("a field has no end of its headers")
        start = _next(data, delimiter, head_end + 2)
        found.append(_part(data[head_start + 2 : head_end], head_end + 4, start - 2))
    return tuple(found)


def field(boundary: bytes, name: str, value: Any) -> bytes:
    """A field with its delimiter. Text is sent as it is, other values as JSON."""
    text = value if isinstance(value, str) else json.dumps(value)
    return b"%b%b\r\n" % (head(boundary, FormPart(name, 0, 0)), text.encode())


def head(boundary: bytes, part: FormPart) -> bytes:
    """The delimiter and the headers of a field, up to its value. Raises InvalidValue."""
    if not part.name.isprintable() or '"' in part.name or "\\" in part.name:
        raise InvalidValue(f"{part.name!r} cannot be the name of a form field.")
    lines = [f'Content-Disposition: form-data; name="{part.name}"']
    if part.filename is not None:
        lines[0] += f'; filename="{_last_part(part.filename)}"'
    if part.content_type is not None:
        lines.append(f"Content-Type: {part.content_type}")
    return b"--%b\r\n%b\r\n\r\n" % (boundary, "\r\n".join(lines).encode())


def _last_part(filename: str) -> str:
    """The name without folders, and without what would end it."""
    name = re.split(r"[/\\]", filename)[-1].replace('"', "%22")
    return "".join(character for character in name if character.isprintable())


def _next(data: BodyBytes, delimiter: bytes, position: int) -> int:
    """Where the next delimiter begins that starts a line."""
    position = data.find(b"\r\n" + delimiter, position)
    if position < 0:
        raise _broken("its last delimiter is missing")
    return _checked(data, delimiter, position + 2)


def _checked(data: BodyBytes, delimiter: bytes, start: int) -> int:
    """The delimiter at `start` must end there. Such bytes cannot be those of a file: no boundary is in what it bounds.
    To search on instead would read a window for each, and a body can have millions."""
    end = start + len(delimiter)
    if data[end : end + 2] not in (b"--", b"\r\n"):
        raise _broken("something follows a delimiter in its line")
    return start


def _part(text: bytes, value_start: int, value_end: int) -> FormPart:
    headers: dict[bytes, str] = {}
    for line in text.split(b"\r\n"):
        found = _HEADER.fullmatch(line)
        if found is None or b"\r" in line or b"\n" in line or found[1].lower() in headers:
            raise _broken("a field has a header that is folded, repeated or no header")
        try:
            headers[found[1].lower()] = found[2].decode()
        except UnicodeDecodeError:
            raise _broken("a header of a field is not UTF-8") from None
    if headers.get(b"content-transfer-encoding", "binary").lower() not in _PLAIN_ENCODINGS:
        raise _broken("a field is encoded; send its bytes as they are")
    disposition = headers.get(b"content-disposition", "")
    kind = _FORM_DATA.match(disposition)
    parameters = None if kind is None else parse_parameters(disposition[kind.end() :])
    name = None if parameters is None else parameters.get("name")
    if parameters is None or not name or "name*" in parameters or not set(parameters) <= {"name", *_FILENAMES}:
        raise _broken("a field has no plain name")
    if '"' in name or "\\" in name or not name.isprintable():
        raise _broken("the name of a field has quotes, backslashes or control characters")
    filename = _filename(parameters)
    content_type = _content_type(headers.get(b"content-type", _TEXT))
    is_plain = filename is None and content_type == _TEXT  # as text without a type
    return FormPart(name, value_start, value_end, filename, None if is_plain else content_type)


def _filename(parameters: dict[str, str]) -> str | None:
    encoded = parameters.get("filename*")
    if encoded is None:
        return parameters.get("filename")
    found = _ENCODED.fullmatch(encoded)
    if found is None:
        raise _broken("the name of a file is encoded in an unknown way")
    return unquote(found[1])


def _content_type(text: str) -> str:
    """The type of a file, without parameters that a server could act on."""
    try:
        kind = parse_media_type(text).kind
    except CortexError as problem:
        raise _broken("a field has an invalid Content-Type") from problem
    if kind.startswith("multipart/"):
        raise _broken("a field is a form of its own")
    return kind


def _broken(why: str) -> InvalidValue:
    return InvalidValue(f"The multipart body is malformed: {why}.")
