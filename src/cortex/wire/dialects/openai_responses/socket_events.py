"""Events of the Responses API over a WebSocket: what clients send, and how events of a stream become messages.

A client may run several responses on one connection: `stream_id` names the lane of each. A lane runs one response after
the other.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from cortex.wire.dialects.openai_responses.response import usage_body
from cortex.wire.error_encoding import BY_CODE, OPENAI
from cortex.wire.errors import CortexError, InvalidValue, MalformedJSON, shorten
from cortex.wire.events import Usage
from cortex.wire.fields.body import replace_fields

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_TRANSPORT_FIELDS = ("type", "stream_id", "generate", "background", "stream", "stream_options")


class ClientEvent(NamedTuple):
    """What a client sends."""

    steers: bool
    """It is `response.steer`, not `response.create`."""
    stream_id: str | None
    generates: bool
    """If false, the request is only prepared: its response has no output and can be continued."""
    body: bytes
    """The request as its client would post it, or a `response.steer` as it came."""


class _Members(msgspec.Struct, frozen=True):
    """Raw, because a client may send values here that take gigabytes when they are decoded."""

    type: Raw = Raw()
    stream_id: Raw = Raw()
    generate: Raw = Raw()
    background: Raw = Raw()


_members = msgspec.json.Decoder(_Members)
_MAX_VALUE_BYTES = 1024


def read_event(body: bytes) -> ClientEvent:
    """What a client sends in one message. Raises InvalidValue or MalformedJSON."""
    try:
        members = _members.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        raise MalformedJSON(f"The event is not a JSON object: {shorten(str(problem))}.") from None
    stream_id = _value(members.stream_id, "stream_id")
    if stream_id is not None and not (isinstance(stream_id, str) and _STREAM_ID.fullmatch(stream_id)):
        raise InvalidValue("stream_id: 1 to 256 letters, digits, `_`, `.` or `-`.", param="stream_id")
    try:
        return _event(body, members, stream_id)
    except CortexError as error:
        error.details["stream_id"] = stream_id
        raise


def _event(text: bytes, members: _Members, stream_id: str | None) -> ClientEvent:
    kind, generate = _value(members.type, "type"), _value(members.generate, "generate")
    if kind == "response.steer":
        return ClientEvent(True, stream_id, True, text)
    if kind != "response.create":
        raise InvalidValue(f"type: {shorten(repr(kind))} is not a client event; send `response.create`.", param="type")
    if not isinstance(generate, bool | None):
        raise InvalidValue("generate: it must be true or false.", param="generate")
    if _value(members.background, "background"):
        message = "background: responses over a WebSocket do not run in the background; post the request instead."
        raise InvalidValue(message, param="background")
    generates = generate is not False
    body = replace_fields(text, {"stream": True} if generates else {}, without=_TRANSPORT_FIELDS)
    return ClientEvent(False, stream_id, generates, body)


def _value(raw: Raw, name: str) -> Any:
    text = bytes(raw) or b"null"
    if len(text) > _MAX_VALUE_BYTES:
        raise InvalidValue(f"{name}: it has more than {_MAX_VALUE_BYTES} bytes.", param=name)
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise MalformedJSON(f"{name}: it is not valid JSON: {shorten(str(problem))}.") from None


def message_of(event: bytes, stream_id: str | None) -> bytes | None:
    """The message for an event of a stream, without its last line feeds; None for a comment."""
    payload = next((line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")), b"")
    if not payload.startswith(b"{"):
        return None
    if event.startswith(b"event: error\n"):
        return _nested_error(payload, stream_id)
    return _in_lane(payload, stream_id)


def _in_lane(payload: bytes, stream_id: str | None) -> bytes:
    return payload if stream_id is None else b'{"stream_id":"' + stream_id.encode() + b'",' + payload[1:]


class _ErrorFields(msgspec.Struct, frozen=True):
    message: str = "The node gave no reason."
    code: str | None = None
    param: str | None = None
    type: str = "server_error"


class _Envelope(msgspec.Struct, frozen=True):
    error: _ErrorFields = _ErrorFields()


def _nested_error(payload: bytes, stream_id: str | None) -> bytes:
    try:
        found = msgspec.json.decode(payload, type=_ErrorFields)
    except msgspec.MsgspecError:
        found = _ErrorFields()
    kind = BY_CODE.get(found.code or "", CortexError)
    return _error_message(msgspec.structs.replace(found, type=kind.openai_type), kind.status, stream_id)


def error_message(error: CortexError) -> bytes:
    """The message for an event that is rejected. Its lane is in the details of the error, if it is known."""
    body = msgspec.json.encode(OPENAI.envelope(error))
    return rejection_message(OPENAI.status(error), body, error.details.get("stream_id"))


def rejection_message(status: int, body: bytes, stream_id: str | None) -> bytes:
    """The message for a response with an error status."""
    try:
        found = msgspec.json.decode(body, type=_Envelope).error
    except msgspec.MsgspecError:
        found = _ErrorFields()
    return _error_message(found, status, stream_id)


def _error_message(error: _ErrorFields, status: int, stream_id: str | None) -> bytes:
    lane = {} if stream_id is None else {"stream_id": stream_id}
    return msgspec.json.encode({"type": "error", "status": status, "error": error, **lane})


class _Steer(msgspec.Struct, frozen=True):
    previous_response_id: str = ""
    input: Raw = Raw(b"null")


def steering_rejected(event: bytes) -> bytes:
    """The message for `response.steer`: a response here takes no input while it runs."""
    try:
        steer = msgspec.json.decode(event, type=_Steer)
    except msgspec.MsgspecError:
        steer = _Steer()
    message = "Responses take no input while they run; send it with the next `response.create`."
    error = {"type": "invalid_request_error", "code": "steering_not_supported", "message": message}
    return msgspec.json.encode({"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer})


class _Echoed(msgspec.Struct, frozen=True):
    model: Raw = Raw(b'""')
    instructions: Raw = Raw(b"null")
    previous_response_id: Raw = Raw(b"null")
    tools: Raw = Raw(b"[]")


class _Counted(msgspec.Struct, frozen=True):
    input_tokens: int = 0


def prepared(request: bytes, counted: bytes, *, id: str, created: int) -> dict[str, Any]:
    """The response object for a request that is prepared and not generated, from the count of its tokens."""
    echoed = msgspec.json.decode(request, type=_Echoed)
    num_tokens = msgspec.json.decode(counted, type=_Counted).input_tokens
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "parallel_tool_calls": True,
        "store": False,
        "tool_choice": "auto",
        "usage": usage_body(Usage(prompt_tokens=num_tokens)),
        **msgspec.structs.asdict(echoed),
    }


def prepared_messages(response: dict[str, Any], stream_id: str | None) -> tuple[bytes, bytes]:
    """The messages that report it."""
    begun = response | {"status": "in_progress", "usage": None}
    events = (("response.created", begun), ("response.completed", response))
    first, last = (
        _in_lane(msgspec.json.encode({"type": kind, "sequence_number": number, "response": body}), stream_id)
        for number, (kind, body) in enumerate(events)
    )
    return first, last
