"""Encodes a response as chat completions: streamed, or as one body."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from cortex import __version__
from cortex.wire import errors
from cortex.wire.errors import CortexError, Family
from cortex.wire.events import (
    AnyEvent,
    Failure,
    Finish,
    Logprobs,
    ReasoningDelta,
    Start,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    ToolCallStop,
    Usage,
)
from cortex.wire.requests import GenerateRequest, ToolCall
from cortex.wire.response import ResponseChoice, gather, total_usage
from cortex.wire.sse import frame

DONE = frame(b"[DONE]")
SYSTEM_FINGERPRINT = f"fp_cortex_{__version__}"
"""With the same fingerprint, the same request with a seed gives the same response."""


def stream_error(error: CortexError) -> bytes:
    """The last frame of a stream that failed."""
    return frame(msgspec.json.encode(errors.envelope(error, Family.OPENAI)))


class Encoder:
    """Events to chunks. One per response.

    Log-probabilities are sent with the next delta of their choice. The usage chunk and `[DONE]` follow the finish of
    the last of the `n` choices.
    """

    def __init__(self, request: GenerateRequest, *, id: str, created: int, model: str) -> None:
        self._head = {
            "id": id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }
        self._include_usage = request.include_usage
        self._open_choices = request.sampling.n
        self._finishes: list[Finish] = []
        self._logprobs: dict[int, tuple[TokenLogprob, ...]] = {}

    def encode(self, event: AnyEvent) -> bytes:
        match event:
            case TextDelta(text=text):
                return self._delta(event.index, {"content": text})
            case ReasoningDelta(text=text):
                return self._delta(event.index, {"reasoning_content": text})
            case ToolCallStart(call=call, id=id, name=name):
                function = {"name": name, "arguments": ""}
                return self._tool_call(event.index, {"index": call, "id": id, "type": "function", "function": function})
            case ToolCallDelta(call=call, arguments=arguments):
                return self._tool_call(event.index, {"index": call, "function": {"arguments": arguments}})
            case ToolCallStop():
                return b""
            case Start():
                return self._delta(event.index, {"role": "assistant", "content": ""})
            case Logprobs(tokens=tokens):
                self._logprobs[event.index] = self._logprobs.get(event.index, ()) + tokens
                return b""
            case Finish():
                return self._finish(event)
            case Failure(code=code, message=message):
                return stream_error(errors.from_code(code, message))

    def _tool_call(self, index: int, call: dict[str, Any]) -> bytes:
        return self._delta(index, {"tool_calls": [call]})

    def _delta(self, index: int, delta: dict[str, Any], **finish: str | None) -> bytes:
        logprobs = self._logprobs.pop(index, None)
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else logprobs_body(logprobs),
            "finish_reason": None,
            **finish,
        }
        return self._chunk([choice], None)

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        chunk: dict[str, Any] = {**self._head, "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage
        return frame(msgspec.json.encode(chunk))

    def _finish(self, event: Finish) -> bytes:
        self._finishes.append(event)
        ended = self._delta(event.index, {}, finish_reason=event.reason, **_stop_reason(event))
        if len(self._finishes) < self._open_choices:
            return ended
        if self._include_usage:
            ended += self._chunk([], usage_body(total_usage(self._finishes)))
        return ended + DONE


def fold(events: Iterable[AnyEvent], request: GenerateRequest, *, id: str, created: int, model: str) -> bytes:
    """The whole response as one body. Raises the error of a `Failure`."""
    del request  # the events have everything that this dialect sends
    choices = gather(events)
    return msgspec.json.encode(
        {
            "id": id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": [_choice_body(choice) for choice in choices],
            "usage": usage_body(total_usage(choice.finish for choice in choices)),
        }
    )


def _choice_body(choice: ResponseChoice) -> dict[str, Any]:
    calls = choice.tool_calls
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if calls else "")}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if calls:
        message["tool_calls"] = [tool_call_body(call) for call in calls]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs_body(choice.logprobs) if choice.logprobs else None,
        "finish_reason": choice.finish.reason,
        **_stop_reason(choice.finish),
    }


def _stop_reason(finish: Finish) -> dict[str, str]:
    """The stop string that ended the choice: a common extension of self-hosted servers."""
    return {} if finish.stop_sequence is None else {"stop_reason": finish.stop_sequence}


def tool_call_body(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def logprobs_body(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {**_token_body(token), "top_logprobs": [_token_body(other) for other in token.top]} for token in tokens
        ],
        "refusal": None,
    }


def _token_body(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)}
