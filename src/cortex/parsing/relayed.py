"""A body that is relayed: its envelope, and the few changes that are made to it."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from cortex.parsing import envelope as envelopes
from cortex.parsing.envelope import Envelope
from cortex.wire.dialects.anthropic_messages import BILLED, strip_billing_header
from cortex.wire.errors import MalformedJSON
from cortex.wire.fields.body import ABSENT, without_lone_surrogates
from cortex.wire.node.protocol import Dialect
from cortex.wire.request_summary import RequestSummary

ByteRange = tuple[int, int]


class RelayedBody(msgspec.Struct, frozen=True):
    body: bytes
    """What a node gets: the client's bytes themselves where nothing had to be changed."""
    envelope: Envelope
    is_stripped: bool
    """Whether billing lines were removed."""


def read(body: bytes, dialect: Dialect, generates: bool, strip_billing: bool) -> RelayedBody:
    """Reads a client's body. Raises MalformedJSON, InvalidValue or MissingModel."""
    try:
        return _read(body, dialect, generates, strip_billing)
    except MalformedJSON:
        readable = without_lone_surrogates(body)
        if readable == body:
            raise
    return _read(readable, dialect, generates, strip_billing)


def _read(received: bytes, dialect: Dialect, generates: bool, strip_billing: bool) -> RelayedBody:
    body = strip_billing_header(received) if strip_billing and dialect in BILLED else received
    return RelayedBody(body, envelopes.read(body, dialect, generates), body is not received)


def spans(relayed: RelayedBody) -> tuple[ByteRange, ...]:
    """Where the values of the conversation are in the body, or where the same bytes are before that."""
    return tuple(_span(relayed.body, bytes(value)) for value in relayed.envelope.conversation)


def _span(body: bytes, value: bytes) -> ByteRange:
    start = body.find(value) if value else 0
    return start, start + len(value)


def envelope_of(body: bytes, facts: RequestSummary, spans: tuple[ByteRange, ...]) -> Envelope:
    """The envelope of `body`, from what another process found in it. Copies nothing."""
    view = memoryview(body)
    return Envelope(facts, tuple(Raw(view[start:end]) if end > start else ABSENT for start, end in spans))
