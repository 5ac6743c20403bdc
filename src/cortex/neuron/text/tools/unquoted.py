"""Calls with unquoted keys: `<|tool_call>call:f{city:<|"|>Zürich<|"|>,days:3}<tool_call|>`.

The arguments are JSON in which keys have no quotes and `<|"|>` stands for the quotes of strings, whose text is not
escaped. A call is read whole.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from cortex.neuron.families.tool_calls import CallFrame
from cortex.neuron.text.tools.call import NOTHING_YET, Call, CallProgress, CallReader, NotACall, tool_name

QUOTE: Final = '<|"|>'
_HEAD: Final = re.compile(r"\s*(?:call\s*:\s*)?([^\s\[\]{}<>|()]+)\s*(?=\{)")
_BEGINNING: Final = re.compile(r"\s*(?:[^\s\[\]{}<>|()]+\s*){0,3}")
_MAX_HEAD_CHARACTERS: Final = 512
_PIECE: Final = re.compile(r'<\|"\|>(.*?)<\|"\|>|("(?:[^"\\]|\\.)*")|([^\s{}\[\],:"<]+)(?=\s*:)', re.DOTALL)


class UnquotedSyntax:
    bare_openings: tuple[str, ...] = ()
    next_openings: tuple[str, ...] = ()
    separators = ""

    def __init__(self, frame: CallFrame) -> None:
        self._frame = frame
        self.openings: tuple[str, ...] = (frame.opening,)
        self.markers = self.never_text = (*frame.markers, QUOTE)

    def reader(self, opening: str) -> CallReader:  # noqa: ARG002 - there is only one
        return _Reader(self._frame.closing)


class _Reader:
    """Owned by one call of one response."""

    def __init__(self, closing: str) -> None:
        self._closing = closing
        self._text = ""
        self._name: str | None = None

    def feed(self, text: str) -> CallProgress:
        seen = max(0, len(self._text) - len(self._closing))
        self._text += text
        if self._name is None:
            found = _HEAD.match(self._text, 0, _MAX_HEAD_CHARACTERS)
            if found is None:
                if len(self._text) > _MAX_HEAD_CHARACTERS or not _BEGINNING.fullmatch(self._text):
                    raise NotACall
                return NOTHING_YET
            self._name = tool_name(found.group(1))
            self._text = self._text[found.end() :]
            seen = 0
        end = self._text.find(self._closing, seen)
        if end < 0:
            return NOTHING_YET
        call = Call(self._name, _arguments(self._text[:end]))
        return CallProgress(call.name, call.arguments_json, self._text[end + len(self._closing) :])

    def finish(self) -> CallProgress:
        """A call whose closing marker was cut off, for example by a stop string, is complete if its arguments are."""
        try:
            call = Call(self._name or "", _arguments(self._text))
        except NotACall:
            return NOTHING_YET
        return CallProgress(call.name, call.arguments_json, "") if call.name else NOTHING_YET


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(_PIECE.sub(_as_json, text), strict=False)
    except (ValueError, RecursionError) as error:
        raise NotACall from error
    if not isinstance(value, dict):
        raise NotACall
    return value


def _as_json(piece: re.Match[str]) -> str:
    string, quoted, key = piece.groups()
    return quoted or json.dumps(string if string is not None else key)
