"""Tool calls as JSON objects: between markers, singly or in a list, or bare.

A bare object is a call only at the start of the response, and only if it names one of the request's tools; other JSON
is text. Models that write bare calls also write a list of Python calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cortex.neuron.families.tool_calls import PYTHON_TAG, CallFrame
from cortex.neuron.text.tools.call import CallReader
from cortex.neuron.text.tools.json_call import JSONCallReader
from cortex.neuron.text.tools.pythonic import PythonCallReader


class MarkedJSON:
    """`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`, or a list of such objects between the markers."""

    bare_openings: tuple[str, ...] = ()
    next_openings: tuple[str, ...] = ("{",)
    separators = ","

    def __init__(self, frame: CallFrame, tool_names: Iterable[str]) -> None:
        self._frame = frame
        self._tool_names = frozenset(tool_names)
        self.openings: tuple[str, ...] = (frame.opening,)
        self.markers = frame.markers
        self.never_text = frame.markers if frame.is_control else ()

    def reader(self, opening: str) -> CallReader:
        if opening == self._frame.opening:
            return JSONCallReader(names=None, closing=self._frame.closing)
        return JSONCallReader(names=self._tool_names, closing=self._frame.closing, begun=opening, in_list=True)


class PlainJSON:
    """`{"name": "f", "parameters": {…}}`, or `[f(a=1), g()]`"""

    openings: tuple[str, ...] = ()
    separators = ";,"
    markers: tuple[str, ...] = ()
    never_text: tuple[str, ...] = ()

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: each tool's parameters by its name."""
        self._schemas = schemas
        self.next_openings = tuple(f"{name}(" for name in schemas)
        self.bare_openings = ("{", *(f"[{call}" for call in self.next_openings))

    def reader(self, opening: str) -> CallReader:
        if opening.endswith("("):
            return PythonCallReader("", self._schemas, opening.removeprefix("["))
        return JSONCallReader(names=self._schemas.keys(), closing="", begun=opening if opening == "{" else "")


class PythonTagJSON(PlainJSON):
    """Plain JSON, and `<|python_tag|>` begins a call anywhere."""

    openings: tuple[str, ...] = (PYTHON_TAG,)
    markers: tuple[str, ...] = (PYTHON_TAG,)
    never_text: tuple[str, ...] = (PYTHON_TAG,)
