"""The lines of Ollama's streams: JSON objects, one per line, the last of them with counts and durations. An error is
one, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from cortex.wire.error_encoding import Family, from_code
from cortex.wire.errors import CortexError
from cortex.wire.events import (
    AnyEvent,
    Failure,
    Finish,
    Logprobs,
    PromptLogprobs,
    ReasoningDelta,
    Start,
    TextDelta,
    TokenIds,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    ToolCallStop,
    UsageSoFar,
)
from cortex.wire.requests import GenerateRequest
from cortex.wire.response import ResponseChoice, gather

CONTENT_TYPE = "application/x-ndjson"
KEEPALIVE = b" "
"""Space before the next line, which every JSON parser skips. An empty line would end some clients."""


class Shape(Protocol):
    """The format of one route's lines."""

    def __call__(self, *, text: str = "", thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The fields of one line."""


def _envelope(error: CortexError) -> dict[str, Any]:
    return {"error": error.message, "code": error.code}


OLLAMA = Family("ollama", _envelope, prefix="/api/", declares_bodies=False, reports_durations=True)


def stream_error(error: CortexError) -> bytes:
    """The last line of a stream that failed."""
    return msgspec.json.encode(OLLAMA.envelope(error)) + b"\n"


def loading_line(shape: Shape, model: str, text: str, created: float) -> bytes:
    """A line of reasoning before the first of the response."""
    line = {"model": model, "created_at": timestamp(created), "done": False, **shape(thinking=f"{text}\n")}
    return msgspec.json.encode(line) + b"\n"


class LineEncoder:
    """Events to lines. One per response. A call is one line, when it is complete."""

    def __init__(self, shape: Shape, request: GenerateRequest, *, id: str, created: int, model: str) -> None:
        del id  # responses have none
        self._shape = shape
        self._head = msgspec.json.encode({"model": model, "created_at": timestamp(created)})[:-1] + b","
        """The beginning of every line, encoded once."""
        self._shows_reasoning = request.thinking.shown
        self._request = request
        self._call: ToolCallStart | None = None
        self._arguments: list[str] = []
        self._logprobs: tuple[TokenLogprob, ...] = ()

    def encode(self, event: AnyEvent) -> bytes:
        match event:
            case TextDelta(text=text):
                return self._line(self._shape(text=text))
            case ReasoningDelta(text=text):
                if self._shows_reasoning:
                    return self._line(self._shape(thinking=text))
                self._logprobs = ()
                return b""
            case ToolCallStart():
                self._call, self._arguments = event, []
                return b""
            case ToolCallDelta(arguments=arguments):
                self._arguments.append(arguments)
                return b""
            case ToolCallStop(is_complete=is_complete):
                return self._end_call() if is_complete else b""
            case Logprobs(tokens=tokens):
                self._logprobs += tokens
                return b""
            case Finish():
                return self._line(self._shape(), **end_of(event, self._request))
            case Failure(code=code, message=message):
                return stream_error(from_code(code, message))
            case Start() | UsageSoFar() | PromptLogprobs() | TokenIds():
                return b""

    def _end_call(self) -> bytes:
        assert self._call is not None
        call = call_body(self._call.call, self._call.id, self._call.name, "".join(self._arguments))
        return self._line(self._shape(calls=[call]))

    def _line(self, fields: dict[str, Any], **end: Any) -> bytes:
        if self._logprobs:
            fields["logprobs"] = logprobs_body(self._logprobs)
            self._logprobs = ()
        return self._head + msgspec.json.encode({**fields, **(end or {"done": False})})[1:] + b"\n"


def whole_body(
    shape: Shape, events: Iterable[AnyEvent], request: GenerateRequest, *, id: str, created: int, model: str
) -> bytes:
    """The whole response as one body. Raises the error of a `Failure`."""
    del id
    received = list(events)
    choice: ResponseChoice = gather(received)[0]
    cut_off = {event.call for event in received if isinstance(event, ToolCallStop) and not event.is_complete}
    calls = [
        call_body(index, call.id, call.name, call.arguments)
        for index, call in enumerate(choice.tool_calls)
        if index not in cut_off
    ]
    thinking = choice.reasoning if request.thinking.shown else ""
    body: dict[str, Any] = {"model": model, "created_at": timestamp(created)}
    body |= shape(text=choice.text, thinking=thinking, calls=calls)
    if choice.logprobs:
        body["logprobs"] = logprobs_body(choice.logprobs)
    return msgspec.json.encode(body | end_of(choice.finish, request))


def end_of(finish: Finish, request: GenerateRequest) -> dict[str, Any]:
    """The additional fields of the last line. Durations are in nanoseconds; the load duration includes waiting."""
    if request.loads_only:
        return {"done": True, "done_reason": "unload" if request.keep_alive_s == 0 else "load"}
    timing, usage = finish.timing, finish.usage
    load_s = timing.gateway_s + timing.queue_s
    return {
        "done": True,
        "done_reason": "length" if finish.reason == "length" else "stop",
        "total_duration": nanoseconds(load_s + timing.prefill_s + timing.decode_s),
        "load_duration": nanoseconds(load_s),
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(timing.prefill_s),
        "eval_count": usage.completion_tokens,
        "eval_duration": nanoseconds(timing.decode_s),
    }


def call_body(index: int, id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call with its arguments as an object; text that is none becomes its `input`."""
    try:
        values = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        values = arguments
    if not isinstance(values, dict):
        values = {"input": values}
    return {"id": id, "function": {"index": index, "name": name, "arguments": values}}


def logprobs_body(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [{**_token(token), "top_logprobs": [_token(other) for other in token.top]} for token in tokens]


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)}


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def timestamp(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")
