"""Separates a model's reasoning from its response, character by character.

Reasoning can only come first: either the end of the prompt has opened it, or the output begins with the opening marker.
Markers inside the response are text. Reasoning that is cut off stays reasoning.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from cortex.neuron.families.family import ReasoningMarkers
from cortex.neuron.text.stops import held_suffix
from cortex.neuron.text.tokenizer.detokenizer import Detokenizer


class _TagState(Enum):
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
        self._state = _TagState.BEGINNING
        self._held = ""

    def push(self, text: str) -> str:
        """The text that certainly belongs to the response."""
        self._held += text
        match self._state:
            case _TagState.BEGINNING:
                return self._begin()
            case _TagState.OPENED:
                return self._skip_breaks(_TagState.INSIDE)
            case _TagState.CLOSED:
                return self._skip_breaks(_TagState.OUTSIDE)
            case _TagState.INSIDE:
                return self._inside()
            case _TagState.OUTSIDE:
                held, self._held = self._held, ""
                return held

    def finish(self) -> str:
        """The held-back text, after the last push."""
        held, self._held = self._held, ""
        return held

    def _begin(self) -> str:
        stripped = self._held.lstrip()
        if stripped.startswith(self._open):
            self._state, self._held = _TagState.OPENED, stripped[len(self._open) :]
            return self.push("")
        if self._open.startswith(stripped):
            return ""
        self._state = _TagState.OUTSIDE
        return self.push("")

    def _skip_breaks(self, following: _TagState) -> str:
        self._held = self._held.lstrip(_BREAKS)
        if not self._held:
            return ""
        self._state = following
        return self.push("")

    def _inside(self) -> str:
        text, close, rest = self._held.partition(self._close)
        if close:
            self._state, self._held = _TagState.CLOSED, rest
            return text.rstrip(_BREAKS) + self.push("")
        clear = len(text[: len(text) - held_suffix(text, self._close)].rstrip(_BREAKS))
        self._held = text[clear:]
        return text[:clear]


_BREAKS: Final = "\r\n"


class OutputPiece(NamedTuple):
    """Some text, and whether it is reasoning."""

    is_reasoning: bool
    text: str


class _State(Enum):
    BEGINNING = auto()
    """Only white space so far: reasoning may open."""
    OPENED = auto()
    """In reasoning without text yet: line breaks and a repeated opening marker are layout."""
    REASONING = auto()
    CLOSED = auto()
    """After the reasoning, before the response: line breaks are layout."""
    RESPONDING = auto()


class ReasoningSplitter:
    """Splits one output. Owned by one request. The joined pieces do not depend on how the text was split.

    Line breaks next to the markers are layout and are removed, because templates strip them from earlier turns.
    """

    def __init__(self, markers: ReasoningMarkers, *, starts_in_reasoning: bool) -> None:
        self._markers = markers
        self._response_tags = None if markers.response_tags is None else ResponseTags(markers.response_tags)
        self._state = _State.OPENED if starts_in_reasoning else _State.BEGINNING
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        return self._state in (_State.OPENED, _State.REASONING)

    @property
    def is_over(self) -> bool:
        """Whether no reasoning can follow."""
        return self._state in (_State.CLOSED, _State.RESPONDING)

    def push(self, text: str) -> list[OutputPiece]:
        if self._state is _State.RESPONDING and self._response_tags is None:
            return [OutputPiece(False, text)]
        self._held += text
        if self._state is _State.REASONING and self._markers.close[0] not in self._held:  # nearly all reasoning
            clear = self._held.rstrip(_BREAKS)
            self._held = self._held[len(clear) :]
            return [OutputPiece(True, clear)] if clear else []
        pieces: list[OutputPiece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[OutputPiece]:
        """The held-back text, after the last push."""
        held, self._held = self._held, ""
        match self._state:
            case _State.OPENED:
                held = held.strip(_BREAKS)
            case _State.CLOSED:
                held = held.lstrip(_BREAKS)
            case _State.REASONING:
                held = held.rstrip(_BREAKS)
            case _:
                pass
        if self._response_tags is not None and not self.is_thinking:
            held = self._response_tags.push(held) + self._response_tags.finish()
        return [OutputPiece(self.is_thinking, held)] if held else []

    def _step(self, pieces: list[OutputPiece]) -> bool:
        """Emits the certain part of the held text; true if the state changed and there may be more."""
        match self._state:
            case _State.BEGINNING:
                return self._begin(_State.OPENED, otherwise=_State.RESPONDING, layout=None)
            case _State.OPENED:
                return self._begin(_State.OPENED, otherwise=_State.REASONING, layout=_BREAKS)
            case _State.REASONING:
                return self._reason(pieces)
            case _State.CLOSED:
                self._held = self._held.lstrip(_BREAKS)
                if not self._held:
                    return False
                self._state = _State.RESPONDING
                return True
            case _State.RESPONDING:
                text, self._held = self._held, ""
                if self._response_tags is not None:
                    text = self._response_tags.push(text)
                if text:
                    pieces.append(OutputPiece(False, text))
                return False

    def _begin(self, opened: _State, *, otherwise: _State, layout: str | None) -> bool:
        """Removes an opening marker, or decides that there is none. Without `layout`, white space is kept."""
        marker = self._markers.open
        stripped = self._held.lstrip()
        if stripped.startswith(marker):
            self._held = stripped[len(marker) :]
            self._state = opened
            return True
        if marker.startswith(stripped):  # also after only white space
            return False
        if layout is not None:
            self._held = self._held.lstrip(layout)
        self._state = otherwise
        return True

    def _reason(self, pieces: list[OutputPiece]) -> bool:
        reasoning, close, rest = self._held.partition(self._markers.close)
        if close:
            reasoning = reasoning.rstrip(_BREAKS)
            if reasoning:
                pieces.append(OutputPiece(True, reasoning))
            self._held = rest
            self._state = _State.CLOSED
            return True
        clear = len(reasoning) - held_suffix(reasoning, self._markers.close)
        clear = len(reasoning[:clear].rstrip(_BREAKS))
        if clear:
            pieces.append(OutputPiece(True, reasoning[:clear]))
            self._held = reasoning[clear:]
        return False


class ThinkingReader(Protocol):
    """Reads a response, and knows whether it is reasoning."""

    @property
    def is_thinking(self) -> bool: ...

    @property
    def is_over(self) -> bool: ...

    def push(self, text: str) -> object: ...


class ReasoningWatch:
    """Tracks whether one choice is still reasoning, token by token from its first. Owned by one request."""

    def __init__(self, detokenizer: Detokenizer, splitter: ThinkingReader) -> None:
        self._detokenizer = detokenizer
        self._splitter = splitter

    def push(self, token: int) -> None:
        if text := self._detokenizer.push((token,)):
            self._splitter.push(text)

    @property
    def is_thinking(self) -> bool:
        return self._splitter.is_thinking

    @property
    def is_over(self) -> bool:
        """Whether the response has begun, so that no reasoning can follow."""
        return self._splitter.is_over


def opens_reasoning(generation_prompt: str, markers: ReasoningMarkers) -> bool:
    """Whether the end of the prompt leaves the model inside reasoning."""
    return generation_prompt.rfind(markers.open) > generation_prompt.rfind(markers.close)


def closes_reasoning(generation_prompt: str, markers: ReasoningMarkers) -> bool:
    """Whether the end of the prompt has finished, perhaps empty, reasoning: the response begins at once."""
    return not opens_reasoning(generation_prompt, markers) and markers.close in generation_prompt
