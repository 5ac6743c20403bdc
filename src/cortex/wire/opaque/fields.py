"""The model of an opaque request, and the same request with other values for some fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode

import msgspec

from cortex.wire.errors import InvalidValue, MalformedJSON, MissingModel, shorten
from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.fields.raw_fields import replace_fields
from cortex.wire.opaque import multipart
from cortex.wire.opaque.multipart import BodyBytes, FormPart

Form = Literal["json", "multipart", "urlencoded", "other"]
Piece = bytes | tuple[int, int]
"""New bytes, or a range of the client's."""
_URLENCODED = "application/x-www-form-urlencoded"
_MAX_FIELDS = 1000


class _Model(msgspec.Struct):
    model: str | None = None


_decoder = msgspec.json.Decoder(_Model)


class OpaqueFields(NamedTuple):
    """What is known of a request."""

    model: str
    form: Form
    boundary: bytes = b""
    parts: tuple[FormPart, ...] = ()


def form_of(content_type: str) -> Form:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return "multipart"
    if kind == _URLENCODED:
        return "urlencoded"
    return "json" if kind == "application/json" or kind.endswith("+json") else "other"


def read(content_type: str, body: BodyBytes, query: bytes) -> OpaqueFields:
    """Finds the model in the body or in the query: which of the two the server takes is not known, so they must not
    differ. Raises MissingModel, InvalidValue or MalformedJSON."""
    form = form_of(content_type)
    boundary, names = b"", list[str]()
    parts: tuple[FormPart, ...] = ()
    if form == "json" and len(body):
        names = _in_json(body[:])
    elif form == "multipart":
        boundary = multipart.boundary_of(content_type)
        parts = multipart.parts(body, boundary)
        names = [_text(body[part.value_start : part.value_end]) for part in parts if part.name == "model"]
    elif form == "urlencoded":
        names = [value for name, value in _pairs(body[:]) if name == "model"]
    names += [value for name, value in _pairs(query) if name == "model"]
    if not names or not names[0]:
        raise MissingModel("This request names no model; send `model` in its body or query.")
    if len(set(names)) > 1:
        raise InvalidValue("The request names several models; send one `model`.", param="model")
    if len(names[0]) > MAX_MODEL_NAME or not names[0].isprintable():
        raise InvalidValue(f"`{shorten(names[0])}` is not the name of a model.", param="model")
    return OpaqueFields(names[0], form, boundary, parts)


def edited(
    fields: OpaqueFields, body: bytes, values: Mapping[str, Any], without: Iterable[str] = (), *, num_bytes: int
) -> list[Piece]:
    """The body, which has `num_bytes`, with other values for some fields, in pieces. A body that has no fields stays as
    it is. In a form the new fields come first, and no other has their names."""
    dropped = {*values, *without}
    if fields.form == "json" and body:
        return [replace_fields(body, values, without=without)]
    if fields.form == "urlencoded":
        pairs = [(name, value) for name, value in _pairs(body) if name not in dropped]
        added = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values.items()]
        return [urlencode([*added, *pairs]).encode()]
    if fields.form != "multipart":
        return [(0, num_bytes)]
    pieces: list[Piece] = [b"".join(multipart.field(fields.boundary, *pair) for pair in values.items())]
    ends = [*(part.start for part in fields.parts[1:]), fields.parts[-1].value_end + 2] if fields.parts else []
    for part, end in zip(fields.parts, ends, strict=True):
        if part.name not in dropped:
            pieces.append((part.start, end))
    pieces.append((ends[-1], num_bytes) if ends else b"--%b--\r\n" % fields.boundary)
    return pieces


def edited_query(query: bytes, values: Mapping[str, Any]) -> bytes:
    """The query with other values for the fields that it has."""
    pairs = _pairs(query)
    if not any(name in values for name, _ in pairs):
        return query
    return urlencode([(name, values.get(name, value)) for name, value in pairs]).encode()


def _in_json(body: bytes) -> list[str]:
    try:
        model = _decoder.decode(body).model
    except msgspec.ValidationError as problem:
        raise InvalidValue(f"Invalid body: {shorten(str(problem))}.", param="model") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise MalformedJSON(f"The body is not valid JSON: {shorten(str(problem))}.") from None
    return [] if model is None else [model]


def _text(value: bytes) -> str:
    if len(value) > 4 * MAX_MODEL_NAME:
        raise InvalidValue("`model` is too long for the name of a model.", param="model")
    return value.decode("utf-8", "replace").strip()


def _pairs(text: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(text.decode("latin-1"), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise InvalidValue(f"A form may have {_MAX_FIELDS} fields; send fewer.") from None
