"""Decodes the chat-completions response of another server into our events, and its errors into ours."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cortex.wire import errors
from cortex.wire.error_encoding import BY_CODE
from cortex.wire.errors import CortexError, UpstreamInterrupted
from cortex.wire.events import (
    MAX_TOKENS,
    AnyEvent,
    Failure,
    Finish,
    FinishReason,
    Logprobs,
    ReasoningDelta,
    Start,
    TextDelta,
    Timing,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    ToolCallStop,
    Usage,
)
from cortex.wire.fields.body import json_text
from cortex.wire.sse import Parser

_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}
_MAX_MS = 1e9


class _ChoiceReader:
    """Decodes the deltas of one choice into blocks that never interleave."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.reason: FinishReason | None = None
        self.stop_sequence: str | None = None
        self._calls: dict[Any, int] = {}
        self._open_call: int | None = None
        self._arguments: list[str] = []
        """The pieces of the open call's arguments."""

    def read(self, delta: dict[str, Any], logprobs: list[AnyEvent]) -> list[AnyEvent]:
        """The events of one delta, with `logprobs` before its first piece, inside its block."""
        events: list[AnyEvent] = []
        if reasoning := _text_of(delta, "reasoning_content") or _text_of(delta, "reasoning"):
            events += [*self._close_call(), *logprobs, ReasoningDelta(index=self.index, text=reasoning)]
            logprobs = []
        if text := _text_of(delta, "content") or _text_of(delta, "refusal"):
            events += [*self._close_call(), *logprobs, TextDelta(index=self.index, text=text)]
            logprobs = []
        events += logprobs
        for call in delta.get("tool_calls") or ():
            events += self._read_call(call)
        return events

    def _read_call(self, call: dict[str, Any]) -> list[AnyEvent]:
        """Calls are identified by `index`; servers without it send an id."""
        key = call.get("index")
        if key is None:
            key = call.get("id") or self._last_key()
        function = call.get("function") or {}
        events: list[AnyEvent] = []
        if key not in self._calls:
            number = len(self._calls)
            self._calls[key] = number
            events += self._close_call()
            name = _text_of(function, "name")
            id = _text_of(call, "id") or f"call_{number}"
            events.append(ToolCallStart(index=self.index, call=number, id=id, name=name))
            self._open_call, self._arguments = number, []
        number = self._calls[key]
        arguments = function.get("arguments")
        if arguments is not None and not isinstance(arguments, str):
            arguments = json_text(arguments)
        if arguments:
            if number != self._open_call:
                raise UpstreamInterrupted("The node interleaved the arguments of several tool calls; try again.")
            self._arguments.append(arguments)
            events.append(ToolCallDelta(index=self.index, call=number, arguments=arguments))
        return events

    def _last_key(self) -> Any:
        return next(reversed(self._calls), 0)

    def _close_call(self, *, is_complete: bool = True) -> list[AnyEvent]:
        if self._open_call is None:
            return []
        closed = ToolCallStop(index=self.index, call=self._open_call, is_complete=is_complete)
        self._open_call = None
        return [closed]

    def end(self, usage: Usage, timing: Timing) -> list[AnyEvent]:
        reason: FinishReason = self.reason or "stop"
        if reason == "stop" and self._calls:
            reason = "tool_calls"
        finish = Finish(index=self.index, reason=reason, usage=usage, stop_sequence=self.stop_sequence, timing=timing)
        is_complete = reason != "length" or _is_json("".join(self._arguments))
        return [*self._close_call(is_complete=is_complete), finish]


class _ResponseReader:
    """Decodes JSON chunks into events. A whole body is one chunk whose deltas are messages."""

    def __init__(self) -> None:
        self._choices: dict[int, _ChoiceReader] = {}
        self._usage = Usage()
        self._timing = Timing()
        self.ended = False

    @property
    def finished(self) -> bool:
        return bool(self._choices) and all(choice.reason is not None for choice in self._choices.values())

    def read(self, text: str | bytes, part: Literal["delta", "message"]) -> list[AnyEvent]:
        try:
            return self._read(msgspec.json.decode(text), part)
        except (msgspec.MsgspecError, RecursionError, AttributeError, KeyError, TypeError, ValueError) as problem:
            raise UpstreamInterrupted(
                f"The node's response is not a chat completion ({problem}); check the server at its address."
            ) from problem

    def _read(self, chunk: dict[str, Any], part: Literal["delta", "message"]) -> list[AnyEvent]:
        if self.ended:
            return []
        if (error := chunk.get("error")) is not None:
            self.ended = True
            return [_failure(error)]
        if (usage := chunk.get("usage")) is not None:
            self._usage = _usage(usage)
        if isinstance(timings := chunk.get("timings"), dict):
            self._timing = _timing(timings)
        events: list[AnyEvent] = []
        for choice in chunk.get("choices") or ():
            index = int(choice.get("index") or 0)
            if index not in self._choices:
                self._choices[index] = _ChoiceReader(index)
                events.append(
                    Start(
                        index=index,
                        id=_text_of(chunk, "id"),
                        model=_text_of(chunk, "model"),
                        created=int(chunk.get("created") or 0),
                    )
                )
            reader = self._choices[index]
            logprobs: list[AnyEvent] = []
            if tokens := (choice.get("logprobs") or {}).get("content"):
                logprobs.append(Logprobs(index=index, tokens=tuple(_token(token) for token in tokens)))
            content = choice.get(part) or {}
            events += reader.read(_numbered(content) if part == "message" else content, logprobs)
            if (reason := choice.get("finish_reason")) is not None:
                reader.reason = _FINISH_REASONS.get(reason, "stop")
                stop = choice.get("stop_reason")
                reader.stop_sequence = stop if isinstance(stop, str) else None
        return events

    def end(self) -> list[AnyEvent]:
        """The finish events, once no usage can follow. The prompt is counted in the first choice."""
        if self.ended:
            return []
        self.ended = True
        if not self._choices:
            raise UpstreamInterrupted("The node ended its response before it began; try again.")
        usages = {index: Usage() for index in self._choices} | {min(self._choices): self._usage}
        return [
            event for index in sorted(self._choices) for event in self._choices[index].end(usages[index], self._timing)
        ]


class ResponseDecoder:
    """Decodes a streamed response: `feed` for its bytes, `finish` when the connection ends.

    The events do not depend on how the bytes were split. An error inside the stream becomes a `Failure`. `feed` and
    `finish` raise `UpstreamInterrupted` when the response is malformed or incomplete.
    """

    def __init__(self) -> None:
        self._parser = Parser()
        self._reader = _ResponseReader()

    @property
    def ended(self) -> bool:
        """True after the last event; later bytes are ignored."""
        return self._reader.ended

    def feed(self, data: bytes) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        for frame in self._parser.feed(data):
            if self._reader.ended:
                break
            events += self._reader.end() if frame.data == "[DONE]" else self._reader.read(frame.data, "delta")
        return events

    def finish(self) -> list[AnyEvent]:
        """The last events, at the end of the connection. Raises `UpstreamInterrupted` if the response is incomplete."""
        if not self._reader.ended and not self._reader.finished:
            raise UpstreamInterrupted("The server closed the connection in the middle of its response; try again.")
        return self._reader.end()


def unfold(body: bytes) -> list[AnyEvent]:
    """The events of a response that was not streamed. Raises `UpstreamInterrupted` if it is malformed."""
    reader = _ResponseReader()
    return [*reader.read(body, "message"), *reader.end()]


def _numbered(message: dict[str, Any]) -> dict[str, Any]:
    """A whole message whose calls have an `index`, as they have in a stream."""
    calls = [{**call, "index": place} for place, call in enumerate(message.get("tool_calls") or ())]
    return {**message, "tool_calls": calls}


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def _text_of(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""


def _usage(usage: dict[str, Any]) -> Usage:
    """The reported usage; none if a number is impossible."""
    prompt_details = usage.get("prompt_tokens_details") or {}
    completion_details = usage.get("completion_tokens_details") or {}
    reported = Usage(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(prompt_details.get("cached_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        reasoning_tokens=int(completion_details.get("reasoning_tokens") or 0),
        accepted_prediction_tokens=int(completion_details.get("accepted_prediction_tokens") or 0),
        rejected_prediction_tokens=int(completion_details.get("rejected_prediction_tokens") or 0),
    )
    return reported if all(0 <= tokens <= MAX_TOKENS for tokens in msgspec.structs.astuple(reported)) else Usage()


def _timing(timings: dict[str, Any]) -> Timing:
    """llama.cpp's durations, in milliseconds; none if one is impossible."""
    prefill_ms, decode_ms = (timings.get(name) or 0 for name in ("prompt_ms", "predicted_ms"))
    if not all(isinstance(ms, int | float) and 0 <= ms <= _MAX_MS for ms in (prefill_ms, decode_ms)):
        return Timing()
    return Timing(prefill_s=prefill_ms / 1000, decode_s=decode_ms / 1000)


def _token(token: dict[str, Any]) -> TokenLogprob:
    """Chat completions have no token ids; -1 stands for that."""
    return TokenLogprob(
        token=str(token["token"]),
        token_id=-1,
        logprob=float(token["logprob"]),
        bytes=tuple(token.get("bytes") or str(token["token"]).encode("utf-8", "replace")),
        top=tuple(_token(other) for other in token.get("top_logprobs") or ()),
    )


def _failure(error: Any) -> Failure:
    if not isinstance(error, dict):
        return Failure(code=UpstreamInterrupted.code, message=f"The node reported: {error}")
    code = error.get("code")
    known = isinstance(code, str) and code in BY_CODE
    return Failure(
        code=str(code) if known else UpstreamInterrupted.code,
        message=_text_of(error, "message") or "The node reported an error without a message.",
    )


_BY_STATUS: dict[int, type[CortexError]] = {
    400: errors.InvalidValue,
    404: errors.ModelNotFound,
    413: errors.BodyTooLarge,
    422: errors.InvalidValue,
    429: errors.RateLimitExceeded,
    503: errors.Overloaded,
    529: errors.Overloaded,
}


class _ErrorBody(msgspec.Struct):
    message: str = ""
    code: object = None


class _ErrorEnvelope(msgspec.Struct):
    error: _ErrorBody


def foreign_error(status: int, body: bytes) -> CortexError:
    """A foreign server's error as ours. A rejected key is this gateway's misconfiguration, not the client's fault. Of
    errors of the request the code stays, because clients recognise a prompt that is too long by it."""
    kind = _BY_STATUS.get(status, errors.UpstreamUnavailable)
    try:
        error = msgspec.json.decode(body, type=_ErrorEnvelope).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = _ErrorBody()
    if kind is errors.InvalidValue and isinstance(error.code, str):
        named = BY_CODE.get(error.code, kind)
        kind = named if named.status == kind.status else kind
    return kind(error.message or f"The node responded with status {status} and no message.")
