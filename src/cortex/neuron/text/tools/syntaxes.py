"""The syntax for each kind of tool call."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.neuron.families.tool_calls import ToolSyntax
from cortex.neuron.text.tools.call import CallSyntax
from cortex.neuron.text.tools.json_call import MarkedJSON, NamedSyntax, NameLine, PlainJSON, PythonTagJSON
from cortex.neuron.text.tools.pythonic import PythonicSyntax
from cortex.neuron.text.tools.tags import TagSyntax
from cortex.neuron.text.tools.unquoted import UnquotedSyntax
from cortex.wire.requests import Tool


def call_syntax(syntax: ToolSyntax, tools: Sequence[Tool]) -> CallSyntax:
    """The syntax for calls of these tools. Harmony has none: `output/harmony.py` reads its messages."""
    names = [tool.name for tool in tools]
    schemas = {tool.name: tool.parameters for tool in tools}
    if syntax.tags is not None:
        return TagSyntax(syntax.tags, schemas)
    if syntax.kind == "plain":
        return PlainJSON(schemas)
    if syntax.kind == "python_tag":
        return PythonTagJSON(schemas)
    if syntax.frame is None:
        assert syntax.named is not None, f"{syntax} has neither a frame nor a name"
        return NameLine(syntax.named, names)
    if syntax.named is not None:
        return NamedSyntax(syntax.named, syntax.frame, names)
    if syntax.kind == "python":
        return PythonicSyntax(syntax.frame, schemas)
    if syntax.kind == "unquoted":
        return UnquotedSyntax(syntax.frame)
    return MarkedJSON(syntax.frame, names)
