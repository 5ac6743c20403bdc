"""Input and output items of stored responses: their ids, references to them, and lists of them.

The id of an item contains the id of its response and its position there (`wire/dialects/openai_responses`), so that a
reference is resolved without an index. Items stay JSON texts: only their type and id are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from cortex.wire.errors import InvalidValue, ItemNotFound, shorten

REFERENCE = b'"item_reference"'
MAX_ITEMS = 16_384
"""Items of one conversation."""
_OUTPUT_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_(\d{1,6})")
_INPUT_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_in(\d{1,6})")
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


class _Head(msgspec.Struct, frozen=True):
    """What is read of an item. Raw, because a client may send values here that take gigabytes when they are decoded."""

    type: Raw = Raw()
    id: Raw = Raw()


class _Output(msgspec.Struct, frozen=True):
    output: list[Raw] = []


_raw_items = msgspec.json.Decoder(list[Raw])
_raw_object = msgspec.json.Decoder(dict[str, Raw])
_head = msgspec.json.Decoder(_Head)
_text = msgspec.json.Decoder(str)
_output = msgspec.json.Decoder(_Output)


class StoredTexts(NamedTuple):
    """A stored response, as JSON."""

    id: str
    input: str | bytes | memoryview
    """The input items of its request, an array."""
    body: str | bytes | memoryview
    """The response object."""


class Place(NamedTuple):
    """Where an item is stored."""

    response_id: str
    position: int
    is_input: bool


def split(given: Raw) -> list[Raw]:
    """`input` of a request as items, at most `MAX_ITEMS`; a text is one message of the user. Raises InvalidValue."""
    text = bytes(given)
    if text.startswith(b'"'):
        return [Raw(b'{"type":"message","role":"user","content":[{"type":"input_text","text":' + text + b"}]}")]
    try:
        if has_more_than(MAX_ITEMS, text):
            raise _too_many_items()
        return _raw_items.decode(text) if text else []
    except msgspec.DecodeError as problem:
        raise InvalidValue("input: it must be a string or an array of items.", param="input") from problem


def has_more_than(max_items: int, array: bytes) -> bool:
    """Whether a JSON array has more items, which takes no memory for them. Raises msgspec.DecodeError for what is no
    array."""
    if array.count(b",") < max_items:
        return False
    return bool(bytes(getattr(_bounded_items(max_items).decode(array), f"item_{max_items}")))


def references(items: Iterable[Raw]) -> dict[int, str]:
    """The ids that items refer to, by the position of the reference. Raises InvalidValue."""
    found: dict[int, str] = {}
    for position, item in enumerate(items):
        head = _head_of(item) if REFERENCE in bytes(item) else None
        if head is not None and bytes(head.type) == REFERENCE:
            item_id = _text_of(head.id)
            if not item_id:
                raise InvalidValue(
                    "The reference has no id; name the item that it refers to.", param=f"input[{position}].id"
                )
            found[position] = item_id
    return found


def place_of(item_id: str) -> Place | None:
    """Where the item with this id is stored; None for an id that is not ours."""
    for pattern, is_input in ((_OUTPUT_ID, False), (_INPUT_ID, True)):
        if match := pattern.fullmatch(item_id):
            return Place(f"resp_{match[1]}", int(match[2]), is_input)
    return None


def resolve(items: Sequence[Raw], referred: Mapping[int, str], stored: Mapping[str, StoredTexts]) -> list[Raw]:
    """`items` with the stored items in place of references. `stored` has the responses that `place_of` names.

    Reads each stored response and each item of it at most once, however many references there are. Raises
    ItemNotFound.
    """

    @cache
    def items_of(response_id: str, is_input: bool) -> list[Raw]:
        response = stored.get(response_id)
        if response is None:
            return []
        return inputs(response) if is_input else outputs(response)

    @cache
    def find(item_id: str) -> Raw | None:
        place = place_of(item_id)
        candidates = items_of(place.response_id, place.is_input) if place is not None else []
        if place is None or place.position >= len(candidates):
            return None
        candidate = candidates[place.position]
        return candidate if _text_of(_head_of(candidate).id) == item_id else None

    resolved = list(items)
    for at, item_id in referred.items():
        item = find(item_id)
        if item is None:
            raise _not_found(item_id, at)
        resolved[at] = item
    return resolved


def _not_found(item_id: str, at: int) -> ItemNotFound:
    return ItemNotFound(
        f"Item with id '{shorten(item_id)}' not found. Items are stored only with their response, for the key that "
        "made it: send the item itself, or make the response with `store` set to true.",
        param=f"input[{at}].id",
    )


def inputs(response: StoredTexts) -> list[Raw]:
    """The input items of the request that led to a stored response."""
    return _raw_items.decode(response.input)


def outputs(response: StoredTexts) -> list[Raw]:
    """The output items of a stored response."""
    return _output.decode(response.body).output


def context(chain: Iterable[StoredTexts]) -> list[Raw]:
    """The whole conversation of a chain of responses: what was said in each request, and the response to it. Raises
    InvalidValue when it has more than `MAX_ITEMS`."""
    found: list[Raw] = []
    for response in chain:
        found += inputs(response)
        found += outputs(response)
        check_count(found)
    return found


def check_count(items: Sequence[Raw]) -> None:
    """Raises InvalidValue for more than `MAX_ITEMS`."""
    if len(items) > MAX_ITEMS:
        raise _too_many_items()


def with_ids(items: Iterable[Raw], response_id: str) -> bytes:
    """The items as a JSON array, each with a type and an id: that of the client, or one of ours."""
    stem = response_id.removeprefix("resp_")
    return msgspec.json.encode([_with_id(item, f"{stem}_in{position}") for position, item in enumerate(items)])


def _with_id(item: Raw, stem: str) -> Raw:
    head = _head_of(item)
    id, kind = _text_of(head.id), _text_of(head.type)
    if id and kind:
        return item
    kind = kind or "message"
    id = id or f"{_PREFIXES.get(kind, 'item')}_{stem}"
    named = {"id": Raw(msgspec.json.encode(id)), "type": Raw(msgspec.json.encode(kind))}
    return Raw(msgspec.json.encode(_raw_object.decode(item) | named))


def listing(items: Sequence[Raw], *, limit: int, ascending: bool, after: str | None) -> dict[str, Any]:
    """A page of a list, as `GET /v1/responses/{id}/input_items` has it. Raises InvalidValue."""
    ordered = list(items) if ascending else list(reversed(items))
    ids = [_text_of(_head_of(item).id) for item in ordered]
    start = 0
    if after is not None:
        if after not in ids:
            raise InvalidValue(f"after: there is no item '{shorten(after)}' in this list.", param="after")
        start = ids.index(after) + 1
    shown = ids[start : start + limit]
    return {
        "object": "list",
        "data": ordered[start : start + limit],
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
        "has_more": start + limit < len(ordered),
    }


def _head_of(item: Raw) -> _Head:
    try:
        return _head.decode(item)
    except msgspec.ValidationError as problem:
        raise InvalidValue("input: every item must be an object.", param="input") from problem


def _text_of(value: Raw) -> str | None:
    """A JSON text; None for another value, which is not decoded."""
    return _text.decode(value) if bytes(memoryview(value)[:1]) == b'"' else None


@cache
def _bounded_items(max_items: int) -> msgspec.json.Decoder[Any]:
    """Reads the first items of an array. Unlike a list, it takes no memory for the items after them. Made when it is
    needed first, because that takes a while."""
    fields = [(f"item_{index}", Raw, Raw()) for index in range(max_items + 1)]
    return msgspec.json.Decoder(msgspec.defstruct("_BoundedItems", fields, array_like=True))


def _too_many_items() -> InvalidValue:
    return InvalidValue(
        f"input: the conversation has more than {MAX_ITEMS} items; send fewer, or start a new conversation.",
        param="input",
    )
