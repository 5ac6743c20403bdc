"""Tool calls as JSON objects: between markers as Hermes writes them, or bare as Llama 3 and models without a syntax do.

A bare object is a call only at the start of the response, and only if it names one of the request's tools; other JSON
is text.
"""

from __future__ import annotations

from collections.abc import Iterable

from cortex.neuron.text.output.detect import PYTHON_TAG, TOOL_CALL_CLOSE, TOOL_CALL_OPEN
from cortex.neuron.text.tools.call import CallReader
from cortex.neuron.text.tools.json_call import JSONCallReader


class HermesJSON:
    """`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`"""

    openings: tuple[str, ...] = (TOOL_CALL_OPEN,)
    bare_openings: tuple[str, ...] = ()
    separators = ""

    def reader(self, opening: str) -> CallReader:  # noqa: ARG002 - there is only one
        return JSONCallReader(names=None, closing=TOOL_CALL_CLOSE)


class PlainJSON:
    """`{"name": "f", "parameters": {…}}`"""

    openings: tuple[str, ...] = ()
    bare_openings: tuple[str, ...] = ("{",)
    separators = ";,"

    def __init__(self, tool_names: Iterable[str]) -> None:
        self._tool_names = frozenset(tool_names)

    def reader(self, opening: str) -> CallReader:
        return JSONCallReader(names=self._tool_names, closing="", begun=opening if opening == "{" else "")


class LlamaJSON(PlainJSON):
    """Plain JSON, and `<|python_tag|>` begins a call anywhere."""

    openings: tuple[str, ...] = (PYTHON_TAG,)
