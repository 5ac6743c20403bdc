"""The constraints that a request puts on the output, as one grammar for the engine.

Response formats, regular expressions, grammars, choices and forced tool calls, after the reasoning of models that
reason. The grammar is checked here, so that a schema that cannot be enforced is a clear 400 and not a late failure.
The grammar library is imported with the first such request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from cortex.neuron.text.grammar.lark import LarkGrammar, literal
from cortex.neuron.text.output.detect import ReasoningMarkers, ToolSyntax
from cortex.neuron.text.tokenizer.tokenizer import Tokenizer
from cortex.neuron.text.tools.grammar import MARKED, OPENINGS, add_calls, add_free_response
from cortex.wire.errors import InvalidValue, shorten
from cortex.wire.fields.constraints import is_constrained
from cortex.wire.requests import GenerateRequest, OutputFormat, Tool


class LeadingReasoning(Enum):
    """Whether reasoning comes before the constrained output."""

    ABSENT = auto()
    """The response begins at once."""
    POSSIBLE = auto()
    """The model may reason first."""
    OPENED = auto()
    """The prompt has opened reasoning, which the model must close first."""


def build_grammar(
    request: GenerateRequest,
    tokenizer: Tokenizer,
    syntax: ToolSyntax,
    markers: ReasoningMarkers | None,
    reasoning: LeadingReasoning,
    max_characters: int | None = None,
    max_cpu_s: float | None = None,
) -> str | None:
    """The grammar, or None for unconstrained output; raises InvalidValue for what cannot be enforced, and for a grammar
    of more than `max_characters`, or that takes more than `max_cpu_s` to compile."""
    limits = (max_characters, max_cpu_s)
    if not is_constrained(request) or (request.output is None and _parser_suffices(request, syntax)):
        return None
    grammar = LarkGrammar(tokenizer)
    before = _reasoning(grammar, markers, reasoning)
    mode = request.tool_choice.mode
    if mode in ("required", "named"):
        tools = _chosen(request)
        calls = add_calls(grammar, syntax, tools, parallel=request.tool_choice.parallel)
        return _checked(grammar, f"{before}{calls}", "tools", *limits)
    if request.output is None and mode == "none":
        return _checked(grammar, f"{before}{grammar.text_without(*OPENINGS[syntax])}", "tools", *limits)
    if request.output is None:
        free = add_free_response(grammar, syntax, request.callable_tools, parallel=request.tool_choice.parallel)
        return _checked(grammar, f"{before}{free}", "tools", *limits)
    response = _response(grammar, request.output)
    if request.callable_tools and mode == "auto":
        # The client can parse either.
        calls = add_calls(grammar, syntax, request.callable_tools, parallel=request.tool_choice.parallel)
        response = f"({response} | {calls})"
    return _checked(grammar, f"{before}{response}", "response_format", *limits)


def _parser_suffices(request: GenerateRequest, syntax: ToolSyntax) -> bool:
    """Whether the restriction holds without a grammar: if calls have no markers, the output parser treats only JSON
    that names a callable tool as a call, and everything else as text."""
    if request.tool_choice.mode == "none":
        return syntax not in OPENINGS
    return request.tool_choice.mode == "auto" and syntax not in MARKED


def _chosen(request: GenerateRequest) -> tuple[Tool, ...]:
    choice = request.tool_choice
    if not request.tools:
        raise InvalidValue(f"tool_choice is {choice.mode} but the request has no tools; add them", param="tool_choice")
    if choice.mode == "required":
        return request.callable_tools
    named = tuple(tool for tool in request.tools if tool.name == choice.name)
    if not named:
        known = ", ".join(tool.name for tool in request.tools)
        raise InvalidValue(
            f"tool_choice names {shorten(choice.name or '')!r}, but the tools are {shorten(known)}", param="tool_choice"
        )
    return named


def _reasoning(grammar: LarkGrammar, markers: ReasoningMarkers | None, reasoning: LeadingReasoning) -> str:
    if markers is None or reasoning is LeadingReasoning.ABSENT:
        return ""
    rest = f"{grammar.text_until(markers.close)} /\\n{{0,2}}/"
    if reasoning is LeadingReasoning.OPENED:
        return f"{rest} "
    return f"({grammar.marker(markers.open)} {rest})? "


def _response(grammar: LarkGrammar, output: OutputFormat) -> str:
    match output.kind:
        case "json_object":
            return grammar.json({"type": "object"})
        case "json_schema":
            return grammar.json(output.schema if output.schema is not None else {"type": "object"})
        case "regex":
            return grammar.other(_regex(_text(output)))
        case "grammar":
            return grammar.other(_lark(_text(output)))
        case "choice":
            if not output.choices:
                raise InvalidValue("there is nothing to choose from; give at least one choice", param="response_format")
            return grammar.terminal("CHOICE", " | ".join(map(literal, output.choices)))


def _text(output: OutputFormat) -> str:
    if not output.text:
        raise InvalidValue(f"the {output.kind} is empty; give its text", param="response_format")
    return output.text


def _regex(pattern: str) -> Mapping[str, Any]:
    import llguidance

    first: dict[str, Any] = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]
    return {key: value for key, value in first.items() if value is not None}


def _lark(text: str) -> Mapping[str, Any]:
    """From either Lark or GBNF."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return {"lark_grammar": any_to_lark(text)}
    except ValueError as error:
        raise InvalidValue(f"the grammar cannot be read: {shorten(str(error))}", param="response_format") from error


def _checked(grammar: LarkGrammar, start: str, param: str, max_characters: int | None, max_cpu_s: float | None) -> str:
    import llguidance

    try:
        built = grammar.build(start)
    except RecursionError as error:
        raise InvalidValue("the schema is nested too deeply to be enforced; flatten it", param=param) from error
    if max_characters is not None and len(built) > max_characters:
        raise InvalidValue(
            f"the output format is a grammar of {len(built)} characters, at most {max_characters} are allowed on this "
            "node (text.max_grammar_kb in neuron.toml); use fewer choices or a smaller schema",
            param=param,
        )
    began_s = time.thread_time()
    problem = llguidance.LLMatcher.validate_grammar(built)
    if max_cpu_s is not None and time.thread_time() - began_s > max_cpu_s:
        raise InvalidValue(
            f"the output format takes more than {max_cpu_s:g} s to compile (text.max_grammar_cpu_s in neuron.toml); "
            "simplify the schema or the grammar",
            param=param,
        )
    if problem:
        raise InvalidValue(f"the output format cannot be enforced: {shorten(problem.strip())}", param=param)
    return built
