"""Tool calls as grammar rules, in each model's own syntax, so that a forced call is exactly what the parser reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cortex.neuron.text.grammar.lark import LarkGrammar, literal
from cortex.neuron.text.output.detect import PYTHON_TAG, TOOL_CALL_CLOSE, TOOL_CALL_OPEN, ToolSyntax
from cortex.neuron.text.tools.qwen_xml import FUNCTION_CLOSE, FUNCTION_OPEN, PARAMETER_CLOSE, PARAMETER_OPEN
from cortex.wire.requests import Tool

MARKED = frozenset({ToolSyntax.HERMES_JSON, ToolSyntax.QWEN_XML})
"""Syntaxes in which a call is between markers, anywhere in the response."""
OPENINGS = {
    ToolSyntax.HERMES_JSON: (TOOL_CALL_OPEN,),
    ToolSyntax.QWEN_XML: (TOOL_CALL_OPEN, FUNCTION_OPEN),
    ToolSyntax.LLAMA_JSON: (PYTHON_TAG,),
}
"""What begins a call anywhere in the response."""


def add_calls(grammar: LarkGrammar, kind: ToolSyntax, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Adds rules for one call of one of `tools`, or for several in a row; returns the rule's name."""
    calls = [_add_call(grammar, kind, tool) for tool in tools]
    one = grammar.rule("call", " | ".join(calls))
    # Only with markers is it clear where one call ends and the next begins.
    if parallel and kind in MARKED:
        return grammar.rule("calls", f'{one} ("\\n" {one})*')
    return one


def add_free_response(grammar: LarkGrammar, kind: ToolSyntax, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Adds rules for any text, in which what follows the marker is a call of one of `tools`; returns the rule's name.

    Only for `MARKED` syntaxes. Unless `parallel`, the response ends with its first call.
    """
    bodies = " | ".join(_body(grammar, kind, tool) for tool in tools)
    rest = grammar.rule("rest", f'"\\n" ({bodies}) "\\n" {grammar.marker(TOOL_CALL_CLOSE)}')
    call = f"{grammar.text_until(TOOL_CALL_OPEN)} {rest}"
    text = grammar.text_without(TOOL_CALL_OPEN)
    return grammar.rule("free", f"({call})* {text}" if parallel else f"{text} | {call}")


def _add_call(grammar: LarkGrammar, kind: ToolSyntax, tool: Tool) -> str:
    body = _body(grammar, kind, tool)
    return grammar.rule("tool", _wrapped(grammar, body) if kind in MARKED else body)


def _body(grammar: LarkGrammar, kind: ToolSyntax, tool: Tool) -> str:
    if kind is ToolSyntax.QWEN_XML:
        return _xml_function(grammar, tool)
    arguments = grammar.json({"type": "object", **tool.parameters}, lenient=True)
    key = "parameters" if kind is ToolSyntax.LLAMA_JSON else "arguments"
    name = literal('{"name": ' + literal(tool.name) + f', "{key}": ')
    return f"{name} {arguments} {literal('}')}"


def _wrapped(grammar: LarkGrammar, body: str) -> str:
    return f'{grammar.marker(TOOL_CALL_OPEN)} "\\n" {body} "\\n" {grammar.marker(TOOL_CALL_CLOSE)}'


def _xml_function(grammar: LarkGrammar, tool: Tool) -> str:
    properties = tool.parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = tool.parameters.get("required")
    required = required if isinstance(required, list) else []
    parts = []
    for name, schema in properties.items():
        parameter = _xml_parameter(grammar, name, schema, tool.parameters)
        parts.append(parameter if name in required else f"({parameter})?")
    opening = literal(f"{FUNCTION_OPEN}{tool.name}>\n")
    return " ".join([opening, *parts, literal(FUNCTION_CLOSE)])


def _xml_parameter(grammar: LarkGrammar, name: str, schema: Any, parameters: Mapping[str, Any]) -> str:
    opening, closing = literal(f"{PARAMETER_OPEN}{name}>\n"), f"\n{PARAMETER_CLOSE}\n"
    schema = schema if isinstance(schema, Mapping) else {}
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        value = f"({' | '.join(map(literal, choices))}) {literal(closing)}"
    elif schema.get("type", "string") == "string" and not {"anyOf", "oneOf", "allOf", "$ref"} & schema.keys():
        value = grammar.text_until(closing)
    else:
        definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
        value = f"{grammar.json({**definitions, **schema}, lenient=True)} {literal(closing)}"
    return f"{opening} {value}"
