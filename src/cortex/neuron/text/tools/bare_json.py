"""JSON without markers, `{"name": "f", "parameters": {…}}`: Llama 3, and models without a syntax of their own.

Only an object at the start of the response that names one of the request's tools is a call; other JSON is text.
"""

from __future__ import annotations

from collections.abc import Iterable

from cortex.neuron.text.output.detect import PYTHON_TAG
from cortex.neuron.text.tools.call import CallReader
from cortex.neuron.text.tools.json_call import JSONCallReader


class PlainJSON:
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
