"""Hermes JSON: `<tool_call>{"name": "f", "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from cortex.neuron.text.output.detect import TOOL_CALL_CLOSE, TOOL_CALL_OPEN
from cortex.neuron.text.tools.call import CallReader
from cortex.neuron.text.tools.json_call import JSONCallReader


class HermesJSON:
    openings: tuple[str, ...] = (TOOL_CALL_OPEN,)
    bare_openings: tuple[str, ...] = ()
    separators = ""

    def reader(self, opening: str) -> CallReader:  # noqa: ARG002 - there is only one
        return JSONCallReader(names=None, closing=TOOL_CALL_CLOSE)
