"""Encodes a response as chat completions: streamed, or as one body."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from cortex.wire.dialects.openai_chunks import (
    SYSTEM_FINGERPRINT,
    ChunkEncoder,
    prompt_logprobs_body,
    served_tier,
    stream_error,
    timings_body,
    usage_body,
)
from cortex.wire.error_encoding import from_code
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
from cortex.wire.fields.custom_tools import InputDecoder, input_of
from cortex.wire.requests import GenerateRequest, ToolCall
from cortex.wire.response import ResponseChoice, gather, total_usage
from cortex.wire.sse import frame


class Encoder(ChunkEncoder):
    """Events to chunks. One per response. Log-probabilities are sent with the next delta of their choice."""

    def __init__(self, request: GenerateRequest, *, id: str, created: int, model: str) -> None:
        super().__init__("chat.completion.chunk", request, id=id, created=created, model=model)
        self._shows_reasoning = request.thinking.shown
        self._as_functions = request.as_functions
        self._custom_tools = request.custom_tools
        self._inputs: dict[tuple[int, int], InputDecoder] = {}
        """The calls of custom tools, by choice and call."""

    def encode(self, event: AnyEvent) -> bytes:
        match event:
            case TextDelta(text=text):
                return self._text_chunk(event.index, "content", text)
            case ReasoningDelta(text=text):
                if self._shows_reasoning:
                    return self._text_chunk(event.index, "reasoning_content", text)
                self._logprobs.pop(event.index, None)
                return b""
            case ToolCallStart():
                return self._begin_call(event)
            case ToolCallDelta(call=call, arguments=arguments):
                return self._continue_call(event.index, call, arguments)
            case ToolCallStop(call=call):
                decoder = self._inputs.pop((event.index, call), None)
                rest = "" if decoder is None else decoder.finish()
                return self._custom_input(event.index, call, rest) if rest else b""
            case Start(prompt_token_ids=prompt):
                delta = {"role": "assistant", "content": "", "refusal": None}
                return self._chunk([self._choice(event.index, delta)], prompt=prompt)
            case TokenIds() | Logprobs() | UsageSoFar():
                return self._note(event)
            case PromptLogprobs():
                return b""  # a stream has none
            case Finish():
                return self._finish(event)
            case Failure(code=code, message=message):
                return stream_error(from_code(code, message))

    def _begin_call(self, event: ToolCallStart) -> bytes:
        if self._as_functions:
            return self._delta(event.index, {"function_call": {"name": event.name, "arguments": ""}})
        call: dict[str, Any] = {"index": event.call, "id": event.id}
        if event.name in self._custom_tools:
            self._inputs[event.index, event.call] = InputDecoder()
            call |= {"type": "custom", "custom": {"name": event.name, "input": ""}}
        else:
            call |= {"type": "function", "function": {"name": event.name, "arguments": ""}}
        return self._delta(event.index, {"tool_calls": [call]})

    def _continue_call(self, index: int, call: int, arguments: str) -> bytes:
        if self._as_functions:
            return self._delta(index, {"function_call": {"arguments": arguments}})
        if (decoder := self._inputs.get((index, call))) is not None:
            text = decoder.push(arguments)
            return self._custom_input(index, call, text) if text else b""
        return self._delta(index, {"tool_calls": [{"index": call, "function": {"arguments": arguments}}]})

    def _custom_input(self, index: int, call: int, text: str) -> bytes:
        return self._delta(index, {"tool_calls": [{"index": call, "custom": {"input": text}}]})

    def _whole_text_chunk(self, index: int, field: str, text: str) -> bytes:
        return self._delta(index, {field: text})

    def _delta(self, index: int, delta: dict[str, Any], **finish: str | None) -> bytes:
        return self._chunk([self._choice(index, delta, **finish)])

    def _choice(self, index: int, delta: dict[str, Any], **finish: str | None) -> dict[str, Any]:
        logprobs = self._logprobs.pop(index, None)
        return {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else logprobs_body(logprobs),
            "finish_reason": None,
            **finish,
            **self._ids(index),
        }

    def _finish(self, event: Finish) -> bytes:
        self._note(event)
        reason = _finish_reason(event, as_functions=self._as_functions)
        return self._finished(event, self._delta(event.index, {}, finish_reason=reason, **_stop_reason(event)))


def fold(events: Iterable[AnyEvent], request: GenerateRequest, *, id: str, created: int, model: str) -> bytes:
    """The whole response as one body. Raises the error of a `Failure`."""
    choices = gather(events)
    usage = total_usage(choice.finish for choice in choices)
    body = {
        "id": id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "choices": [_choice_body(choice, request) for choice in choices],
        "usage": usage_body(usage),
        **served_tier(request),
    }
    if request.sampling.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs_body(choices[0].prompt_logprobs)
    if request.timings:
        body["timings"] = timings_body(usage, choices[-1].finish.timing)
    if request.return_token_ids:
        body["prompt_token_ids"] = choices[0].prompt_token_ids
    return msgspec.json.encode(body)


def _choice_body(choice: ResponseChoice, request: GenerateRequest) -> dict[str, Any]:
    calls = choice.tool_calls
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if calls else ""), "refusal": None}
    if choice.reasoning and request.thinking.shown:
        message["reasoning_content"] = choice.reasoning
    if calls and request.as_functions:
        message["function_call"] = {"name": calls[0].name, "arguments": calls[0].arguments}
    elif calls:
        message["tool_calls"] = [tool_call_body(call, is_custom=call.name in request.custom_tools) for call in calls]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs_body(choice.logprobs) if choice.logprobs or request.sampling.logprobs else None,
        "finish_reason": _finish_reason(choice.finish, as_functions=request.as_functions),
        **_stop_reason(choice.finish),
        **({"token_ids": choice.token_ids} if request.return_token_ids else {}),
    }


def _finish_reason(finish: Finish, *, as_functions: bool) -> str:
    return "function_call" if as_functions and finish.reason == "tool_calls" else finish.reason


def _stop_reason(finish: Finish) -> dict[str, str]:
    """The stop string that ended the choice, a common extension of self-hosted servers."""
    return {} if finish.stop_sequence is None else {"stop_reason": finish.stop_sequence}


def tool_call_body(call: ToolCall, *, is_custom: bool = False) -> dict[str, Any]:
    if is_custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": input_of(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def logprobs_body(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {**_token_body(token), "top_logprobs": [_token_body(other) for other in token.top]} for token in tokens
        ],
        "refusal": None,
    }


def _token_body(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": token.logprob, "bytes": list(token.bytes)}


def loading_chunk(model: str, text: str, created: float) -> bytes:
    """A chunk of reasoning before the first of the response."""
    delta = {"role": "assistant", "content": None, "reasoning_content": f"{text}\n"}
    chunk = {
        "id": "loading",
        "object": "chat.completion.chunk",
        "created": int(created),
        "model": model,
        "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
    }
    return frame(msgspec.json.encode(chunk))
