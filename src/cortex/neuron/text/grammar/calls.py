"""Tool calls as grammar rules, in each model's own syntax, so that a forced call is exactly what the parser reads; and
the messages of a harmony response, which include its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cortex.neuron.families.tool_calls import CallFrame, NamedForm, TagForm, ToolSyntax
from cortex.neuron.text.grammar.lark import LarkGrammar, literal
from cortex.neuron.text.output.harmony import CHANNEL, CONSTRAIN, END, FUNCTIONS, MARKERS, MESSAGE, START
from cortex.wire.requests import Tool


def add_calls(grammar: LarkGrammar, syntax: ToolSyntax, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Adds rules for one call of one of `tools`, or for several in a row; returns the rule's name."""
    calls = [_add_call(grammar, syntax, tool) for tool in tools]
    one = grammar.rule("call", " | ".join(calls))
    if syntax.frame is None:  # only with markers is it clear where one call ends and the next begins
        return one
    several = f'{one} ("\\n"? {one})*' if parallel else one
    section = [grammar.marker(marker) for marker in syntax.frame.section]
    return grammar.rule("calls", " ".join([*section[:1], several, *section[1:]])) if parallel or section else one


def add_free_response(
    grammar: LarkGrammar, syntax: ToolSyntax, frame: CallFrame, tools: Sequence[Tool], *, parallel: bool
) -> str:
    """Adds rules for any text in which a call of one of `tools` follows each marker; returns the rule's name.

    `frame`: that of the syntax. Unless `parallel`, the response ends with its first call.
    """
    bodies = " | ".join(_body(grammar, syntax, tool) for tool in tools)
    rest = grammar.rule("rest", _closed(grammar, frame, f"({bodies})"))
    call = f"{grammar.text_until(frame.opening)} {rest}"
    text = grammar.text_without(frame.opening)
    return grammar.rule("free", f"({call})* {text}" if parallel else f"{text} | {call}")


def _add_call(grammar: LarkGrammar, syntax: ToolSyntax, tool: Tool) -> str:
    body = _body(grammar, syntax, tool)
    if syntax.frame is not None:
        body = f"{grammar.marker(syntax.frame.opening)} {_closed(grammar, syntax.frame, body)}"
    return grammar.rule("tool", body)


def _closed(grammar: LarkGrammar, frame: CallFrame, body: str) -> str:
    """The rest after the opening."""
    before, after = ([literal(layout)] if layout else [] for layout in (frame.before, frame.after))
    closing = [grammar.marker(frame.closing)] if frame.closing else []
    return " ".join([*before, body, *after, *closing])


def _body(grammar: LarkGrammar, syntax: ToolSyntax, tool: Tool) -> str:
    if syntax.tags is not None:
        return _tagged_function(grammar, syntax.tags, tool)
    if syntax.kind == "python":
        return _python_call(grammar, tool)
    arguments = grammar.json({"type": "object", **tool.parameters}, lenient=True)
    if syntax.kind == "named" and syntax.named is not None:
        return " ".join([*_named_head(grammar, syntax.named, tool), arguments])
    if syntax.kind == "unquoted":
        return f"{literal(f'call:{tool.name}')} {arguments}"
    name_key, arguments_key = syntax.keys
    name = literal(f'{{"{name_key}": {literal(tool.name)}, "{arguments_key}": ')
    return f"{name} {arguments} {literal('}')}"


def _named_head(grammar: LarkGrammar, form: NamedForm, tool: Tool) -> list[str]:
    """The part before the arguments."""
    parts = (*form.before, tool.name, *form.between)
    return [grammar.marker(part) if part in form.separators else literal(part) for part in parts]


def _tagged_function(grammar: LarkGrammar, form: TagForm, tool: Tool) -> str:
    required, optional = _parameters(tool)
    parts = []
    for name, schema in (required | optional).items():
        parameter = _tagged_parameter(grammar, form, name, schema, tool.parameters)
        parts.append(parameter if name in required else f"({parameter})?")
    name = literal(f"{form.quote}{tool.name}{form.quote}{form.function_name_close}\n")
    opening = [grammar.marker(form.function_open)] if form.function_open else []
    closing = [grammar.marker(form.function_close)] if form.closing else []
    return " ".join([*opening, name, *parts, *closing])


def _tagged_parameter(
    grammar: LarkGrammar, form: TagForm, name: str, schema: Mapping[str, Any], parameters: Mapping[str, Any]
) -> str:
    choices = schema.get("enum")
    is_choice = isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices)
    is_free = schema.get("type", "string") == "string" and not {"anyOf", "oneOf", "allOf", "$ref"} & schema.keys()
    stated = f' string="{"true" if is_choice or is_free else "false"}"' if form.says_type else ""
    opening = [
        *(grammar.marker(form.parameter_open), literal(f"{form.quote}{name}{form.quote}{stated}")),
        *map(grammar.marker, form.parameter_name_close),
        *([literal(form.value_break)] if form.value_break else []),
    ]
    closing = grammar.marker(form.parameter_close)
    if form.value_break:
        closing = f"{literal(form.value_break)} {closing}"
    if choices and is_choice:
        value = f"({' | '.join(map(literal, choices))}) {closing}"
    elif is_free:
        value = grammar.text_until(f"{form.value_break}{form.parameter_close}")
    else:
        value = f"{_json_value(grammar, schema, parameters)} {closing}"
    return " ".join([*opening, value, literal("\n")])


def _python_call(grammar: LarkGrammar, tool: Tool) -> str:
    """Keyword arguments whose values are JSON, which the parser reads as Python: the required ones, then any others."""
    required, optional = _parameters(tool)
    given, others = (
        [f"{literal(f'{name}=')} {_json_value(grammar, schema, tool.parameters)}" for name, schema in group.items()]
        for group in (required, optional)
    )
    comma = literal(", ")
    if given:
        arguments = f" {comma} ".join(given) + "".join(f" ({comma} {other})?" for other in others)
    else:
        firsts = (
            f"({other}{''.join(f' ({comma} {later})?' for later in others[place:])})"
            for place, other in enumerate(others, start=1)
        )
        arguments = f"({' | '.join(firsts)})?" if others else ""
    return f"{literal(f'{tool.name}(')} {arguments} {literal(')')}"


def _parameters(tool: Tool) -> tuple[dict[str, Mapping[str, Any]], dict[str, Mapping[str, Any]]]:
    """The schemas of the required parameters and of the others."""
    properties = tool.parameters.get("properties")
    names = tool.parameters.get("required")
    names = names if isinstance(names, list) else []
    required: dict[str, Mapping[str, Any]] = {}
    optional: dict[str, Mapping[str, Any]] = {}
    for name, schema in properties.items() if isinstance(properties, Mapping) else ():
        (required if name in names else optional)[name] = schema if isinstance(schema, Mapping) else {}
    return required, optional


def _json_value(grammar: LarkGrammar, schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """A value of a schema that may refer to definitions of all `parameters`."""
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return grammar.json({**definitions, **schema}, lenient=True)


class HarmonyRules:
    """Adds the messages of a harmony response to one grammar (`output/harmony.py` reads them).

    The prompt ends with `<|start|>assistant`. Reasoning and text that announces a call may come first, each as a
    message of its own; the last message is the answer, or a call. The model ends it with a control token.
    """

    def __init__(self, grammar: LarkGrammar) -> None:
        self._grammar = grammar

    def before(self, *, reasons: bool, speaks: bool) -> str:
        """The messages before the last one. `reasons`, `speaks`: whether the model may reason, and write text."""
        channels = [*(["analysis"] if reasons else []), *(["commentary"] if speaks else [])]
        if not channels:
            return ""
        message = self._message(f"({' | '.join(map(literal, channels))})", self._text())
        following = f"{self._grammar.marker(END)} {self._grammar.marker(START)} {literal('assistant')}"
        return f"{self._grammar.rule('earlier', f'{message} {following}')}* "

    def final(self, body: str) -> str:
        """The answer, whose text is `body`."""
        return self._grammar.rule("final", self._message(literal("final"), body))

    def any_final(self) -> str:
        return self.final(self._text())

    def calls(self, tools: Sequence[Tool], *, with_schemas: bool = True) -> str:
        """A call of one of `tools`: its recipient in the channel, or in the role. Without schemas, the arguments are
        any object."""
        grammar = self._grammar
        kind = f"({literal(' ')} {grammar.marker(CONSTRAIN)} {literal('json')} | {literal(' json')})?"
        calls = []
        for tool in tools:
            recipient = literal(f" to={FUNCTIONS}{tool.name}")
            commentary = f"{grammar.marker(CHANNEL)} {literal('commentary')}"
            header = f"({commentary} {recipient} | {recipient} {commentary})"
            schema = tool.parameters if with_schemas else {}
            arguments = grammar.json({"type": "object", **schema}, lenient=True)
            calls.append(grammar.rule("tool", f"{header} {kind} {grammar.marker(MESSAGE)} {arguments}"))
        return grammar.rule("call", " | ".join(calls))

    def _message(self, channel: str, body: str) -> str:
        return f"{self._grammar.marker(CHANNEL)} {channel} {self._grammar.marker(MESSAGE)} {body}"

    def _text(self) -> str:
        return self._grammar.text_without(*MARKERS)
