"""Finds tool calls in a response as it streams.

A call is announced once its name is known and arguments follow; until then, text that looks like a call can still be
emitted as text. White space next to a call is layout, and the beginning of a call that the end of the response cut off
is markup; nothing else is ever lost, except control tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cortex.neuron.text.stops import held_suffix
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
        self._call_openings = frozenset((*syntax.openings, *syntax.bare_openings, *syntax.next_openings))
        self._markers = tuple(dict.fromkeys((*syntax.openings, *syntax.never_text)))
        """The openings to find anywhere in the text."""
        self._first_characters = frozenset(marker[0] for marker in self._markers)
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
        """After `finish`: whether the text ended inside a call."""

    def push(self, text: str) -> list[CallEvent]:
        events: list[CallEvent] = []
        self._take(text, events)
        return events

    def finish(self, *, is_cut: bool = False) -> list[CallEvent]:
        """The events of held-back text, after the last push. `is_cut`: the model was not done, so the beginning of an
        opening is markup."""
        events: list[CallEvent] = []
        if (reader := self._reader) is not None:
            try:
                self._report(reader.finish(), events)
            except NotACall:
                self._reader = None
                self._emit(self._gap + self._shown(self._opening + "".join(self._body)), events)
            if self._reader is not None:
                self._reader = None
                self.broke_off = True
                if self._announced:
                    self._end_call(events, is_complete=False)
        held, self._held = self._held, ""
        if is_cut and (size := self._held_opening(held)):
            held = held[:-size].rstrip()
        if not (is_cut and self._num_calls and self._may_be_next(held)):
            self._emit(self._shown(held), events)
        return events

    def _take(self, text: str, events: list[CallEvent]) -> None:
        while text:
            text = self._scan(text, events) if self._reader is None else self._read(self._reader, text, events)

    def _scan(self, text: str, events: list[CallEvent]) -> str:
        """Looks for an opening; returns the text after it."""
        text = self._held + text
        self._held = ""
        if self._has_text and self._first_characters.isdisjoint(text):  # nearly all text: no marker begins in it
            solid = text.rstrip()
            self._emit(solid, events)
            self._held = text[len(solid) :]
            return ""
        start, opening = self._find_opening(text)
        if opening not in self._call_openings and len(text) - self._held_opening(text) < start:
            opening = None  # it may be inside of an opening that is not complete yet
        if opening is not None:
            solid = self._solid(text[:start])
            self._emit(solid, events)
            if opening not in self._call_openings:
                return text[len(solid) : start] + text[start + len(opening) :]
            self._gap = text[len(solid) : start]
            self._reader = self._syntax.reader(opening)
            self._opening = opening
            self._body = []
            return text[start + len(opening) :]
        if self._may_be_next(text):
            self._held = text
            return ""
        solid = self._solid(text[: len(text) - self._held_opening(text)])
        self._emit(solid, events)
        self._held = text[len(solid) :]
        return ""

    @property
    def _bare_openings(self) -> tuple[str, ...]:
        return self._syntax.bare_openings + (self._syntax.next_openings if self._num_calls else ())

    def _may_be_next(self, text: str) -> bool:
        """Whether `text` may be layout and the beginning of a bare opening."""
        begun = text.lstrip(self._layout)
        return not self._has_text and any(opening.startswith(begun) for opening in self._bare_openings)

    def _held_opening(self, text: str) -> int:
        """Number of characters at the end of `text` that could be the beginning of a marker."""
        return max((held_suffix(text, marker) for marker in self._markers), default=0)

    @property
    def _shown_opening(self) -> str:
        """An opening without a call, as text."""
        return self._shown(self._opening)

    def _shown(self, text: str) -> str:
        """`text` without control tokens."""
        for marker in self._syntax.never_text:
            text = text.replace(marker, "")
        return text

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
        found = [(text.find(marker), marker) for marker in self._markers]
        if not self._has_text:
            start = len(text) - len(text.lstrip(self._layout))
            found += [(start, opening) for opening in self._bare_openings if text.startswith(opening, start)]
        return min(((start, opening) for start, opening in found if start >= 0), default=(0, None))

    def _read(self, reader: CallReader, text: str, events: list[CallEvent]) -> str:
        if not self._announced:
            self._body.append(text)
        try:
            progress = reader.feed(text)
        except NotACall:
            # The opening is text; the text after it may still contain a call.
            self._reader = None
            self._emit(self._gap + self._shown_opening, events)
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
