"""The model of an opaque request, and the same request as its server gets it: written again, so that the server reads
what was read here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode

import msgspec

from cortex.wire.errors import InvalidValue, MissingModel, UnsupportedMediaType, shorten
from cortex.wire.fields.body import MAX_MODEL_NAME, decode
from cortex.wire.fields.sampling import MAX_CHOICES
from cortex.wire.fields.tables.opaque import FIELDS
from cortex.wire.opaque import multipart
from cortex.wire.opaque.multipart import BodyBytes, FormPart, parse_media_type
from cortex.wire.pictures.media_urls import check_form

Form = Literal["json", "multipart", "urlencoded", "other"]
Piece = bytes | tuple[int, int]
"""New bytes, or a range of the client's."""
Pairs = tuple[tuple[str, str], ...]
_URLENCODED = "application/x-www-form-urlencoded"
_MAX_FIELDS = 1000
_MAX_TEXT_BYTES = 1 << 25
_UNCHECKED = FIELDS.contents | FIELDS.inert


class _Model(msgspec.Struct):
    model: str | None = None


class OpaqueFields(NamedTuple):
    """The known fields of a request."""

    model: str
    form: Form
    """The encoding of the body; `other` for none of the three."""
    parts: tuple[FormPart, ...] = ()
    pairs: Pairs = ()
    """The fields of a urlencoded form."""
    query: Pairs = ()
    num_choices: int = 1
    """How many pictures a form or a query asks for. That of JSON is read with its envelope."""

    @property
    def names(self) -> dict[str, None]:
        """The names of all fields, in order."""
        names = (*(part.name for part in self.parts), *(name for name, _ in (*self.pairs, *self.query)))
        return dict.fromkeys(names)

    def check_known(self) -> None:
        """Raises InvalidValue for a field that could choose another model."""
        FIELDS.check_known(self.names)

    def check_overrides(self, overridden: Iterable[str]) -> None:
        """Raises InvalidValue for another spelling of a field that is set or removed."""
        FIELDS.check_overrides(self.names, overridden)


class WrittenForm(NamedTuple):
    """A body for a server."""

    content_type: str
    pieces: list[Piece]


def form_of(content_type: str) -> Form:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return "multipart"
    if kind == _URLENCODED:
        return "urlencoded"
    return "json" if kind == "application/json" or kind.endswith("+json") else "other"


def read(content_type: str, body: BodyBytes, query: bytes) -> OpaqueFields:
    """Finds the model in the body, or in the query of a request without one: which of the two a server would take is
    not known. Raises MissingModel, InvalidValue, UnsupportedMediaType or MalformedJSON."""
    asked = _pairs(query)
    check_form(_checked(asked), FIELDS)
    counts = _named("n", asked)
    if not len(body):
        return OpaqueFields(_model(_named("model", asked)), "other", query=asked, num_choices=_count(counts))
    if _named("model", asked):
        raise InvalidValue("`model` is in the query of a request with a body; send it in the body only.", param="model")
    form = form_of(content_type)
    if form == "json":
        return OpaqueFields(_model(_in_json(body[:])), form, query=asked)
    if form == "urlencoded":
        parse_media_type(content_type).check_charset()
        pairs = _pairs(body[:])
        check_form(_checked(pairs), FIELDS)
        num_choices = _count([*counts, *_named("n", pairs)])
        return OpaqueFields(_model(_named("model", pairs)), form, pairs=pairs, query=asked, num_choices=num_choices)
    if form == "multipart":
        parts = multipart.parts(body, multipart.boundary_of(content_type))
        _check_names(part.name for part in parts)
        check_form(_texts(parts, body), FIELDS)
        num_choices = _count([*counts, *_values("n", parts, body)])
        return OpaqueFields(_model(_values("model", parts, body)), form, parts, query=asked, num_choices=num_choices)
    raise UnsupportedMediaType(
        "The model is in the body of a request that has one: send it as JSON, as multipart/form-data or as "
        f"{_URLENCODED}, with its Content-Type."
    )


def written_form(fields: OpaqueFields, values: Mapping[str, Any], without: Iterable[str] = ()) -> WrittenForm:
    """A form with other values for some fields, which come first, and without others."""
    dropped = {*values, *without}
    if fields.form == "urlencoded":
        pairs = [(name, value) for name, value in fields.pairs if name not in dropped]
        added = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values.items()]
        return WrittenForm(_URLENCODED, [urlencode([*added, *pairs]).encode()])
    assert fields.form == "multipart"
    boundary = multipart.new_boundary()
    pieces: list[Piece] = [multipart.field(boundary, *pair) for pair in values.items()]
    for part in fields.parts:
        if part.name not in dropped:
            pieces += [multipart.head(boundary, part), (part.value_start, part.value_end), b"\r\n"]
    pieces.append(b"--%b--\r\n" % boundary)
    return WrittenForm(f"multipart/form-data; boundary={boundary.decode()}", pieces)


def written_query(fields: OpaqueFields, values: Mapping[str, Any], without: Iterable[str] = ()) -> bytes:
    """The query with other values for those of its fields that `values` has, and without others."""
    dropped = {*values, *without}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    once = dict.fromkeys(name for name, _ in fields.query if name in texts)
    kept = [(name, value) for name, value in fields.query if name not in dropped]
    return urlencode([*((name, texts[name]) for name in once), *kept]).encode()


def _model(names: list[str]) -> str:
    if not names or not names[0]:
        raise MissingModel("This request names no model; send `model` in its body, or in the query without a body.")
    if len(set(names)) > 1:
        raise InvalidValue("The request names several models; send one `model`.", param="model")
    if len(names[0]) > MAX_MODEL_NAME or not names[0].isprintable():
        raise InvalidValue(f"`{shorten(names[0])}` is not the name of a model.", param="model")
    return names[0]


def _in_json(body: bytes) -> list[str]:
    model = decode(body, _Model).model
    return [] if model is None else [model]


def _count(texts: list[str]) -> int:
    """Raises InvalidValue."""
    if not texts:
        return 1
    text = texts[0].strip()
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_CHOICES)) else 0
    if len(texts) > 1 or not 1 <= number <= MAX_CHOICES:
        raise InvalidValue(f"`n` must be one number between 1 and {MAX_CHOICES}.", param="n")
    return number


def _values(name: str, parts: Iterable[FormPart], body: BodyBytes) -> list[str]:
    """The short texts of the fields of that name. Raises InvalidValue."""
    found = [part for part in parts if part.name == name]
    if any(part.value_end - part.value_start > 4 * MAX_MODEL_NAME for part in found):
        raise InvalidValue(f"`{name}` is too long.", param=name)
    return [body[part.value_start : part.value_end].decode("utf-8", "replace").strip() for part in found]


def _checked(pairs: Pairs) -> Iterator[tuple[str, str]]:
    """Without the fields that are only text, even if it looks like JSON."""
    return (pair for pair in pairs if pair[0] not in _UNCHECKED)


def _texts(parts: Iterable[FormPart], body: BodyBytes) -> Iterator[tuple[str, str]]:
    """The fields of a form that a server may read as text or as JSON. Raises InvalidValue."""
    for part in parts:
        kind = part.content_type or "text/plain"
        is_text = kind.startswith("text/") or form_of(kind) in ("json", "urlencoded")
        if form_of(kind) != "json" and (part.filename is not None or part.name in _UNCHECKED):
            continue
        if is_text and part.value_end - part.value_start > _MAX_TEXT_BYTES:
            raise InvalidValue(f"{shorten(part.name)}: the text is too long; send it as a file of the form.")
        value = body[part.value_start : min(part.value_end, part.value_start + _MAX_TEXT_BYTES)]
        text = value.decode("utf-8", "replace")
        if is_text or "\ufffd" not in text:  # a server may read a file without a name as text
            yield part.name, text


def _pairs(text: bytes) -> Pairs:
    """The fields of a query or a form. Only `&` separates them: some servers also divide at `;`, which `urlencode`
    escapes."""
    try:
        found = parse_qsl(text.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except UnicodeDecodeError:
        raise InvalidValue("A query or form has characters that are not UTF-8 in percent escapes.") from None
    except ValueError:
        raise InvalidValue(f"A form may have {_MAX_FIELDS} fields; send fewer.") from None
    _check_names(name for name, _ in found)
    return tuple(found)


def _named(name: str, pairs: Pairs) -> list[str]:
    return [value for each, value in pairs if each == name]


def _check_names(names: Iterable[str]) -> None:
    """Raises InvalidValue."""
    listed = list(names)
    FIELDS.check_spelling(listed)
    if "_charset_" in listed:
        raise InvalidValue("`_charset_` is not read here; leave it out, and send UTF-8.", param="_charset_")
