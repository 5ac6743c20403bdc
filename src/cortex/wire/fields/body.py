"""Reads a JSON body field by field, so that raw dicts do not travel further.

A field that is absent or `null` reads as `None`. A wrong type or a value out of range raises `InvalidValue`, whose
`param` is the path in the body (`messages[2].content[0].text`). Every number has a range: a value that is accepted here
must be computable everywhere later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Raw

from cortex.wire.errors import InvalidValue, MalformedJSON, MissingModel, UnsupportedMediaType, shorten

R = TypeVar("R")
T = TypeVar("T")

MAX_MODEL_NAME = 200
"""Characters in the name of a model."""

LARGEST_INTEGER = 2**63 - 1
"""The largest signed 64-bit integer. Its negative is the smallest that is accepted."""
LARGEST_COUNT = 2**53 - 1
"""The largest integer that every JSON library reads exactly. Some clients send it for "no limit"."""
LARGEST_TOKEN = 2**31 - 1
"""Upper bound of token ids in every vocabulary."""
PromptIds = tuple[Annotated[int, msgspec.Meta(ge=0, le=LARGEST_TOKEN)], ...]
MAX_ITEMS = 16_384
"""Items of an array, or keys of an object, that are read: messages, parts, tools, choices. Some fields allow fewer."""
MAX_REPLACED_SURROGATES = 100_000
"""Surrogates that are read in one body, lone or paired; more of them would occupy the event loop."""
_REPLACEMENT = rb"\ufffd"
_SURROGATES = re.compile(
    rb"\\(?<!\\\\)\\*+u(?:[dD][89abAB][\da-fA-F]{2}(?P<low>\\u[dD][c-fC-F][\da-fA-F]{2})"
    rb"|[dD][89a-fA-F][\da-fA-F]{2})"
)
"""A pair, or a surrogate alone. An even number of backslashes before it is text: the `u` begins no escape. It begins
with a literal, which the search for a match skips to."""
_LARGEST_SHOWN = 10**18
MAX_PROMPTS = 1024
"""Prompts in one completions request; foreign servers accept lists of them."""
MAX_SCANNED_BYTES = 1 << 16
"""The size of the largest value that the event loop decodes. Limits, options and names take a few bytes."""
ABSENT = Raw()
_EMPTY = re.compile(rb'\s*(?:null|""|\[\s*\])?\s*')
_SEVERAL_PROMPTS = re.compile(rb'\s*\[\s*["\[]')
_value = msgspec.json.Decoder()
_KINDS = {str: "a string", bool: "true or false", int: "an integer", float: "a number", list: "an array"}


def check_content_type(content_type: str | None, *, required: bool = False) -> None:
    """Raises `UnsupportedMediaType` for a body declared as something other than JSON and, with `required`, for an
    undeclared one. Scripts in a browser can send undeclared bodies, forms and plain text to any address without a
    preflight request, but not JSON."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json") or (not kind and not required):
        return
    declared = f"declared as {shorten(kind)}" if kind else "not declared"
    raise UnsupportedMediaType(f"The body is {declared}, but it must be JSON; send 'content-type: application/json'.")


def decode(body: bytes | Raw, kind: type[T]) -> T:
    """A body as a value of `kind`. Raises InvalidValue or MalformedJSON."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as problem:
        raise InvalidValue(f"Invalid body: {shorten(str(problem))}.", param=_field_of(problem)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise MalformedJSON(
            f"The body is not valid JSON: {shorten(str(problem))}. Send one JSON object in UTF-8."
        ) from None


def _field_of(problem: msgspec.ValidationError) -> str | None:
    """The field that the message names: `$.model_id` is `model_id`."""
    _, found, path = str(problem).rpartition("`$.")
    return path.rstrip("`") if found else None


def parse(body: bytes, names: frozenset[str] | None = None) -> Fields:
    """The body as an object, with U+FFFD for lone surrogates. With `names`, only those fields can be read. Raises
    `MalformedJSON`."""
    return Fields(decode_object(body), names=names)


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object, with U+FFFD for lone surrogates; of equal names the last one counts. Raises `MalformedJSON`."""
    try:
        values = msgspec.json.decode(body)
    except RecursionError:
        raise MalformedJSON("The body is nested too deeply; flatten it.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        if (readable := without_lone_surrogates(body)) != body:
            return decode_object(readable)
        raise MalformedJSON(
            f"The body is not valid JSON: {shorten(str(problem))}. Send one JSON object in UTF-8."
        ) from None
    if not isinstance(values, dict):
        raise MalformedJSON('The body must be a JSON object such as {"model": …}.')
    return values


def scan(body: bytes, names: tuple[str, ...], large: frozenset[str]) -> RawFields:
    """The body as an object that gives access only to the fields `names`, decoded when read. Only `large` ones may have
    more than `MAX_SCANNED_BYTES`. Raises `MalformedJSON`."""
    try:
        return RawFields(_scanner(names).decode(body), large)
    except msgspec.ValidationError:
        raise MalformedJSON('The body must be a JSON object such as {"model": …}.') from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise MalformedJSON(f"The body is not valid JSON: {shorten(str(problem))}.") from None


def without_lone_surrogates(body: bytes) -> bytes:
    """JSON text with U+FFFD in place of escaped surrogates without a partner; all else stays byte for byte.

    JavaScript clients send them when they cut a text inside an emoji. No decoder accepts them, so this is called only
    for a body that could not be decoded.
    """
    return _SURROGATES.sub(_with_replacement, body, count=MAX_REPLACED_SURROGATES)


def _with_replacement(found: re.Match[bytes]) -> bytes:
    text, low = found[0], found["low"]
    backslashes = text[: text.index(b"u")]
    if len(backslashes) % 2 == 0:
        return text[: -len(low)] + _REPLACEMENT if low else text
    return text if low else backslashes[:-1] + _REPLACEMENT


def json_text(value: Any) -> str:
    """Compact JSON text of a decoded value."""
    return msgspec.json.encode(value).decode()


class Fields:
    """One JSON object and the path at which the client wrote it. Read-only."""

    __slots__ = ("_names", "_values", "path")

    def __init__(self, values: dict[str, Any], path: str = "", names: frozenset[str] | None = None) -> None:
        """`names`: the only fields that can be read; None: any."""
        self._values = values
        self._names = names
        self.path = path

    def __contains__(self, name: str) -> bool:
        return self.raw(name) is not None

    @property
    def unknown(self) -> tuple[str, ...]:
        """Fields that the client sent and no reader knows."""
        return tuple(name for name in self._values if self._names is not None and name not in self._names)

    def param(self, name: str) -> str:
        """The path of a field, as errors name it."""
        return f"{self.path}.{name}" if self.path else name

    def raw(self, name: str) -> Any:
        """The decoded value, unchecked; for values that are only passed on."""
        assert self._names is None or name in self._names, f"{name} is missing from the table of fields"
        return self._values.get(name)

    def is_empty(self, name: str) -> bool:
        """Whether a field holds nothing: it is absent, or an empty text or array."""
        return self.raw(name) in (None, "", [])

    def num_prompts(self, name: str) -> int:
        """How many prompts a field holds: one, unless it is an array of texts or of arrays of token ids."""
        value = self.raw(name)
        is_several = isinstance(value, list) and value and isinstance(value[0], str | list)
        return len(value) if is_several else 1

    def invalid(self, name: str, problem: str) -> InvalidValue:
        """The error for one field, for the caller to raise."""
        param = shorten(self.param(name))
        return InvalidValue(f"Invalid value for '{param}': {problem}.", param=param)

    def model(self) -> str:
        name = self.text("model")
        if not name:
            raise MissingModel("The body names no model; set 'model' to an id that /v1/models lists.", param="model")
        if len(name) > MAX_MODEL_NAME:
            raise self.invalid("model", f"the name has {len(name)} characters, at most {MAX_MODEL_NAME} are allowed")
        return name

    def text(self, name: str) -> str | None:
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong_type(name, str)

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise self.invalid(name, "it is required and must be a string")
        return value

    def role(self, known: Mapping[str, R]) -> R:
        """The role of a message, by the names that the dialect has."""
        given = self.required_text("role")
        if given not in known:
            raise self.invalid("role", f"'{shorten(given)}' is not known; use {', '.join(known)}")
        return known[given]

    def flag(self, name: str) -> bool | None:
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong_type(name, bool)

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong_type(name, int)
        self._check_range(name, value, low, high)
        return value

    def number(self, name: str, *, low: float, high: float) -> float | None:
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong_type(name, float)
        self._check_range(name, value, low, high)
        return float(value)

    def mapping(self, name: str, *, most: int = MAX_ITEMS) -> dict[str, Any] | None:
        """An object whose contents are not checked: a JSON schema, template variables."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(name, f"expected an object, got {_describe(value)}")
        self._check_size(name, value, most)
        return value

    def object(self, name: str) -> Fields | None:
        value = self.mapping(name)
        return None if value is None else Fields(value, self.param(name))

    def objects(self, name: str) -> Iterator[Fields]:
        """The objects of an array; nothing when it is absent."""
        for index, value in enumerate(self.array(name)):
            path = f"{self.param(name)}[{index}]"
            if not isinstance(value, dict):
                raise InvalidValue(
                    f"Invalid value for '{path}': expected an object, got {_describe(value)}.", param=path
                )
            yield Fields(value, path)

    def array(self, name: str, *, most: int = MAX_ITEMS) -> list[Any]:
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong_type(name, list)
        self._check_size(name, value, most)
        return value

    def integers(self, name: str, *, low: int, high: int, most: int = MAX_ITEMS) -> tuple[int, ...]:
        values = self.array(name, most=most)
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            raise self.invalid(name, "expected an array of integers")
        for value in values:
            self._check_range(name, value, low, high)
        return tuple(values)

    def texts(self, name: str) -> tuple[str, ...]:
        """One string or an array of them."""
        value = self.raw(name)
        if isinstance(value, str):
            return (value,)
        values = self.array(name)
        if not all(isinstance(value, str) for value in values):
            raise self.invalid(name, "expected a string or an array of strings")
        return tuple(values)

    def _wrong_type(self, name: str, expected: type) -> InvalidValue:
        return self.invalid(name, f"expected {_KINDS[expected]}, got {_describe(self.raw(name))}")

    def _check_size(self, name: str, values: list[Any] | dict[str, Any], most: int) -> None:
        if len(values) > most:
            raise self.invalid(name, f"it has {len(values)} entries, at most {most} are allowed")

    def _check_range(self, name: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:  # NaN is in no range
            shown = value if abs(value) <= _LARGEST_SHOWN else "the number"
            raise self.invalid(name, f"{shown} is not between {low} and {high}")


class RawFields(Fields):
    """A JSON object whose values stay bytes until they are read: a conversation of megabytes is skipped, and so are
    fields that nobody reads. Every method that reads a value also raises `MalformedJSON`."""

    __slots__ = ("_large", "_members")

    def __init__(self, members: Any, large: frozenset[str]) -> None:
        """`members`: of `_scanner`. `large`: as `scan` has it."""
        super().__init__({})
        self._members = members
        self._large = large

    def bytes_of(self, *names: str) -> tuple[Raw, ...]:
        """Values as the client wrote them; empty if absent."""
        members = self._members
        return tuple([getattr(members, name, ABSENT) for name in names])

    def has_any(self, *names: str) -> bool:
        """Whether one of the fields is there, also as null. Cheaper than to read them."""
        members = self._members
        return any([getattr(members, name) is not ABSENT for name in names])  # noqa: C419 - a generator costs more

    def raw(self, name: str) -> Any:
        member = getattr(self._members, name)  # a name that is not scanned is a fault of the dialect
        if member is ABSENT:
            return None
        if name in self._values:
            return self._values[name]
        if len(memoryview(member)) > MAX_SCANNED_BYTES and name not in self._large:
            raise self.invalid(name, f"it has more than {MAX_SCANNED_BYTES} bytes")
        try:
            value = self._values[name] = _value.decode(member)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
            raise MalformedJSON(f"The body is not valid JSON: {shorten(str(problem))}.") from None
        return value

    def is_empty(self, name: str) -> bool:
        member = getattr(self._members, name)
        return member is ABSENT or _EMPTY.fullmatch(memoryview(member)) is not None

    def num_prompts(self, name: str) -> int:
        """As that of `Fields`, up to one more than `MAX_PROMPTS`; without the memory that the items take."""
        (prompts,) = self.bytes_of(name)
        if not _SEVERAL_PROMPTS.match(memoryview(prompts)):
            return 1
        return sum(item is not ABSENT for item in msgspec.structs.astuple(_prompts_decoder().decode(prompts)))


@cache
def _scanner(names: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Reads the values of some fields as bytes. Others take no memory, however many there are."""
    return msgspec.json.Decoder(msgspec.defstruct("_Members", [(name, Raw, ABSENT) for name in names]))


@cache
def _prompts_decoder() -> msgspec.json.Decoder[Any]:
    """Reads the first items of an array. Unlike a list, it takes no memory for further items. Made on first use,
    because it takes half a megabyte."""
    fields = [(f"prompt_{index}", Raw, ABSENT) for index in range(MAX_PROMPTS + 1)]
    return msgspec.json.Decoder(msgspec.defstruct("_Prompts", fields, array_like=True))


def _describe(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    return _KINDS.get(type(value), type(value).__name__)


_object_decoder = msgspec.json.Decoder(dict[str, Raw])


def replace_fields(body: bytes, values: Mapping[str, Any], *, without: Iterable[str] = ()) -> bytes:
    """`body` with other values for some fields, without others, and everything else unchanged."""
    fields = _object_decoder.decode(body)
    for name in without:
        fields.pop(name, None)
    for name, value in values.items():
        fields[name] = Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)
