"""The syntax for each kind of tool call."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.neuron.text.output.detect import ToolSyntax
from cortex.neuron.text.tools.call import CallSyntax
from cortex.neuron.text.tools.frame import FRAMES
from cortex.neuron.text.tools.gemma import GemmaSyntax
from cortex.neuron.text.tools.json_syntax import LlamaJSON, MarkedJSON, PlainJSON
from cortex.neuron.text.tools.named import NAMED_FORMS, NamedSyntax, NameLine
from cortex.neuron.text.tools.pythonic import PythonicSyntax
from cortex.neuron.text.tools.tags import TAG_FORMS, TagSyntax
from cortex.wire.requests import Tool


def call_syntax(kind: ToolSyntax, tools: Sequence[Tool]) -> CallSyntax:
    """The syntax for calls of these tools. Harmony has none: `output/harmony.py` reads its messages."""
    assert kind is not ToolSyntax.HARMONY
    names = [tool.name for tool in tools]
    schemas = {tool.name: tool.parameters for tool in tools}
    match kind:
        case _ if kind in TAG_FORMS:
            return TagSyntax(TAG_FORMS[kind], schemas)
        case ToolSyntax.NAME_LINE:
            return NameLine(names)
        case _ if kind in NAMED_FORMS:
            return NamedSyntax(kind, names)
        case ToolSyntax.LFM2 | ToolSyntax.OLMO:
            return PythonicSyntax(FRAMES[kind], schemas)
        case ToolSyntax.GEMMA:
            return GemmaSyntax(FRAMES[kind])
        case ToolSyntax.LLAMA_JSON:
            return LlamaJSON(schemas)
        case ToolSyntax.PLAIN_JSON:
            return PlainJSON(schemas)
        case _:
            return MarkedJSON(FRAMES[kind], names)
