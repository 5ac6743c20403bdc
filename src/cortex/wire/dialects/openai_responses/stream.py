"""Encodes a response as a response object: streamed, or as one body.

Every streamed payload has its `type` and a `sequence_number` that increases by one. An item is added with its first
piece and done when the next one begins, so that output indices are dense and items never interleave.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from cortex.wire.dialects.openai_chat.stream import logprobs_body
from cortex.wire.dialects.openai_responses.response import Status, failed, finished, item_body, item_id, response_body
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
from cortex.wire.fields.custom_tools import InputDecoder
from cortex.wire.requests import GenerateRequest, Reasoning, Text, Tool, ToolCall
from cortex.wire.response import Block, gather
from cortex.wire.sse import frame

_LAST_SEQUENCE_NUMBER = 2**31 - 1
"""A sequence number above any of a stream, for an error from outside its encoder."""


def stream_error(error: CortexError) -> bytes:
    """The last event of a stream that failed outside its encoder."""
    payload = {
        "type": "error",
        "sequence_number": _LAST_SEQUENCE_NUMBER,
        "code": error.code,
        "message": error.message,
        "param": error.param,
    }
    return frame(msgspec.json.encode(payload), "error")


class Encoder:
    """Events to response events. One per response, which has one choice."""

    def __init__(self, request: GenerateRequest, *, id: str, created: int, model: str) -> None:
        self.response = response_body(request, id=id, created=created, model=model)
        """The response object of the last status event."""
        self._id = id
        self._shows_reasoning = request.thinking.shown
        self._summarized = request.thinking.summarized
        self._tools = {tool.name: tool for tool in request.tools}
        self._called: Tool | None = None
        """The tool of the open call, if the request has it."""
        self._input: InputDecoder | None = None
        """Decodes the input of the open call, if it calls a custom tool."""
        self._sequence_number = 0
        self._done_items: list[dict[str, Any]] = []
        self._open: ToolCallStart | type[Text] | type[Reasoning] | None = None
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._waiting_logprobs: tuple[TokenLogprob, ...] = ()

    def encode(self, event: AnyEvent) -> bytes:
        match event:
            case TextDelta(text=text):
                opened = b"" if self._open is Text else self._begin(Text)
                logprobs = logprobs_body(self._take_logprobs())["content"]
                return opened + self._piece("response.output_text.delta", text, content_index=0, logprobs=logprobs)
            case ReasoningDelta(text=text):
                self._waiting_logprobs = ()
                if not self._shows_reasoning:
                    return b""
                opened = b"" if self._open is Reasoning else self._begin(Reasoning)
                if self._summarized:
                    return opened + self._piece("response.reasoning_summary_text.delta", text, summary_index=0)
                return opened + self._piece("response.reasoning_text.delta", text, content_index=0)
            case ToolCallStart():
                self._waiting_logprobs = ()
                return self._begin(event)
            case ToolCallDelta(arguments=arguments):
                self._waiting_logprobs = ()
                return self._continue_call(arguments)
            case ToolCallStop(is_complete=is_complete):
                return self._end("completed" if is_complete else "incomplete")
            case Start():
                created = self._event("response.created", response=self.response)
                return created + self._event("response.in_progress", response=self.response)
            case Logprobs(tokens=tokens):
                self._waiting_logprobs += tokens
                return b""
            case PromptLogprobs() | UsageSoFar() | TokenIds():
                return b""  # this dialect has none
            case Finish(reason=reason):
                self._take_logprobs()
                ended = self._end("incomplete" if reason in ("length", "content_filter") else "completed")
                self.response = finished(self.response, self._done_items, event)
                return ended + self._event(f"response.{self.response['status']}", response=self.response)
            case Failure(code=code, message=message):
                ended = self._end("incomplete")
                self.response = failed(self.response, self._done_items, code, message)
                return ended + self._event("response.failed", response=self.response)

    def _event(self, kind: str, **values: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._sequence_number, **values}
        self._sequence_number += 1
        return frame(msgspec.json.encode(payload), kind)

    def _item_event(self, kind: str, **values: Any) -> bytes:
        position = len(self._done_items)
        return self._event(kind, item_id=self._item_id(), output_index=position, **values)

    def _item_id(self) -> str:
        kind = ToolCall if isinstance(self._open, ToolCallStart) else self._open
        assert kind is not None, "only an open item has an id"
        return item_id(kind, self._id, len(self._done_items), self._called)

    def _continue_call(self, arguments: str) -> bytes:
        if self._called is not None and self._called.shape is not None:
            self._pieces.append(arguments)
            return b""
        if self._input is None:
            return self._piece("response.function_call_arguments.delta", arguments)
        self._pieces.append(arguments)
        text = self._input.push(arguments)
        return self._item_event("response.custom_tool_call_input.delta", delta=text) if text else b""

    def _piece(self, kind: str, text: str, **values: Any) -> bytes:
        self._pieces.append(text)
        return self._item_event(kind, delta=text, **values)

    def _take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the text that is sent now."""
        taken, self._waiting_logprobs = self._waiting_logprobs, ()
        self._logprobs += taken
        return taken

    def _block(self) -> Block:
        text = "".join(self._pieces)
        if isinstance(self._open, ToolCallStart):
            return ToolCall(id=self._open.id, name=self._open.name, arguments=text)
        return Reasoning(text=text) if self._open is Reasoning else Text(text=text)

    def _begin(self, opened: ToolCallStart | type[Text] | type[Reasoning]) -> bytes:
        encoded = self._end()
        self._open, self._pieces, self._logprobs = opened, [], []
        self._called = self._tools.get(opened.name) if isinstance(opened, ToolCallStart) else None
        self._input = InputDecoder() if self._called is not None and self._called.is_custom else None
        if self._called is not None and self._called.shape is not None:
            return encoded  # its item needs all of its arguments
        item = self._item("in_progress")
        empty: dict[str, list[Any]] = {name: [] for name in ("content", "summary") if name in item}
        encoded += self._event("response.output_item.added", output_index=len(self._done_items), item=item | empty)
        for part in item.get("content", []):
            encoded += self._item_event("response.content_part.added", content_index=0, part=part)
        for part in item.get("summary", []):
            encoded += self._item_event("response.reasoning_summary_part.added", summary_index=0, part=part)
        return encoded

    def _item(self, status: Status) -> dict[str, Any]:
        return item_body(
            self._block(),
            self._item_id(),
            self._logprobs,
            status=status,
            tool=self._called,
            summarized=self._summarized,
        )

    def _end(self, status: Status = "completed") -> bytes:
        if self._open is None:
            return b""
        item = self._item(status)
        if self._called is not None and self._called.shape is not None:
            encoded = self._event("response.output_item.added", output_index=len(self._done_items), item=item)
        elif self._input is not None:
            rest = self._input.finish()
            encoded = self._item_event("response.custom_tool_call_input.delta", delta=rest) if rest else b""
            encoded += self._item_event("response.custom_tool_call_input.done", input=item["input"])
        elif isinstance(self._open, ToolCallStart):
            encoded = self._item_event(
                "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
            )
        elif summary := item.get("summary"):
            (part,) = summary
            encoded = self._item_event("response.reasoning_summary_text.done", summary_index=0, text=part["text"])
            encoded += self._item_event("response.reasoning_summary_part.done", summary_index=0, part=part)
        else:
            (part,) = item["content"]
            kind, values = "response.reasoning_text.done", {"text": part["text"]}
            if self._open is Text:
                kind, values = "response.output_text.done", {"text": part["text"], "logprobs": part["logprobs"]}
            encoded = self._item_event(kind, content_index=0, **values)
            encoded += self._item_event("response.content_part.done", content_index=0, part=part)
        encoded += self._event("response.output_item.done", output_index=len(self._done_items), item=item)
        self._done_items.append(item)
        self._open = self._input = self._called = None
        return encoded


def fold(events: Iterable[AnyEvent], request: GenerateRequest, *, id: str, created: int, model: str) -> bytes:
    """The whole response as one response object: that of the stream's last event. Raises the error of a `Failure`."""
    received = list(events)
    gather(received)  # raises for a response that failed or is incomplete
    encoder = Encoder(request, id=id, created=created, model=model)
    for event in received:
        encoder.encode(event)
    return msgspec.json.encode(encoder.response)
