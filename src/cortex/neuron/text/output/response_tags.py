"""Removes the tags that some models write around their response after reasoning: `<response>` of ERNIE and Granite,
`<answer>` of Hunyuan.

They count only at the very beginning of the response; the closing tag counts only after the opening one.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from cortex.neuron.text.output.stops import held_suffix

_BREAKS: Final = "\r\n"


class _State(Enum):
    BEGINNING = auto()
    OPENED = auto()
    """After the opening tag, before any text: line breaks are layout."""
    INSIDE = auto()
    CLOSED = auto()
    """After the closing tag: line breaks are layout."""
    OUTSIDE = auto()


class ResponseTags:
    """Reads one response. Owned by one request. The joined text does not depend on the split."""

    def __init__(self, tags: tuple[str, str]) -> None:
        self._open, self._close = tags
        self._state = _State.BEGINNING
        self._held = ""

    def push(self, text: str) -> str:
        """The text of the response that is certain."""
        self._held += text
        match self._state:
            case _State.BEGINNING:
                return self._begin()
            case _State.OPENED:
                return self._skip_breaks(_State.INSIDE)
            case _State.CLOSED:
                return self._skip_breaks(_State.OUTSIDE)
            case _State.INSIDE:
                return self._inside()
            case _State.OUTSIDE:
                held, self._held = self._held, ""
                return held

    def finish(self) -> str:
        """The held-back text, after the last push."""
        held, self._held = self._held, ""
        return held

    def _begin(self) -> str:
        stripped = self._held.lstrip()
        if stripped.startswith(self._open):
            self._state, self._held = _State.OPENED, stripped[len(self._open) :]
            return self.push("")
        if self._open.startswith(stripped):
            return ""
        self._state = _State.OUTSIDE
        return self.push("")

    def _skip_breaks(self, following: _State) -> str:
        self._held = self._held.lstrip(_BREAKS)
        if not self._held:
            return ""
        self._state = following
        return self.push("")

    def _inside(self) -> str:
        text, close, rest = self._held.partition(self._close)
        if close:
            self._state, self._held = _State.CLOSED, rest
            return text.rstrip(_BREAKS) + self.push("")
        clear = len(text[: len(text) - held_suffix(text, self._close)].rstrip(_BREAKS))
        self._held = text[clear:]
        return text[:clear]
