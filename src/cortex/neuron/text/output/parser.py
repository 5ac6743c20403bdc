"""From an answer's text to events: thought, text and tool calls, as they stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from cortex.neuron.text.output.detect import ToolSyntax
from cortex.neuron.text.output.reasoning import OutputPiece, ReasoningSplitter
from cortex.neuron.text.tools.bare_json import LlamaJSON, PlainJSON
from cortex.neuron.text.tools.call import CallSyntax
from cortex.neuron.text.tools.hermes import HermesJSON
from cortex.neuron.text.tools.qwen_xml import QwenXML
from cortex.neuron.text.tools.scanner import CallScanner
from cortex.wire.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart, ToolCallStop
from cortex.wire.requests import Tool

OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallStop


class OutputParser:
    """One choice of one answer. Owned by one request; the events, deltas joined, do not depend on the split."""

    def __init__(self, splitter: ReasoningSplitter | None, scanner: CallScanner | None, index: int) -> None:
        """Without a splitter everything is the answer; without a scanner the answer has no calls."""
        self._splitter = splitter
        self._scanner = scanner
        self._index = index

    @property
    def broke_off(self) -> bool:
        """Known after `finish`: the answer ended inside a call whose arguments were already being told."""
        return self._scanner is not None and self._scanner.broke_off

    def push(self, text: str) -> list[OutputEvent]:
        pieces = [OutputPiece(False, text)] if self._splitter is None else self._splitter.push(text)
        return list(self._events(pieces))

    def finish(self) -> list[OutputEvent]:
        """What was held back, once the last text was pushed."""
        events = list(self._events([] if self._splitter is None else self._splitter.finish()))
        if self._scanner is not None:
            events += self._scanner.finish()
        return events

    def _events(self, pieces: Iterable[OutputPiece]) -> Iterable[OutputEvent]:
        for piece in pieces:
            if not piece.text:
                continue
            if piece.is_reasoning:
                yield ReasoningDelta(index=self._index, text=piece.text)
            elif self._scanner is not None:
                yield from self._scanner.push(piece.text)
            else:
                yield TextDelta(index=self._index, text=piece.text)


def call_syntax(kind: ToolSyntax, tools: Iterable[Tool]) -> CallSyntax:
    """The reader for calls of these tools."""
    match kind:
        case ToolSyntax.QWEN_XML:
            return QwenXML({tool.name: tool.parameters for tool in tools})
        case ToolSyntax.HERMES_JSON:
            return HermesJSON()
        case ToolSyntax.LLAMA_JSON:
            return LlamaJSON(tool.name for tool in tools)
        case ToolSyntax.PLAIN_JSON:
            return PlainJSON(tool.name for tool in tools)


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
