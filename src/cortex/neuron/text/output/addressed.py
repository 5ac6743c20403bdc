"""Separates the messages of a model that addresses each one, as Muse Glimmer does.

` to=self<|message|>…<|eom|><|start|>assistant to=user<|message|>…`: a message to itself is reasoning; those to the user
and to tools are the response, with calls as in any other. Headers are never text. A response without a header is taken
as it is.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

from cortex.neuron.families.family import ADDRESSED
from cortex.neuron.text.output.reasoning import OutputPiece
from cortex.neuron.text.stops import held_suffix

MESSAGE: Final = "<|message|>"
START: Final = "<|start|>"
ROLE: Final = "assistant"
_ENDS: Final = (ADDRESSED.close, START)
_TO_ITSELF: Final = re.compile(r"to=self\s*$")
_RECIPIENT: Final = re.compile(r"to=[^\s<]{0,256}\s*")


class _Part(Enum):
    HEADER = auto()
    REASONING = auto()
    RESPONSE = auto()


class AddressedSplitter:
    """As `ReasoningSplitter`, for addressed messages. Owned by one request."""

    def __init__(self, *, starts_in_reasoning: bool) -> None:
        self._part = _Part.REASONING if starts_in_reasoning else _Part.HEADER
        self._held = ""

    @property
    def is_thinking(self) -> bool:
        return self._part is _Part.REASONING

    @property
    def is_over(self) -> bool:
        """Whether the response has begun."""
        return self._part is _Part.RESPONSE

    def push(self, text: str) -> list[OutputPiece]:
        self._held += text
        pieces: list[OutputPiece] = []
        while self._open() if self._part is _Part.HEADER else self._read(pieces):
            pass
        return pieces

    def finish(self) -> list[OutputPiece]:
        """The held-back text, after the last push."""
        held, self._held = self._held, ""
        is_header = self._part is _Part.HEADER and ("to=" in held or held.strip() in ("", START, ROLE))
        return [] if is_header or not held else [OutputPiece(self.is_thinking, held)]

    def _open(self) -> bool:
        """Reads a header, or decides that there is none; false while that is uncertain."""
        header, marker, rest = self._held.partition(MESSAGE)
        if marker and _may_be_header(header):
            self._part = _Part.REASONING if _TO_ITSELF.search(header) else _Part.RESPONSE
            self._held = rest
            return True
        if _may_be_header(self._held):
            return False
        self._part = _Part.RESPONSE
        return True

    def _read(self, pieces: list[OutputPiece]) -> bool:
        """Emits the body of a message; true if it has ended."""
        ends = [(place, end) for end in _ENDS if (place := self._held.find(end)) >= 0]
        place, end = min(ends, default=(len(self._held) - max(held_suffix(self._held, end) for end in _ENDS), ""))
        if place:
            pieces.append(OutputPiece(self.is_thinking, self._held[:place]))
        self._held = self._held[place + len(end) :]
        if end:
            self._part = _Part.HEADER
        return bool(end)


def _may_be_header(text: str) -> bool:
    """Whether `text` is a header without its end, or may become one."""
    rest = text.lstrip()
    for word in (START, ROLE):
        if word.startswith(rest):
            return True
        rest = rest.removeprefix(word).lstrip()
    rest = rest[: len(rest) - held_suffix(rest, MESSAGE)]
    return "to=".startswith(rest) or _RECIPIENT.fullmatch(rest) is not None
