"""Qwen XML: `<tool_call><function=f><parameter=p>value</parameter></function></tool_call>`.

Values are raw text; the tool's schema has their types. Models forget `<tool_call>` around the function, so `<function=`
also opens a call, and `</function>` ends one. The arguments are streamed as JSON: text as it is written, other values
once they are complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from cortex.neuron.text.output.detect import TOOL_CALL_CLOSE, TOOL_CALL_OPEN
from cortex.neuron.text.output.stops import held_suffix
from cortex.neuron.text.tools.call import NOTHING_YET, CallProgress, CallReader, NotACall
from cortex.neuron.text.tools.values import is_text, schema_of, typed

FUNCTION_OPEN: Final = "<function="
FUNCTION_CLOSE: Final = "</function>"
PARAMETER_OPEN: Final = "<parameter="
PARAMETER_CLOSE: Final = "</parameter>"

_NAME_END: Final = re.compile(r"[>\n<]")


class QwenXML:
    openings: tuple[str, ...] = (TOOL_CALL_OPEN, FUNCTION_OPEN)
    bare_openings: tuple[str, ...] = ()
    separators = ""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: each tool's parameters by its name."""
        self._schemas = schemas

    def reader(self, opening: str) -> CallReader:
        return _Reader(self._schemas, wrapped=opening == TOOL_CALL_OPEN)


class _Reader:
    """Reads the call from the front; holds back only a short part that is not decided yet.

    It is a call once the function's name is followed by a parameter or by its end. A parameter then ends only where a
    next element follows, so that later text cannot make it invalid.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], *, wrapped: bool) -> None:
        self._schemas = schemas
        self._waiting = "" if wrapped else FUNCTION_OPEN
        self._name: str | None = None
        self._value: _TextValue | _WholeValue | None = None
        """The value of the parameter that is being read."""
        self._ready: list[str] = []
        """Argument text for the next progress."""
        self._begun = False
        """Whether the arguments, and with them the name, have been reported."""
        self._closed = False

    def feed(self, text: str) -> CallProgress:
        self._waiting += text
        had_begun = self._begun
        while not self._closed and self._advance():
            pass
        arguments, self._ready = "".join(self._ready), []
        name = self._name if self._begun and not had_begun else None
        return CallProgress(name, arguments, self._rest() if self._closed else None)

    def finish(self) -> CallProgress:
        """A complete function whose closing marker was cut off is still a call."""
        if not self._begun:
            raise NotACall
        return CallProgress(rest="") if self._closed else NOTHING_YET

    def _rest(self) -> str | None:
        """The text after the call; None until it is certain whether a closing marker follows."""
        try:
            end = _marker(self._waiting, TOOL_CALL_CLOSE)
        except NotACall:  # the function is complete; models also forget this marker
            return self._waiting
        return None if end is None else end.rest

    def _advance(self) -> bool:
        """Reads the next element; false if it is incomplete."""
        if self._value is not None:
            return self._read_value(self._value)
        if self._name is None:
            marker = _marker(self._waiting, FUNCTION_OPEN)
            function = marker and _name(marker.rest)
            if function is None:
                return False
            self._name, self._waiting = function
            return True
        element = _next_element(self._waiting)
        if element is None:
            return False
        parameter, self._waiting = element
        if not parameter:
            self._ready.append("}" if self._begun else "{}")
            self._begun = self._closed = True
            return True
        schema = schema_of(self._schemas.get(self._name), parameter)
        self._value = _TextValue() if is_text(schema) else _WholeValue(schema)
        key = json.dumps(parameter, ensure_ascii=False)
        self._ready.append(f"{', ' if self._begun else '{'}{key}: {self._value.opening}")
        self._begun = True
        return True

    def _read_value(self, value: _TextValue | _WholeValue) -> bool:
        """Reads up to the first closing marker that a next element follows: a value may contain the marker."""
        text, close, rest = self._waiting.partition(PARAMETER_CLOSE)
        clear = len(text) if close else len(text) - held_suffix(text, PARAMETER_CLOSE)
        self._ready.append(value.take(text[:clear]))
        self._waiting = self._waiting[clear:]
        if not close:
            return False
        try:
            if _next_element(rest) is None:
                return False
        except NotACall:
            self._ready.append(value.take(close))
        else:
            self._ready.append(value.end())
            self._value = None
        self._waiting = rest
        return True


class _TextValue:
    """A string, streamed. A line break next to each marker is layout."""

    opening = '"'

    def __init__(self) -> None:
        self._is_empty = True
        self._held_break = ""

    def take(self, text: str) -> str:
        if text and self._is_empty:
            self._is_empty = False
            text = text.removeprefix("\n")
        text = self._held_break + text
        clear = text.removesuffix("\n")
        self._held_break = text[len(clear) :]
        return json.dumps(clear, ensure_ascii=False)[1:-1]

    def end(self) -> str:
        return '"'


class _WholeValue:
    """Any other value: its type is known once it is complete."""

    opening = ""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._pieces: list[str] = []

    def take(self, text: str) -> str:
        self._pieces.append(text)
        return ""

    def end(self) -> str:
        text = "".join(self._pieces).removeprefix("\n").removesuffix("\n")
        return json.dumps(typed(text, self._schema), ensure_ascii=False)


class _Found(NamedTuple):
    text: str
    rest: str


def _next_element(text: str) -> _Found | None:
    """The name of the next parameter, or "" for the function's end; None while it is incomplete."""
    marker = _marker(text, PARAMETER_OPEN, FUNCTION_CLOSE)
    if marker is None:
        return None
    return _Found("", marker.rest) if marker.text == FUNCTION_CLOSE else _name(marker.rest)


def _marker(text: str, *markers: str) -> _Found | None:
    """One of `markers` after white space; None while it is incomplete; raises NotACall."""
    text = text.lstrip()
    for marker in markers:
        if text.startswith(marker):
            return _Found(marker, text[len(marker) :])
    if any(marker.startswith(text) for marker in markers):
        return None
    raise NotACall


def _name(text: str) -> _Found | None:
    """A name up to `>`; None if the text ends before it; raises NotACall."""
    found = _NAME_END.search(text)
    if found is None:
        return None
    name = text[: found.start()].strip()
    if found.group() != ">" or not name:
        raise NotACall
    return _Found(name, text[found.end() :])
