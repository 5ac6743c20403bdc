"""Schemas that are rejected, and the parts of schemas that no grammar expresses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cortex.neuron.text.errors import GrammarRejected
from cortex.neuron.text.grammar.closed_objects import closed
from cortex.neuron.text.grammar.matcher import Matcher
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.prompt import PromptRules
from cortex.wire.errors import InvalidValue
from cortex.wire.fields.constraints import unenforced_parts
from cortex.wire.requests import OutputFormat, Tool, ToolChoice

from .drawing import FAMILIES, TOOLS, draw, request


def test_rejects_a_grammar_that_takes_too_long_to_compile(make_model: Any) -> None:
    asked = request(output=OutputFormat(kind="choice", choices=("a", "b")))
    with pytest.raises(InvalidValue, match=r"0 s to compile .text\.max_grammar_cpu_s"):
        make_model("chatml").grammar(asked, PromptRules(max_grammar_cpu_s=0))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"output": OutputFormat(kind="json_schema", schema={"type": "objekt"})}, "objekt"),
        ({"output": OutputFormat(kind="regex", text="(a")}, "unclosed group"),
        ({"output": OutputFormat(kind="regex")}, "empty"),
        ({"output": OutputFormat(kind="grammar", text="start: missing")}, "missing"),
        ({"output": OutputFormat(kind="choice")}, "at least one"),
        ({"tool_choice": ToolChoice(mode="required")}, "no tools"),
        ({"tools": TOOLS, "tool_choice": ToolChoice(mode="named", name="nope")}, "get_weather, set_flag"),
    ],
)
def test_rejects_what_cannot_be_enforced_with_the_reason(make_model: Any, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidValue, match=word):
        make_model("qwen3").grammar(request(**fields))


def test_odd_tool_schemas_are_accepted(make_model: Any) -> None:
    odd = {
        "type": "object",
        "properties": {"at": {"type": "string", "format": "unheard-of"}},
        "unevaluatedItems": False,
    }
    asked = request(tools=(Tool(name="f", parameters=odd),), tool_choice=ToolChoice(mode="required"))
    for family in FAMILIES:
        assert make_model(family).grammar(asked)


@pytest.mark.parametrize("depth", [200, 5000])
def test_rejects_a_schema_nested_too_deeply(make_model: Any, depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(InvalidValue):
        make_model("qwen3").grammar(request(output=OutputFormat(kind="json_schema", schema=schema)))


LOOKING = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": r"^(?=.*\d)[a-z0-9]+$", "maxLength": 4},
        "pattern": {"type": "string", "pattern": r"^[(?=!]x$"},
        "either": {"anyOf": [{"type": "string", "pattern": r"^\bno\b$"}, {"const": {"pattern": "(?=x)"}}]},
    },
    "required": ["code", "pattern", "either"],
    "additionalProperties": False,
}


def test_enforces_a_schema_without_the_patterns_that_no_grammar_expresses(matchers: Matcher, make_model: Any) -> None:
    model = make_model("chatml")
    asked = request(output=OutputFormat(kind="json_schema", schema=LOOKING))
    assert unenforced_parts(asked) == (
        "schema.properties.code.pattern",
        "schema.properties.either.anyOf[0].pattern",
    )
    value = json.loads(draw(matchers, model, model.grammar(asked), seed=1))
    assert set(value) == {"code", "pattern", "either"}
    assert len(value["code"]) <= 4
    assert re.fullmatch(r"[(?=!]x", value["pattern"])


@pytest.mark.parametrize("pattern", [r"(a)\1", r"(?<!x)y", r"(?P<n>a)(?P=n)", r"a\B", r"a(?!b)"])
def test_names_patterns_of_forced_tools_that_are_not_enforced(make_model: Any, pattern: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    tools = (Tool(name="f", parameters=parameters),)
    forced = request(tools=tools, tool_choice=ToolChoice(mode="required"))
    assert unenforced_parts(forced) == ("tools.f.parameters.properties.a.pattern",)
    assert make_model("hermes").grammar(forced)
    assert unenforced_parts(request(tools=tools)) == ()


@pytest.mark.parametrize("pattern", [r"^\p{L}+$", r"a\\b", r"[\]\1]", r"(?:x|y)", r"\d{2,3}", r"(?i)abc"])
def test_enforces_patterns_that_a_grammar_expresses(pattern: str) -> None:
    asked = request(output=OutputFormat(kind="json_schema", schema={"type": "string", "pattern": pattern}))
    assert unenforced_parts(asked) == ()


def test_enforces_what_frameworks_send_without_the_keywords_that_no_grammar_expresses(
    matchers: Matcher, make_model: Any
) -> None:
    """As pydantic writes sets, paths and unions. A property may have the name of such a keyword."""
    pet = {"type": "object", "properties": {"kind": {"const": "pet"}}, "required": ["kind"]}
    car = {"type": "object", "properties": {"kind": {"const": "car"}}, "required": ["kind"]}
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "not": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2},
            "format": {"type": "string", "format": "path", "maxLength": 3},
            "thing": {"oneOf": [{"$ref": "#/$defs/pet"}, car], "discriminator": {"propertyName": "kind"}},
            "either": {"oneOf": [{"const": "a"}, {"enum": ["a", "b"]}]},
            "one": {"oneOf": [{"type": "integer", "format": "int32"}, {"type": "boolean"}]},
        },
        "required": ["not", "format", "thing", "either", "one"],
        "additionalProperties": False,
        "$defs": {"pet": pet},
    }
    asked = request(output=OutputFormat(kind="json_schema", schema=schema))
    assert unenforced_parts(asked) == (
        "schema.properties.not.uniqueItems",
        "schema.properties.format.format",
        "schema.properties.either.oneOf",
    )
    model = make_model("chatml")
    for seed in range(3):
        value = json.loads(draw(matchers, model, model.grammar(asked), seed=seed))
        assert set(value) == set(schema["required"])
        assert len(value["not"]) <= 2
        assert value["thing"]["kind"] in ("pet", "car")
        assert value["either"] in ("a", "b")
        assert isinstance(value["one"], int)


B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
A = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "written", "not_written"),
    [
        (B, '{"b": 2}', '{"b": 2, "c": 3}'),
        ({"properties": {"a": B}}, '{"a": {"b": 2}}', '{"a": {"b": 2, "c": 3}}'),
        ({"type": "array", "items": B}, '[{"b": 2}]', '[{"b": 2, "c": 3}]'),
        ({"$defs": {"i": B}, "$ref": "#/$defs/i"}, '{"b": 2}', '{"b": 2, "c": 3}'),
        ({"anyOf": [A, B]}, '{"b": 2}', '{"b": 2, "c": 3}'),
        ({"type": "object", "properties": {}}, "{}", '{"c": 3}'),
        ({"type": "object", "properties": {"additionalProperties": B}}, "{}", '{"c": 3}'),
        # what its schema says
        ({"type": "object"}, '{"c": 3}', "[]"),
        ({**B, "additionalProperties": True}, '{"b": 2, "c": 3}', '{"c": 3}'),
        ({**B, "patternProperties": {"^c$": {"type": "integer"}}}, '{"b": 2, "c": 3}', '{"b": 2, "c": "x"}'),
        ({**B, "required": ["b", "c"]}, '{"b": 2, "c": 3}', '{"b": 2}'),
        ({**B, "required": ["b", "c"]}, '{"b": 2, "c": {"d": 1}}', '{"b": 2, "c": 3, "d": 1}'),
        ({"properties": B["properties"]}, '{"b": 2}', "2"),
        ({"properties": B["properties"], "default": {}}, "{}", '{"c": 3}'),
        ({"properties": B["properties"], "enum": [1, {"b": 2}]}, "1", "2"),
        # parts that describe one object together
        ({"allOf": [A, B]}, '{"a": 1, "b": 2}', '{"a": 1, "b": 2, "c": 3}'),
        ({**A, "allOf": [B]}, '{"a": 1, "b": 2}', '{"a": 1, "b": 2, "c": 3}'),
        ({"$defs": {"i": B}, "allOf": [{"$ref": "#/$defs/i"}, A]}, '{"b": 2, "a": 1}', '{"b": 2, "a": 1, "c": 3}'),
        ({"$defs": {"i": B}, "allOf": [{"$ref": "#/$defs/i"}]}, '{"b": 2}', '{"b": 2, "c": 3}'),
        ({"allOf": [{"required": ["b"]}, {"properties": B["properties"]}]}, '{"b": 2}', '{"b": 2, "c": 3}'),
        ({"properties": {"x": {"allOf": [A, A]}, "y": B}}, '{"x": {"a": 1, "c": 3}}', '{"y": {"b": 2, "c": 3}}'),
        ({"$defs": {"i": B}, **A, "$ref": "#/$defs/i"}, '{"a": 1, "b": 2}', '{"a": 1}'),
        ({"type": "object", "allOf": [A, B]}, '{"a": 1, "b": 2}', '{"a": 1}'),
        ({**A, "anyOf": [B, {"required": ["a"]}]}, '{"a": 1, "b": 2}', '{"b": 2}'),
        ({"$defs": {"i": B}, "type": "object", "allOf": [A, {"$ref": "#/$defs/i"}]}, '{"a": 1, "b": 2}', '{"a": 1}'),
    ],
)
def test_object_has_only_the_properties_that_its_schema_lists(
    matchers: Matcher, make_model: Any, schema: dict[str, Any], written: str, not_written: str
) -> None:
    model = make_model("chatml")
    grammar = model.grammar(request(output=OutputFormat(kind="json_schema", schema=schema)))
    assert follows(matchers, model, grammar, written)
    assert not follows(matchers, model, grammar, not_written)


def follows(matchers: Matcher, model: TextModel, grammar: str, text: str) -> bool:
    state = matchers.compile(grammar)
    try:
        for token in model.encode(text):
            state.accept(token)
    except GrammarRejected:
        return False
    return state.is_accepting


def test_joined_parts_do_not_make_a_small_schema_huge() -> None:
    defs: dict[str, Any] = {"d40": {"type": "object", "properties": {"z": {"type": "string"}}}}
    for number in range(40):
        parts = {"allOf": [{"$ref": f"#/$defs/d{number + 1}"}]}
        defs[f"d{number}"] = {"type": "object", "properties": {"x": parts, "y": parts}}
    schema = {"$defs": defs, "$ref": "#/$defs/d0"}
    assert closed(schema) == schema


def test_many_definitions_that_extend_one_are_closed() -> None:
    base = {"type": "object", "properties": {f"b{number}": {"type": "string"} for number in range(20)}}
    own = {"type": "object", "properties": {"a": {"type": "string"}}}
    extended = {f"d{number}": {"allOf": [{"$ref": "#/$defs/base"}, own]} for number in range(100)}
    made = closed({"$defs": {"base": base, **extended}, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in extended]})
    assert all(made["$defs"][name]["additionalProperties"] is False for name in extended)
