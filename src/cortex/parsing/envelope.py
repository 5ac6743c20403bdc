"""The envelope of a request body: the few fields that a gateway reads.

The dialect reads them with the functions of its parser, so that gateway and node agree on every request. The rest stays
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from cortex.parsing.pictures import find_pictures
from cortex.wire.dialects.anthropic_messages import BILLED, strip_billing_header
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import MalformedJSON
from cortex.wire.fields.body import ABSENT, without_lone_surrogates
from cortex.wire.fields.request_class import asked_class
from cortex.wire.preset import Preset
from cortex.wire.request_summary import RequestSummary
from cortex.wire.tenant import SALT

ByteRange = tuple[int, int]


class Envelope(msgspec.Struct, frozen=True):
    """What a gateway reads of a body."""

    summary: RequestSummary
    conversation: Sequence[Raw]
    """The values that hold it, from its start; the latest input is the last."""

    @property
    def input(self) -> Raw:
        return self.conversation[-1]

    def prompt_bytes(self, max_bytes: int) -> bytes:
        """The conversation from its start: a later turn begins with the same bytes, up to the end of the array."""
        parts, remaining = [], max_bytes
        for field in self.conversation:
            part = memoryview(field)[:remaining]
            parts.append(part)
            remaining -= len(part)
        return b"".join(parts)


def read(body: bytes, dialect: str, generates: bool = True) -> Envelope:
    """The envelope of `body` as `dialect` defines it. Raises MalformedJSON, InvalidValue or MissingModel."""
    codec = DIALECTS[dialect]
    fields = codec.fields.scan(body)
    summary = codec.read_summary(fields) if generates else codec.read_counted_summary(fields)
    if not fields.is_empty(SALT):
        summary = msgspec.structs.replace(summary, cache_salt=bytes(fields.bytes_of(SALT)[0]))
    if (names := codec.fields.class_fields) and fields.has_any(*names):
        summary = msgspec.structs.replace(summary, asked_class=asked_class(fields, names))
    pictures = find_pictures(body, fields, dialect)
    if pictures.number:
        _, num_bytes, num_tokens = pictures
        summary = msgspec.structs.replace(
            summary, has_pictures=True, picture_bytes=num_bytes, picture_tokens=num_tokens
        )
    return Envelope(summary, fields.bytes_of(*codec.conversation))


class RelayedBody(msgspec.Struct, frozen=True):
    """A body that is relayed, with the few changes that are made to it."""

    body: bytes
    """What a node gets: the client's bytes themselves where nothing had to be changed."""
    envelope: Envelope
    is_stripped: bool
    """Whether billing lines were removed."""


def read_relayed(body: bytes, dialect: str, generates: bool, strip_billing: bool) -> RelayedBody:
    """Reads a client's body. Raises MalformedJSON, InvalidValue or MissingModel."""
    try:
        return _read(body, dialect, generates, strip_billing)
    except MalformedJSON:
        readable = without_lone_surrogates(body)
        if readable == body:
            raise
    return _read(readable, dialect, generates, strip_billing)


def _read(received: bytes, dialect: str, generates: bool, strip_billing: bool) -> RelayedBody:
    body = strip_billing_header(received) if strip_billing and dialect in BILLED else received
    return RelayedBody(body, read(body, dialect, generates), body is not received)


def read_preset(body: bytes, dialect: str, generates: bool, preset: Preset, is_opaque: bool) -> RelayedBody:
    """Reads a body that was read before, with what the model's name adds to it. Raises as `read_relayed` does."""
    written = preset.applied(body, DIALECTS[dialect].preset, is_opaque=is_opaque)
    return RelayedBody(written, read(written, dialect, generates), False)


def spans(relayed: RelayedBody) -> tuple[ByteRange, ...]:
    """Where the values of the conversation are in the body, or where the same bytes are before that."""
    return tuple(_span(relayed.body, bytes(value)) for value in relayed.envelope.conversation)


def _span(body: bytes, value: bytes) -> ByteRange:
    start = body.find(value) if value else 0
    return start, start + len(value)


def envelope_of(body: bytes, summary: RequestSummary, spans: tuple[ByteRange, ...]) -> Envelope:
    """The envelope of `body`, from what another process found in it. Copies nothing."""
    view = memoryview(body)
    return Envelope(summary, tuple(Raw(view[start:end]) if end > start else ABSENT for start, end in spans))
