"""Tool calls as grammar rules, in each model's own syntax, so that a forced call is exactly what the parser reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cortex.neuron.text.detect import TOOL_CALL_CLOSE, TOOL_CALL_OPEN, ToolSyntax
from cortex.neuron.text.lark import LarkGrammar, literal
from cortex.neuron.text.tools.qwen_xml import FUNCTION_CLOSE, FUNCTION_OPEN, PARAMETER_CLOSE, PARAMETER_OPEN
from cortex.wire.requests import Tool


def add_calls(grammar: LarkGrammar, kind: ToolSyntax, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Add rules for one call of one of `tools`, or several in a row; returns the rule's name."""
    calls = [_add_call(grammar, kind, tool) for tool in tools]
    one = grammar.rule("call", " | ".join(calls))
    # Only the marked syntaxes can tell where one call ends and the next begins.
    if parallel and kind in (ToolSyntax.HERMES_JSON, ToolSyntax.QWEN_XML):
        return grammar.rule("calls", f'{one} ("\\n" {one})*')
    return one


def _add_call(grammar: LarkGrammar, kind: ToolSyntax, tool: Tool) -> str:
    if kind is ToolSyntax.QWEN_XML:
        function = _xml_function(grammar, tool)
        return grammar.rule("tool", f"{_wrapped(grammar, function)}")
    arguments = grammar.json({"type": "object", **tool.parameters}, lenient=True)
    key = "parameters" if kind is ToolSyntax.LLAMA_JSON else "arguments"
    name = literal('{"name": ' + literal(tool.name) + f', "{key}": ')
    body = f"{name} {arguments} {literal('}')}"
    return grammar.rule("tool", _wrapped(grammar, body) if kind is ToolSyntax.HERMES_JSON else body)


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
