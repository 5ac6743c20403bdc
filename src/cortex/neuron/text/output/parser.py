"""Turns the text of a response into events as it streams: reasoning, text and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from cortex.neuron.text.output.addressed import AddressedSplitter
from cortex.neuron.text.output.reasoning import OutputPiece, ReasoningSplitter
from cortex.neuron.text.tools.scanner import CallScanner
from cortex.wire.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart, ToolCallStop

OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallStop


class OutputParser:
    """Parses one choice of a response. Owned by one request. The joined events do not depend on how text was split."""

    def __init__(
        self, splitter: ReasoningSplitter | AddressedSplitter | None, scanner: CallScanner | None, index: int
    ) -> None:
        """Without a splitter there is no reasoning; without a scanner there are no calls."""
        self._splitter = splitter
        self._scanner = scanner
        self._index = index

    @property
    def broke_off(self) -> bool:
        """After `finish`: whether the response ended inside a call."""
        return self._scanner is not None and self._scanner.broke_off

    def push(self, text: str) -> list[OutputEvent]:
        if self._splitter is not None:
            return self._events(self._splitter.push(text))
        if self._scanner is not None:
            return [*self._scanner.push(text)]
        return [TextDelta(index=self._index, text=text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """The events of held-back text, after the last push. `is_cut`: a limit ended the response, not the model."""
        events = [] if self._splitter is None else self._events(self._splitter.finish())
        if self._scanner is not None:
            events += self._scanner.finish(is_cut=is_cut)
        return events

    def _events(self, pieces: Iterable[OutputPiece]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for piece in pieces:
            if not piece.text:
                continue
            if piece.is_reasoning:
                events.append(ReasoningDelta(index=self._index, text=piece.text))
            elif self._scanner is not None:
                events += self._scanner.push(piece.text)
            else:
                events.append(TextDelta(index=self._index, text=piece.text))
        return events


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
