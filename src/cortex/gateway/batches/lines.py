"""The lines of a batch: what is read from each before it runs, and the form of its result. Pure except for reading.

A line is found by its place in the input file, so that a batch of a gigabyte takes no memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import msgspec
from msgspec import Raw

from cortex.gateway.batches.tables import Kind, Outcome
from cortex.wire.errors import CortexError, InvalidValue, shorten
from cortex.wire.fields.body import MAX_MODEL_NAME

ENDPOINTS = ("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/embeddings")
MESSAGES = "/v1/messages"
MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_CUSTOM_ID = 512
MAX_MODELS = 64
"""Models per batch. Each is looked up whenever lines may start."""
PREFIX_BYTES = 96
"""Lines are grouped by this much of their prompts, because most share their instructions."""
_STATEFUL = ("background", "previous_response_id", "conversation")
_EMPTY = Raw(b"")
_UNUSED = (b"", b"null", b"false", b'""')


class Line(NamedTuple):
    """A valid line."""

    number: int
    """From 1."""
    start: int
    num_bytes: int
    custom_id: str
    model: str
    prefix: bytes


class InvalidLine(NamedTuple):
    """A line that cannot run."""

    number: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None

    def as_problem(self) -> dict[str, Any]:
        """As batches list them."""
        return {"code": self.code, "line": self.number, "message": self.message, "param": self.param}


class _Body(msgspec.Struct, frozen=True):
    """The fields that are read from a request body; the rest is checked when it runs. Raw, because decoding a client's
    values could take seconds and gigabytes."""

    model: str | None = None
    stream: bool | None = None
    background: Raw = _EMPTY
    previous_response_id: Raw = _EMPTY
    conversation: Raw = _EMPTY
    system: Raw = _EMPTY
    messages: Raw = _EMPTY
    instructions: Raw = _EMPTY
    input: Raw = _EMPTY
    prompt: Raw = _EMPTY

    @property
    def prefix(self) -> bytes:
        start = bytes(self.system or self.instructions)[:PREFIX_BYTES]
        return (start + bytes(self.messages or self.input or self.prompt)[:PREFIX_BYTES])[:PREFIX_BYTES]


class _Request(msgspec.Struct, frozen=True):
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: Raw = _EMPTY


_request = msgspec.json.Decoder(_Request)
_body = msgspec.json.Decoder(_Body)


def read(file: IO[bytes], endpoint: str, max_lines: int) -> Iterator[Line | InvalidLine]:
    """Every line that is not blank, in order. Blocks. Raises InvalidValue for a file with more than `max_lines`."""
    seen: set[str] = set()
    models: set[str] = set()
    number = start = 0
    while chunk := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        begin, is_long = start, len(chunk) > MAX_LINE_BYTES
        start += len(chunk)
        while is_long and not chunk.endswith(b"\n") and (chunk := file.readline(MAX_LINE_BYTES)):
            start += len(chunk)
        if not is_long and not chunk.strip():
            continue
        if number > max_lines:
            raise InvalidValue(f"The file has more than {max_lines} lines (batches.max_lines); split it.")
        if is_long:
            yield InvalidLine(number, None, "body_too_large", f"The line has more than {MAX_LINE_BYTES} bytes.")
        else:
            yield _read_line(chunk, number, begin, endpoint, seen, models)


def _read_line(
    text: bytes, number: int, start: int, endpoint: str, seen: set[str], models: set[str]
) -> Line | InvalidLine:
    custom_id: str | None = None
    try:
        request = _request.decode(text)
        custom_id = request.custom_id if request.custom_id and len(request.custom_id) <= MAX_CUSTOM_ID else None
        _check_id(custom_id, seen)
        assert custom_id is not None
        if (request.method or "").upper() != "POST":
            raise InvalidValue("method: it must be POST.", param="method")
        if request.url != endpoint:
            raise InvalidValue(f"url: it must be {endpoint}, that of the batch.", param="url")
        if not bytes(request.body):
            raise InvalidValue("body: it is missing.", param="body")
        body = _checked_body(request.body)
        if body.model not in models and len(models) >= MAX_MODELS:
            raise InvalidValue(f"body.model: a batch has at most {MAX_MODELS} models; split it.", param="body.model")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        return InvalidLine(number, custom_id, "malformed_json", f"The line is not a request: {shorten(str(problem))}")
    except CortexError as problem:
        return InvalidLine(number, custom_id, problem.code, problem.message, problem.param)
    seen.add(custom_id)
    models.add(body.model or "")
    return Line(number, start, len(text), custom_id, body.model or "", body.prefix)


def _check_id(custom_id: str | None, seen: set[str]) -> None:
    if custom_id is None:
        raise InvalidValue(f"custom_id: it must have 1 to {MAX_CUSTOM_ID} characters.", param="custom_id")
    if custom_id in seen:
        raise InvalidValue("custom_id: an earlier line has the same.", param="custom_id")


def _checked_body(raw: Raw) -> _Body:
    body = _body.decode(raw)
    if not body.model:
        raise InvalidValue("body.model: it is missing.", param="body.model")
    if len(body.model) > MAX_MODEL_NAME:
        raise InvalidValue(f"body.model: a name has at most {MAX_MODEL_NAME} characters.", param="body.model")
    if body.stream:
        raise InvalidValue("body.stream: results of a batch are not streamed; leave it out.", param="body.stream")
    for name in _STATEFUL:
        if bytes(getattr(body, name)) not in _UNUSED:
            raise InvalidValue(f"body.{name}: lines of a batch are stateless; leave it out.", param=f"body.{name}")
    return body


def body_of(text: bytes) -> bytes:
    """The request body of a valid line."""
    return bytes(_request.decode(text).body)


# --- results


def is_json(body: bytes | bytearray) -> bool:
    """Whether a response is whole."""
    try:
        msgspec.json.decode(body, type=Raw)
    except msgspec.DecodeError:
        return False
    return True


def response_line(kind: Kind, custom_id: str, status: int, request_id: str, body: bytes) -> tuple[Outcome, bytes]:
    """The result of a line that got a response from a node or the gateway."""
    is_success, raw = status < 400, Raw(body.strip())
    if not is_json(body):
        is_success, raw = False, Raw(msgspec.json.encode({"error": {"message": "The node's response is not JSON."}}))
    if kind == "anthropic":
        result = {"type": "succeeded", "message": raw} if is_success else {"type": "errored", "error": raw}
        line: dict[str, Any] = {"custom_id": custom_id, "result": result}
    else:
        response = {"status_code": status, "request_id": request_id, "body": raw}
        line = {"id": _new_id(), "custom_id": custom_id, "response": response, "error": None}
    return "succeeded" if is_success else "failed", msgspec.json.encode(line) + b"\n"


def invalid_line(kind: Kind, invalid: InvalidLine) -> bytes:
    """The result of a line that could not run."""
    if kind == "anthropic":
        error = {"type": "invalid_request_error", "message": f"Line {invalid.number}: {invalid.message}"}
        result = {"type": "errored", "error": {"type": "error", "error": error}}
        return msgspec.json.encode({"custom_id": invalid.custom_id, "result": result}) + b"\n"
    line = {"id": _new_id(), "custom_id": invalid.custom_id, "response": None, "error": invalid.as_problem()}
    return msgspec.json.encode(line) + b"\n"


def unrun_line(kind: Kind, number: int, custom_id: str, outcome: Outcome) -> bytes:
    """The result of a line that did not run before its batch ended."""
    if kind == "anthropic":
        result = {"type": "canceled" if outcome == "cancelled" else "expired"}
        return msgspec.json.encode({"custom_id": custom_id, "result": result}) + b"\n"
    why = "was cancelled" if outcome == "cancelled" else "reached the end of its completion window"
    error = {"code": f"batch_{outcome}", "line": number, "message": f"The batch {why} before this line ran."}
    line = {"id": _new_id(), "custom_id": custom_id, "response": None, "error": error}
    return msgspec.json.encode(line) + b"\n"


def _new_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
