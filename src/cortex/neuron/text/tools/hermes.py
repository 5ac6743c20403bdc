"""Hermes JSON: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from cortex.neuron.text.detect import TOOL_CALL_CLOSE, TOOL_CALL_OPEN
from cortex.neuron.text.tools.call import CallReader, NotACall, Reading, call_from_json
from cortex.neuron.text.tools.json_object import ObjectScanner


class HermesJSON:
    openings: tuple[str, ...] = (TOOL_CALL_OPEN,)
    bare_openings: tuple[str, ...] = ()
    separators = ""

    def reader(self, opening: str) -> CallReader:  # noqa: ARG002 - there is only one
        return _Reader()


class _Reader:
    """White space, an object, white space, the closing marker; anything else is no call."""

    def __init__(self) -> None:
        self._scanner = ObjectScanner()
        self._object: list[str] = []
        self._complete = False
        self._tail = ""

    def feed(self, text: str) -> Reading | None:
        if not self._complete:
            if not self._object:
                text = text.lstrip()
                if not text:
                    return None
                if not text.startswith("{"):
                    raise NotACall
            end = self._scanner.feed(text)
            if end is None:
                self._object.append(text)
                return None
            self._object.append(text[:end])
            self._complete = True
            text = text[end:]
        self._tail = (self._tail + text).lstrip()
        if self._tail.startswith(TOOL_CALL_CLOSE):
            return Reading(call_from_json("".join(self._object)), self._tail[len(TOOL_CALL_CLOSE) :])
        if not TOOL_CALL_CLOSE.startswith(self._tail):
            raise NotACall
        return None

    def finish(self) -> Reading | None:
        """A complete object whose closing marker was cut off, by a stop string say, is still a call."""
        return Reading(call_from_json("".join(self._object)), "") if self._complete else None
