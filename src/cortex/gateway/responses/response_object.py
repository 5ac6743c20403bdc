"""A response object of the Responses API as JSON: the fields that are read, and the changes when it ends early."""

from __future__ import annotations

import re
import uuid

import msgspec
from msgspec import Raw

from cortex.http.event_boundary import BLANK_LINES
from cortex.wire import sse

_LONGEST_BLANK_LINE = max(map(len, BLANK_LINES))


class WholeEvents:
    """Keeps an unfinished event until its end arrives. Longer ones than `max_bytes` are dropped and counted."""

    __slots__ = ("_is_dropping", "_max_bytes", "_unfinished", "num_dropped")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._unfinished = bytearray()
        self._is_dropping = False
        """The unfinished event is too long and is dropped."""
        self.num_dropped = 0

    def push(self, data: bytes) -> bytes:
        """The events that are whole now, with line feeds as line ends; may be empty."""
        if not self._unfinished and data.endswith(b"\n\n"):  # as nearly always
            return data
        unfinished = self._unfinished
        searched_from = max(0, len(unfinished) - _LONGEST_BLANK_LINE)
        unfinished += data
        ends = [(unfinished.rfind(blank, searched_from), len(blank)) for blank in BLANK_LINES]
        end = max(at + length if at >= 0 else 0 for at, length in ends)
        whole = bytes(unfinished[:end]).replace(b"\r\n", b"\n")
        del unfinished[:end]
        if whole and self._is_dropping:
            self._is_dropping = False
            whole = whole.partition(b"\n\n")[2]
        if len(unfinished) > self._max_bytes:
            self.num_dropped += not self._is_dropping
            self._is_dropping = True
            del unfinished[:-_LONGEST_BLANK_LINE]  # it may be the beginning of a blank line
        return whole


_LAST_EVENT = re.compile(rb"event: response\.(?:completed|incomplete|failed)\ndata: ([^\n]*)\n")
_LATER_LAST_EVENT = re.compile(rb"\n" + _LAST_EVENT.pattern)
"""One that begins with a literal is found at the speed of memory; every byte of a response is searched."""


class ResponseSummary(msgspec.Struct, frozen=True):
    """The fields that are read from a response object."""

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
    match = _LAST_EVENT.match(events) or _LATER_LAST_EVENT.search(events)
    return match[1] if match else None


def ended_body(body: bytes | str, status: str, *, code: str | None = None, message: str = "") -> bytes:
    """A response object that ended with `status`, without a last event."""
    error = None if code is None else {"code": code, "message": message}
    return msgspec.json.encode(
        _fields.decode(body) | {"status": Raw(msgspec.json.encode(status)), "error": Raw(msgspec.json.encode(error))}
    )


def build_last_event(body: bytes, number: int) -> bytes:
    """The last event of a stream, for a response that ended without one."""
    status = head_of(body).status
    kind = f"response.{status if status in ('completed', 'incomplete') else 'failed'}"
    payload = {"type": kind, "sequence_number": number, "response": Raw(body)}
    return sse.frame(msgspec.json.encode(payload), kind)


def without_output(body: bytes) -> bytes:
    return msgspec.json.encode(_fields.decode(body) | {"output": Raw(b"[]")})
