"""Conversations of the Responses API: a request with the stored responses that it refers to.

A request and stored responses travel as one piece of bytes, because a process gets what is large as one payload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Raw

from cortex.parsing import envelope as envelopes
from cortex.parsing import items
from cortex.parsing.envelope import RelayedBody
from cortex.parsing.items import StoredTexts
from cortex.wire.errors import BodyTooLarge
from cortex.wire.fields.body import replace_fields

_PIECE_CHARS = 1 << 20
"""Text is encoded in pieces of this size. Between them other threads run."""


class StoredSize(NamedTuple):
    """A stored response among joined bytes."""

    id: str
    num_input_bytes: int
    num_body_bytes: int


class Joined(NamedTuple):
    data: bytes
    """A body, and after it the texts of stored responses."""
    sizes: tuple[StoredSize, ...]


class References(NamedTuple):
    """What the items of an input refer to."""

    are_any: bool
    response_ids: tuple[str, ...]
    """The responses that these items belong to; an item whose id is not ours belongs to none."""


class Completion(NamedTuple):
    """How a request is completed."""

    generates: bool
    in_background: bool
    """It becomes a stream, so that a node that takes long does not look silent."""
    stored_as: str | None
    """The id of the response whose input is returned to be stored."""
    max_body_mb: int


class Completed(NamedTuple):
    relayed: RelayedBody
    """The request that a node gets: it has the whole conversation."""
    stored_input: bytes | None
    """The items of the request itself, each with an id."""


def join(body: bytes, stored: Sequence[StoredTexts]) -> Joined:
    parts, sizes = [body], []
    for response in stored:
        input, output = list(_pieces(response.input)), list(_pieces(response.body))
        sizes.append(StoredSize(response.id, sum(map(len, input)), sum(map(len, output))))
        parts += input
        parts += output
    return Joined(b"".join(parts), tuple(sizes))


def _pieces(text: str | bytes | memoryview) -> Iterator[bytes]:
    if not isinstance(text, str):
        yield bytes(text)
        return
    for start in range(0, len(text), _PIECE_CHARS):
        yield text[start : start + _PIECE_CHARS].encode()


def separate(joined: Joined) -> tuple[memoryview, list[StoredTexts]]:
    """The body and the stored responses of joined bytes. Copies nothing."""
    data = memoryview(joined.data)
    start = len(data) - sum(size.num_input_bytes + size.num_body_bytes for size in joined.sizes)
    body, stored = data[:start], []
    for id, num_input_bytes, num_body_bytes in joined.sizes:
        middle = start + num_input_bytes
        end = middle + num_body_bytes
        stored.append(StoredTexts(id, data[start:middle], data[middle:end]))
        start = end
    return body, stored


def find_references(generates: bool, body: bytes) -> References:
    """What the items of a request refer to. Raises the CortexError of a request that is invalid."""
    ids = items.references(items.split(_input_of(body, generates=generates))).values()
    places = [place for id in ids if (place := items.place_of(id)) is not None]
    return References(bool(ids), tuple(dict.fromkeys(place.response_id for place in places)))


def complete(joined: Joined, num_earlier: int, completion: Completion) -> Completed:
    """The request in `joined` with the conversation of the first `num_earlier` stored responses before its own items,
    and items of the others in place of references.

    Raises the CortexError of a request that is invalid, refers to what is not stored, or becomes too large.
    """
    view, stored = separate(joined)
    body = bytes(view)
    generates = completion.generates
    own = items.split(_input_of(body, generates=generates))
    own = items.resolve(own, items.references(own), {response.id: response for response in stored[num_earlier:]})
    whole = [*items.context(stored[:num_earlier]), *own]
    items.check_count(whole)
    num_bytes = len(body) + sum(memoryview(item).nbytes for item in whole)
    if num_bytes > completion.max_body_mb * 1024 * 1024:
        raise BodyTooLarge(
            f"With the responses that it continues the request has {num_bytes} bytes; the limit is "
            f"{completion.max_body_mb} MB (gateway.max_body_mb). Start a new conversation."
        )
    values = {"input": whole, **({"stream": True} if completion.in_background else {})}
    completed = replace_fields(body, values, without=("previous_response_id", "background", "conversation"))
    envelope = envelopes.read(completed, "openai_responses", generates=generates)
    stored_input = items.with_ids(own, completion.stored_as) if completion.stored_as is not None else None
    return Completed(RelayedBody(completed, envelope, False), stored_input)


def _input_of(body: bytes, *, generates: bool) -> Raw:
    return envelopes.read(body, "openai_responses", generates=generates).input


def list_items(limit: int, ascending: bool, after: str | None, sizes: tuple[StoredSize, ...], body: bytes) -> bytes:
    """A page of the conversation that the last of the stored responses was made from, as JSON. Raises InvalidValue."""
    _, (*earlier, last) = separate(Joined(body, sizes))
    conversation = [*items.context(earlier), *items.inputs(last)]
    return msgspec.json.encode(items.listing(conversation, limit=limit, ascending=ascending, after=after))
