"""A response object of the Responses API as JSON: what is read of it, and how it is changed when it ends early."""

from __future__ import annotations

import re
import uuid

import msgspec
from msgspec import Raw

from cortex.wire import sse

_LAST_EVENT = re.compile(rb"(?:\A|\n)event: response\.(?:completed|incomplete|failed)\ndata: ([^\n]*)\n")


class ResponseSummary(msgspec.Struct, frozen=True):
    """What is read of a response object."""

    id: str
    status: str
    background: bool = False


class _Event(msgspec.Struct, frozen=True):
    response: Raw


_head_decoder = msgspec.json.Decoder(ResponseSummary)
_event_decoder = msgspec.json.Decoder(_Event)
_fields = msgspec.json.Decoder(dict[str, Raw])


def new_response_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


def head_of(response: bytes | str) -> ResponseSummary:
    """The head of a response object."""
    return _head_decoder.decode(response)


def response_in_event(payload: bytes) -> bytes:
    """The response object in the payload of an event."""
    return bytes(_event_decoder.decode(payload).response)


def last_event(events: bytes) -> bytes | None:
    """The payload of the event that ends a response, if it is among whole `events`."""
    match = _LAST_EVENT.search(events)
    return match[1] if match else None


def ended_body(body: bytes | str, status: str, *, code: str | None = None, message: str = "") -> bytes:
    """A response object that ended as `status` without an end of its own."""
    error = None if code is None else {"code": code, "message": message}
    return msgspec.json.encode(
        _fields.decode(body) | {"status": Raw(msgspec.json.encode(status)), "error": Raw(msgspec.json.encode(error))}
    )


def build_last_event(body: bytes, number: int) -> bytes:
    """The event that ends a stream, for a response that ended without one."""
    status = head_of(body).status
    kind = f"response.{status if status in ('completed', 'incomplete') else 'failed'}"
    payload = {"type": kind, "sequence_number": number, "response": Raw(body)}
    return sse.frame(msgspec.json.encode(payload), kind)


def without_output(body: bytes) -> bytes:
    return msgspec.json.encode(_fields.decode(body) | {"output": Raw(b"[]")})
