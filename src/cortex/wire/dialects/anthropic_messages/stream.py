"""Encodes a response as an Anthropic message: streamed, or as one body."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from cortex.wire.dialects.anthropic_messages.errors import ANTHROPIC
from cortex.wire.error_encoding import from_code
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
    ToolCallDelta,
    ToolCallStart,
    ToolCallStop,
    Usage,
    UsageSoFar,
)
from cortex.wire.fields.request_class import anthropic_tier_of
from cortex.wire.requests import GenerateRequest, Reasoning, Text
from cortex.wire.response import Block, gather
from cortex.wire.sse import frame

SIGNATURE = "unsigned"
"""Clients send back only thinking blocks with a signature; this one is a placeholder."""

_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|$)|[{}\[\],]', re.DOTALL)
"""The signs that structure JSON, and whole strings, which may contain them."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


def stream_error(error: CortexError) -> bytes:
    """The last event of a stream that failed."""
    return frame(msgspec.json.encode(ANTHROPIC.envelope(error)), "error")


class Encoder:
    """Events to message events. One per response, which has one choice.

    A block starts with its first piece and stops when the next one starts or the response ends, so that indices are
    dense and blocks never interleave.
    """

    def __init__(self, request: GenerateRequest, *, id: str, created: int, model: str) -> None:
        del created  # this dialect does not send it
        self._shows_reasoning = request.thinking.shown
        self._id = id
        self._model = model
        self._tier = _served_tier(request)
        self._next_block = 0
        self._open: Literal["text", "thinking", "tool_use"] | None = None

    def encode(self, event: AnyEvent) -> bytes:
        match event:
            case TextDelta(text=text):
                opened = self._ensure("text", {"type": "text", "text": ""})
                return opened + self._delta({"type": "text_delta", "text": text})
            case ReasoningDelta(text=text):
                if not self._shows_reasoning:
                    return b""
                opened = self._ensure("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                return opened + self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCallStart(id=id, name=name):
                return self._begin("tool_use", {"type": "tool_use", "id": id, "name": name, "input": {}})
            case ToolCallDelta(arguments=arguments):
                return self._delta({"type": "input_json_delta", "partial_json": arguments})
            case ToolCallStop():
                return self._end()
            case Start():
                return self._start(event)
            case Logprobs() | PromptLogprobs() | UsageSoFar() | TokenIds():
                return b""  # this dialect has none
            case Finish():
                return self._end() + self._finish(event)
            case Failure(code=code, message=message):
                return stream_error(from_code(code, message))

    def _ensure(self, kind: Literal["text", "thinking"], block: dict[str, Any]) -> bytes:
        return b"" if self._open == kind else self._begin(kind, block)

    def _begin(self, kind: Literal["text", "thinking", "tool_use"], block: dict[str, Any]) -> bytes:
        ended = self._end()
        self._open = kind
        return ended + _event("content_block_start", index=self._next_block, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._next_block, delta=delta)

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        ended = b""
        if self._open == "thinking":
            ended = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        ended += _event("content_block_stop", index=self._next_block)
        self._open = None
        self._next_block += 1
        return ended

    def _start(self, event: Start) -> bytes:
        usage = Usage(prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens)
        message = _message_body(self._id, self._model, [], None, None, usage)
        message["usage"] |= self._tier
        return _event("message_start", message=message)

    def _finish(self, event: Finish) -> bytes:
        reason, sequence = _stop(event)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = _usage_body(event.usage) | self._tier
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")


def fold(events: Iterable[AnyEvent], request: GenerateRequest, *, id: str, created: int, model: str) -> bytes:
    """The whole response as one message. Raises the error of a `Failure`."""
    del created  # this dialect does not send it
    choice = gather(events)[0]
    shows_all = request.thinking.shown
    content = [_block_body(block) for block in choice.blocks if shows_all or not isinstance(block, Reasoning)]
    message = _message_body(id, model, content, *_stop(choice.finish), choice.finish.usage)
    message["usage"] |= _served_tier(request)
    return msgspec.json.encode(message)


def _event(kind: str, **values: Any) -> bytes:
    return frame(msgspec.json.encode({"type": kind, **values}), kind)


def _stop(finish: Finish) -> tuple[str, str | None]:
    if finish.reason == "stop" and finish.stop_sequence is not None:
        return "stop_sequence", finish.stop_sequence
    return _STOP_REASONS[finish.reason], None


def _message_body(
    id: str, model: str, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: Usage
) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage_body(usage),
    }


def _served_tier(request: GenerateRequest) -> dict[str, str]:
    """Part of the usage in the response to a request that names a service tier."""
    return {"service_tier": anthropic_tier_of(request.request_class or "default")} if request.echoes_tier else {}


def _usage_body(usage: Usage) -> dict[str, Any]:
    """In this dialect `input_tokens` does not include cached prompt tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _block_body(block: Block) -> dict[str, Any]:
    if isinstance(block, Text):
        return {"type": "text", "text": block.text}
    if isinstance(block, Reasoning):
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(block.arguments)}


def _input(arguments: str) -> Any:
    """The arguments as an object. Of a call that `max_tokens` ended, the members that are complete."""
    if (value := _decoded(arguments or "{}")) is not None:
        return value
    depth, last_comma = 0, 0
    for found in _STRUCTURE.finditer(arguments):
        sign = found.group()[0]
        depth += (sign in "{[") - (sign in "}]")
        if sign == "," and depth == 1:
            last_comma = found.start()
    return _decoded(arguments[:last_comma] + "}") or {}


def _decoded(arguments: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
