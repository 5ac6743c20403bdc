"""Tells a model's thoughts from its answer, character by character.

A thought can only come first: either the prompt's tail already opened it, or the answer begins with the opening marker.
Markers inside the answer are text. A thought that is cut off stays a thought.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple

from cortex.neuron.text.output.detect import ReasoningMarkers
from cortex.neuron.text.output.stops import held_suffix

_BREAKS: Final = "\r\n"


class OutputPiece(NamedTuple):
    """Some text, and whether it is thought."""

    is_reasoning: bool
    text: str


class _State(Enum):
    BEGINNING = auto()
    """Nothing but white space so far: a thought may open."""
    OPENED = auto()
    """In a thought that has no text yet: line breaks, and a repeated opening marker, are layout."""
    THINKING = auto()
    CLOSED = auto()
    """After the thought, before the answer: line breaks are layout."""
    ANSWERING = auto()


class ReasoningSplitter:
    """One answer's thought and text. Owned by one request; the joined pieces do not depend on the split.

    Line breaks next to the markers are layout and not given on, as templates strip them when a turn comes back.
    """

    def __init__(self, markers: ReasoningMarkers, *, starts_in_reasoning: bool) -> None:
        self._markers = markers
        self._state = _State.OPENED if starts_in_reasoning else _State.BEGINNING
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        return self._state in (_State.OPENED, _State.THINKING)

    @property
    def is_over(self) -> bool:
        """No thought can come any more."""
        return self._state in (_State.CLOSED, _State.ANSWERING)

    def push(self, text: str) -> list[OutputPiece]:
        self._held += text
        pieces: list[OutputPiece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[OutputPiece]:
        """What was held back when no more text comes."""
        held, self._held = self._held, ""
        match self._state:
            case _State.OPENED:
                held = held.strip(_BREAKS)
            case _State.CLOSED:
                held = held.lstrip(_BREAKS)
            case _State.THINKING:
                held = held.rstrip(_BREAKS)
            case _:
                pass
        return [OutputPiece(self.is_thinking, held)] if held else []

    def _step(self, pieces: list[OutputPiece]) -> bool:
        """Take what is clear from what is held; True if the state changed and there may be more."""
        match self._state:
            case _State.BEGINNING:
                return self._begin(_State.OPENED, otherwise=_State.ANSWERING, layout=None)
            case _State.OPENED:
                return self._begin(_State.OPENED, otherwise=_State.THINKING, layout=_BREAKS)
            case _State.THINKING:
                return self._think(pieces)
            case _State.CLOSED:
                self._held = self._held.lstrip(_BREAKS)
                if not self._held:
                    return False
                self._state = _State.ANSWERING
                return True
            case _State.ANSWERING:
                if self._held:
                    pieces.append(OutputPiece(False, self._held))
                    self._held = ""
                return False

    def _begin(self, opened: _State, *, otherwise: _State, layout: str | None) -> bool:
        """Swallow an opening marker, or decide that none comes. Without `layout` white space is kept."""
        marker = self._markers.open
        stripped = self._held.lstrip()
        if stripped.startswith(marker):
            self._held = stripped[len(marker) :]
            self._state = opened
            return True
        if marker.startswith(stripped):  # also when nothing but white space came
            return False
        if layout is not None:
            self._held = self._held.lstrip(layout)
        self._state = otherwise
        return True

    def _think(self, pieces: list[OutputPiece]) -> bool:
        thought, close, rest = self._held.partition(self._markers.close)
        if close:
            thought = thought.rstrip(_BREAKS)
            if thought:
                pieces.append(OutputPiece(True, thought))
            self._held = rest
            self._state = _State.CLOSED
            return True
        clear = len(thought) - held_suffix(thought, self._markers.close)
        clear = len(thought[:clear].rstrip(_BREAKS))
        if clear:
            pieces.append(OutputPiece(True, thought[:clear]))
            self._held = thought[clear:]
        return False


def opens_reasoning(generation_prompt: str, markers: ReasoningMarkers) -> bool:
    """Whether the prompt's tail leaves the model inside a thought."""
    return generation_prompt.rfind(markers.open) > generation_prompt.rfind(markers.close)


def closes_reasoning(generation_prompt: str, markers: ReasoningMarkers) -> bool:
    """Whether the prompt's tail has a finished, perhaps empty, thought: the model is to answer at once."""
    return not opens_reasoning(generation_prompt, markers) and markers.close in generation_prompt
