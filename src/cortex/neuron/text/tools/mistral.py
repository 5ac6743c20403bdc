"""Mistral: `[TOOL_CALLS]name[ARGS]{…}`, one marker for each call. Older models write a list of JSON objects after it.

Models leave out `[ARGS]`, and some write `[CALL_ID]` and an id before it. The arguments are streamed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from cortex.neuron.text.tools.call import NOTHING_YET, CallProgress, CallReader, NotACall, tool_name
from cortex.neuron.text.tools.frame import CallFrame
from cortex.neuron.text.tools.json_object import ObjectScanner
from cortex.neuron.text.tools.json_syntax import MarkedJSON

ARGS: Final = "[ARGS]"
_CALL_ID: Final = "[CALL_ID]"
_MAX_HEAD_CHARACTERS: Final = 512
_NAME: Final = r"\s*([^\s\[\]{}<>|()]+)\s*"
_HEAD: Final = re.compile(_NAME + r"(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_BEGINNING: Final = re.compile(r"\s*|" + _NAME + r"(?:\[[A-Z_]*(?:\]\s*(?:[\w-]*\s*(?:\[[A-Z_]*(?:\]\s*)?)?)?)?)?")


class MistralSyntax(MarkedJSON):
    def __init__(self, frame: CallFrame, tool_names: Iterable[str]) -> None:
        super().__init__(frame, tool_names)
        self.markers = self.never_text = (frame.opening, ARGS, _CALL_ID)

    def reader(self, opening: str) -> CallReader:
        following = super().reader(opening)
        return _Reader(following) if opening == self._frame.opening else following


class _Reader:
    """Owned by one call of one response."""

    def __init__(self, json_reader: CallReader) -> None:
        """`json_reader` reads the call if it is a JSON object or a list of them."""
        self._json_reader = json_reader
        self._is_json = False
        self._head: str | None = ""
        """What precedes the arguments; None once they have begun."""
        self._scanner = ObjectScanner()

    def feed(self, text: str) -> CallProgress:
        if self._is_json:
            return self._json_reader.feed(text)
        if self._head is None:
            return self._read_arguments(text)
        self._head += text
        if self._head.lstrip().startswith(("[", "{")):
            self._is_json = True
            return self._json_reader.feed(self._head)
        if found := _HEAD.match(self._head, 0, _MAX_HEAD_CHARACTERS):
            name, arguments, self._head = tool_name(found.group(1)), self._head[found.end() :], None
            progress = self._read_arguments(arguments)
            return CallProgress(name, progress.arguments, progress.rest)
        if len(self._head) > _MAX_HEAD_CHARACTERS or not _BEGINNING.fullmatch(self._head):
            raise NotACall
        return NOTHING_YET

    def finish(self) -> CallProgress:
        return self._json_reader.finish() if self._is_json else NOTHING_YET

    def _read_arguments(self, text: str) -> CallProgress:
        scanned = self._scanner.feed(text)
        return CallProgress(arguments=scanned.text, rest=None if scanned.end is None else text[scanned.end :])
