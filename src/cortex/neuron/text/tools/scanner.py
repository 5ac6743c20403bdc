"""Finds tool calls in a response as it streams.

A call is announced once its name is known and arguments follow; until then, text that looks like a call can still be
emitted as text. White space next to a call is layout; nothing else is ever lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cortex.neuron.text.output.stops import held_suffix
from cortex.neuron.text.tools.call import CallProgress, CallReader, CallSyntax, NotACall
from cortex.wire.events import TextDelta, ToolCallDelta, ToolCallStart, ToolCallStop

_WHITE_SPACE: Final = " \t\r\n"

CallEvent = TextDelta | ToolCallStart | ToolCallDelta | ToolCallStop


class CallScanner:
    """The text and calls of one response. Owned by one request. The joined events do not depend on the split."""

    def __init__(self, syntax: CallSyntax, new_id: Callable[[], str], index: int) -> None:
        self._syntax = syntax
        self._new_id = new_id
        self._index = index
        self._num_calls = 0
        self._held = ""
        """Text that may be layout before a call, or the beginning of an opening."""
        self._has_text = False
        """Whether there was text since the start or the last call: then a bare opening is part of the text."""
        self._reader: CallReader | None = None
        self._gap = ""
        """White space before the call that is being read."""
        self._opening = ""
        self._body: list[str] = []
        """The reader's input after the opening, in case it is not a call."""
        self._announced = False
        self.broke_off = False
        """After `finish`: whether the text ended inside an announced call."""

    def push(self, text: str) -> list[CallEvent]:
        events: list[CallEvent] = []
        self._take(text, events)
        return events

    def finish(self) -> list[CallEvent]:
        """The events of held-back text, after the last push; a call that was not announced yet is text."""
        events: list[CallEvent] = []
        if (reader := self._reader) is not None:
            self._reader = None
            try:
                self._report(reader.finish(), events)
            except NotACall:
                self._emit(self._gap + self._opening + "".join(self._body), events)
            if self._announced:
                self.broke_off = True
                self._end_call(events, is_complete=False)
        self._emit(self._held, events)
        self._held = ""
        return events

    def _take(self, text: str, events: list[CallEvent]) -> None:
        while text:
            text = self._scan(text, events) if self._reader is None else self._read(self._reader, text, events)

    def _scan(self, text: str, events: list[CallEvent]) -> str:
        """Looks for an opening; returns the text after it."""
        text = self._held + text
        self._held = ""
        start, opening = self._find_opening(text)
        if opening is not None:
            solid = self._solid(text[:start])
            self._emit(solid, events)
            self._gap = text[len(solid) : start]
            self._reader = self._syntax.reader(opening)
            self._opening = opening
            self._body = []
            return text[start + len(opening) :]
        keep = max((held_suffix(text, marker) for marker in self._syntax.openings), default=0)
        solid = self._solid(text[: len(text) - keep])
        self._emit(solid, events)
        self._held = text[len(solid) :]
        return ""

    def _solid(self, text: str) -> str:
        """`text` without trailing layout, in case a call follows."""
        if not self._has_text and not text.strip(self._layout):
            return ""
        return text.rstrip()

    @property
    def _layout(self) -> str | None:
        """Characters allowed before the next call: white space, and separators after the first call."""
        return _WHITE_SPACE + self._syntax.separators if self._num_calls else None

    def _find_opening(self, text: str) -> tuple[int, str | None]:
        found = [(text.find(opening), opening) for opening in self._syntax.openings]
        if not self._has_text:
            start = len(text) - len(text.lstrip(self._layout))
            found += [(start, opening) for opening in self._syntax.bare_openings if text.startswith(opening, start)]
        return min(((start, opening) for start, opening in found if start >= 0), default=(0, None))

    def _read(self, reader: CallReader, text: str, events: list[CallEvent]) -> str:
        if not self._announced:
            self._body.append(text)
        try:
            progress = reader.feed(text)
        except NotACall:
            # The opening is text; the text after it may still contain a call.
            self._reader = None
            self._emit(self._gap + self._opening, events)
            return "".join(self._body)
        return self._report(progress, events)

    def _report(self, progress: CallProgress, events: list[CallEvent]) -> str:
        """Adds events; returns the text after the call, if it is complete."""
        if progress.name is not None:
            self._announced = True
            events.append(ToolCallStart(index=self._index, call=self._num_calls, id=self._new_id(), name=progress.name))
        if progress.arguments:
            events.append(ToolCallDelta(index=self._index, call=self._num_calls, arguments=progress.arguments))
        if progress.rest is None:
            return ""
        self._end_call(events)
        return progress.rest

    def _end_call(self, events: list[CallEvent], *, is_complete: bool = True) -> None:
        events.append(ToolCallStop(index=self._index, call=self._num_calls, is_complete=is_complete))
        self._reader = None
        self._announced = False
        self._num_calls += 1
        self._has_text = False

    def _emit(self, text: str, events: list[CallEvent]) -> None:
        if self._num_calls and not self._has_text:
            text = text.lstrip()
        if not text:
            return
        self._has_text = True
        if events and isinstance(events[-1], TextDelta):
            events[-1] = TextDelta(index=self._index, text=events[-1].text + text)
        else:
            events.append(TextDelta(index=self._index, text=text))
