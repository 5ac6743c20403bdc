"""The constraints that a request puts on the output, as one grammar for the engine.

Response formats, regular expressions, grammars, choices and forced tool calls, after the reasoning of models that
reason. The grammar is checked here, so that a schema that cannot be enforced is a clear 400 and not a late failure.
The grammar library is imported with the first such request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final

from cortex.neuron.families.family import ADDRESSED, ReasoningMarkers
from cortex.neuron.families.tool_calls import HARMONY, ToolSyntax
from cortex.neuron.text.grammar.calls import HarmonyRules, add_calls, add_free_response
from cortex.neuron.text.grammar.gbnf.reader import GbnfError, defines_a_rule, read_gbnf, to_lark
from cortex.neuron.text.grammar.lark import LarkGrammar, literal
from cortex.neuron.text.grammar.trial import GrammarTrial
from cortex.neuron.text.output.addressed import MESSAGE, ROLE, START
from cortex.neuron.text.template.prompt import PromptRules
from cortex.neuron.text.tools.syntaxes import call_syntax
from cortex.wire.errors import InvalidValue, shorten
from cortex.wire.fields.constraints import is_constrained
from cortex.wire.requests import GenerateRequest, OutputFormat, Tool

_LARK_RULE: Final = re.compile(r"^\s*(?:%\w|[?!]?\w+(?:\.\d+)?(?:\[[^\]]*\])?\s*:(?!:=))", re.MULTILINE)


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
    trial: GrammarTrial,
    syntax: ToolSyntax,
    markers: ReasoningMarkers | None,
    reasoning: LeadingReasoning,
    rules: PromptRules,
) -> str | None:
    """The grammar, or None for unconstrained output. Raises InvalidValue, which names the client's field, for what
    cannot be enforced or breaks `rules`."""
    grammar = LarkGrammar(trial.tokenizer)
    if syntax is HARMONY and request.prompt is None:
        return _harmony(request, grammar, trial, reasoning, rules)
    if not is_constrained(request) or (request.output is None and _parser_suffices(request, syntax)):
        return None
    before = _reasoning(grammar, markers, reasoning)
    choice = request.tool_choice
    if choice.mode in ("required", "named"):
        constrained, param = add_calls(grammar, syntax, _chosen(request), parallel=choice.parallel), "tools"
    elif request.output is not None:
        constrained, param = _response(grammar, request.output), request.output.param
        if request.callable_tools and choice.mode == "auto":
            # The client can parse either. What its format allows is checked on its own, to name the right field.
            _check(grammar, constrained, param, trial, rules)
            calls = add_calls(grammar, syntax, request.callable_tools, parallel=choice.parallel)
            constrained, param = f"({constrained} | {calls})", "tools"
    elif choice.mode == "none":
        constrained, param = grammar.text_without(*call_syntax(syntax, ()).openings), "tools"
    else:
        assert syntax.frame is not None, "otherwise the parser suffices"
        tools, param = request.callable_tools, "tools"
        constrained = add_free_response(grammar, syntax, syntax.frame, tools, parallel=choice.parallel)
    _check(grammar, constrained, param, trial, rules)
    return grammar.build(f"{before}{constrained}")


def _harmony(
    request: GenerateRequest, grammar: LarkGrammar, trial: GrammarTrial, reasoning: LeadingReasoning, rules: PromptRules
) -> str:
    """As `build_grammar`. The client's constraint applies to the body of the last message."""
    messages, choice = HarmonyRules(grammar), request.tool_choice
    is_free = request.output is None and choice.mode in ("auto", "none")
    before = messages.before(reasons=reasoning is not LeadingReasoning.ABSENT, speaks=is_free)
    if choice.mode in ("required", "named"):
        last, param = messages.calls(_chosen(request)), "tools"
    else:
        last, param = messages.any_final(), "tools"
        if request.output is not None:
            body, param = _response(grammar, request.output), request.output.param
            _check(grammar, body, param, trial, rules)
            last = messages.final(body)
        if request.callable_tools and choice.mode == "auto":
            calls = messages.calls(request.callable_tools, with_schemas=is_constrained(request))
            last, param = f"({last} | {calls})", "tools"
    _check(grammar, last, param, trial, rules)
    return grammar.build(f"{before}{last}")


def _parser_suffices(request: GenerateRequest, syntax: ToolSyntax) -> bool:
    """Whether the restriction holds without a grammar: if calls have no markers, the output parser treats only JSON
    that names a callable tool as a call, and everything else as text."""
    if request.tool_choice.mode == "none":
        return syntax is HARMONY or not call_syntax(syntax, ()).openings
    return request.tool_choice.mode == "auto" and syntax.frame is None


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
    if markers is ADDRESSED:
        return _addressed(grammar, reasoning)
    if markers is None or reasoning is LeadingReasoning.ABSENT:
        return ""
    rest = f"{grammar.text_until(markers.close)} /\\n{{0,2}}/"
    if reasoning is LeadingReasoning.OPENED:
        return f"{rest} "
    return f"({grammar.marker(markers.open)} {rest})? "


def _addressed(grammar: LarkGrammar, reasoning: LeadingReasoning) -> str:
    """Messages of the model to itself, and the header of the response, to anyone."""
    message, begin = grammar.marker(MESSAGE), f"{grammar.marker(START)} {literal(ROLE)}"
    header, to_itself = f"/ ?to=[^ <>\\n]{{1,64}}/ {message} ", f"{grammar.text_until(ADDRESSED.close)} {begin}"
    if reasoning is LeadingReasoning.OPENED:
        return f"{to_itself} {header}"
    if reasoning is LeadingReasoning.ABSENT:
        return f"({begin})? {header}"
    return f"(/ ?to=self/ {message} {to_itself})? {header}"


def _response(grammar: LarkGrammar, output: OutputFormat) -> str:
    match output.kind:
        case "json_object":
            return grammar.json({"type": "object"})
        case "json_schema":
            return grammar.json(output.schema if output.schema is not None else {"type": "object"})
        case "regex":
            return grammar.other(_regex(_text(output)))
        case "grammar":
            return grammar.other({"lark_grammar": _lark(_text(output), output.param)})
        case "choice":
            if not output.choices:
                raise _invalid(output.param, "there is nothing to choose from; give at least one choice")
            return grammar.terminal("CHOICE", " | ".join(map(literal, output.choices)))


def _text(output: OutputFormat) -> str:
    if not output.text:
        raise _invalid(output.param, f"the {output.kind} is empty; give its text")
    return output.text


def _regex(pattern: str) -> Mapping[str, Any]:
    import llguidance

    first: dict[str, Any] = json.loads(llguidance.LLMatcher.grammar_from_regex(pattern))["grammars"][0]
    return {key: value for key, value in first.items() if value is not None}


def _lark(text: str, param: str) -> str:
    """The grammar in Lark. `text` is Lark or GBNF. Raises InvalidValue."""
    if not defines_a_rule(text) and _LARK_RULE.search(text):
        return text
    try:
        return to_lark(read_gbnf(text))
    except GbnfError as error:
        raise _invalid(param, str(error)) from error


def _check(grammar: LarkGrammar, start: str, param: str, trial: GrammarTrial, rules: PromptRules) -> None:
    """Raises InvalidValue unless the grammar can be followed from `start` on. The part before it is not the
    client's."""
    try:
        built = grammar.build(start)
    except RecursionError as error:
        raise _invalid(param, "the schema is nested too deeply to be enforced; flatten it") from error
    if rules.max_grammar_characters is not None and len(built) > rules.max_grammar_characters:
        raise _invalid(
            param,
            f"as a grammar it has {len(built)} characters, at most {rules.max_grammar_characters} are allowed on this "
            "node (text.max_grammar_kb in neuron.toml); use fewer choices or a smaller schema",
        )
    verdict = trial.verdict(built)
    if rules.max_grammar_cpu_s is not None and verdict.cpu_s > rules.max_grammar_cpu_s:
        raise _invalid(
            param,
            f"it takes more than {rules.max_grammar_cpu_s:g} s to compile (text.max_grammar_cpu_s in neuron.toml); "
            "simplify the schema or the grammar",
        )
    if verdict.problem is not None:
        raise _invalid(param, f"the output cannot be constrained to it: {shorten(verdict.problem)}")


def _invalid(param: str, problem: str) -> InvalidValue:
    return InvalidValue(f"Invalid value for '{param}': {problem}.", param=param)
