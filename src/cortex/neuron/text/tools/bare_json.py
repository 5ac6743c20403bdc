"""JSON without markers, `{"name": "f", "parameters": {…}}`: Llama 3, and models without a syntax of their own.

Only an object at the start of the answer that names one of the request's tools is a call; other JSON is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from cortex.neuron.text.detect import PYTHON_TAG
from cortex.neuron.text.tools.call import CallReader, NotACall, Reading, call_from_json
from cortex.neuron.text.tools.json_object import ObjectScanner

_FIRST_KEY: Final = re.compile(r'\s*"([^"\\]*)"')
_UNDECIDED: Final = re.compile(r'\s*("[^"\\]*)?')
_CALL_KEYS: Final = frozenset({"name", "function", "type", "id", "arguments", "parameters"})


class PlainJSON:
    openings: tuple[str, ...] = ()
    bare_openings: tuple[str, ...] = ("{",)
    separators = ";,"

    def __init__(self, tool_names: Iterable[str]) -> None:
        self._tool_names = frozenset(tool_names)

    def reader(self, opening: str) -> CallReader:
        return _Reader(self._tool_names, opened=opening == "{")


class LlamaJSON(PlainJSON):
    """The same, and `<|python_tag|>` before it announces a call anywhere."""

    openings: tuple[str, ...] = (PYTHON_TAG,)


class _Reader:
    def __init__(self, tool_names: frozenset[str], *, opened: bool) -> None:
        self._tool_names = tool_names
        self._scanner = ObjectScanner()
        self._object: list[str] = []
        self._looks_like_call = False
        if opened:
            self._take("{")

    def feed(self, text: str) -> Reading | None:
        if not self._object:
            text = text.lstrip()
            if not text:
                return None
            if not text.startswith("{"):
                raise NotACall
        end = self._take(text)
        if not self._looks_like_call:
            self._check_first_key()
        if end is None:
            return None
        call = call_from_json("".join(self._object))
        if call.name not in self._tool_names:
            raise NotACall
        return Reading(call, text[end:])

    def finish(self) -> Reading | None:
        return None

    def _take(self, text: str) -> int | None:
        end = self._scanner.feed(text)
        self._object.append(text if end is None else text[:end])
        return end

    def _check_first_key(self) -> None:
        """Answers that are JSON themselves should stream: give up at the first key that no call has."""
        body = "".join(self._object)[1:]
        if found := _FIRST_KEY.match(body):
            if found.group(1) not in _CALL_KEYS:
                raise NotACall
            self._looks_like_call = True
        elif not _UNDECIDED.fullmatch(body):
            raise NotACall
