"""Finds the fields of a `multipart/form-data` body, and writes such fields. Nothing is copied: a part is two positions.

What could be read in two ways is rejected, because the server may read it the other
way: a field without a plain name, more than one `model`, or a delimiter with something else behind it.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, Protocol

from cortex.wire.errors import InvalidValue


class BodyBytes(Protocol):
    """Bytes, or a file that is read where it is searched."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> bytes: ...
    def find(self, wanted: bytes, start: int = 0, end: int | None = None, /) -> int: ...


_MAX_PARTS = 512
_MAX_HEAD_BYTES = 16 * 1024
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))\s*(?:;|$)', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition[ \t]*:[ \t]*form-data[ \t]*;(.*)$", re.IGNORECASE | re.MULTILINE)
_ENCODED_NAME = re.compile(rb"(?:^|;)[ \t]*name[ \t]*\*", re.IGNORECASE)
"""Also `name*0`: some servers take it instead of `name`."""
_NAME = re.compile(rb'(?:^|;)[ \t]*name[ \t]*=[ \t]*(?:"([^"\\]*)"|([^\s;"\\]+))[ \t]*(?=;|\r|$)', re.IGNORECASE)


class FormPart(NamedTuple):
    """One field."""

    name: str
    start: int
    """Where its delimiter begins."""
    value_start: int
    value_end: int
    """Where the line break before the next delimiter begins."""


def boundary_of(content_type: str) -> bytes:
    """Raises InvalidValue."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise InvalidValue("The multipart body has no boundary; send it in the Content-Type.")
    return (found[1] or found[2]).encode("latin-1")


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
        following = _next(data, delimiter, head_end + 2)
        name = _name(data[head_start + 2 : head_end + 2])
        found.append(FormPart(name, start, head_end + 4, following - 2))
        start = following
    return tuple(found)


def field(boundary: bytes, name: str, value: Any) -> bytes:
    """A field with its delimiter. Text is sent as it is, other values as JSON."""
    text = value if isinstance(value, str) else json.dumps(value)
    if not name.isprintable() or '"' in name or "\\" in name:
        raise InvalidValue(f"{name!r} cannot be the name of a form field.")
    head = f'Content-Disposition: form-data; name="{name}"'.encode()
    return b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, text.encode())


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


def _name(head: bytes) -> str:
    dispositions = _DISPOSITION.findall(head)
    names = _NAME.findall(dispositions[0].rstrip(b"\r")) if len(dispositions) == 1 else []
    if len(names) != 1 or _ENCODED_NAME.search(dispositions[0]):
        raise _broken("a field has no plain name")
    try:
        return bytes(names[0][0] or names[0][1]).decode()
    except UnicodeDecodeError:
        raise _broken("the name of a field is not UTF-8") from None


def _broken(why: str) -> InvalidValue:
    return InvalidValue(f"The multipart body is malformed: {why}.")
