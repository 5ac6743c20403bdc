"""Output drawn at random from the masks always parses."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer

from cortex.neuron.text.errors import GrammarRejected
from cortex.neuron.text.grammar.matcher import Matcher
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.prompt import PromptRules
from cortex.wire.constraints import unenforced_parts
from cortex.wire.errors import InvalidValue
from cortex.wire.events import TextDelta, ToolCallDelta, ToolCallStart
from cortex.wire.requests import GenerateRequest, Message, OutputFormat, Text, Thinking, Tool, ToolChoice

from ..conftest import id_of, known_id, load_text, write_model

PADDED_VOCABULARY = 512
"""More logits than tokens, as models have."""
FAMILIES = ("llama3", "qwen3", "qwen_xml", "hermes")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (
    Tool(name="get_weather", parameters=SCHEMA),
    Tool(name="set_flag", parameters={"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}),
)
SAID = (Message(role="user", parts=(Text(text="x"),)),)


@pytest.fixture(scope="module")
def matchers(backend: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Matcher:
    return Matcher(write_model(tmp_path_factory.mktemp("matcher"), backend, "qwen3"), PADDED_VOCABULARY)


def allowed(row: numpy.ndarray[Any, numpy.dtype[numpy.int32]]) -> list[int]:
    return [int(i) for i in numpy.flatnonzero(numpy.unpackbits(row.view(numpy.uint8), bitorder="little"))]


def draw(matcher: Matcher, model: TextModel, grammar: str, seed: int, max_tokens: int = 4000) -> str:
    """Sample uniformly from the mask, with a preference for tokens that end it."""
    generator = random.Random(seed)
    state = matcher.compile(grammar)
    row = numpy.zeros(matcher.mask_words, dtype=numpy.int32)
    ids: list[int] = []
    planned: list[int] = []
    closing = [id_of(model.tokenizer, token) for token in ('"', "}", "]", "</think>", "</tool_call>", *"<\n")]
    while len(ids) < max_tokens:
        state.fill_mask(row)
        choices = allowed(row)
        assert choices, "a mask must leave something to choose"
        assert max(choices) < model.vocab_size, "padding must never be chosen"
        if not planned and generator.random() < 0.05:
            planned = model.encode("\n</parameter>\n")  # random draws would never close a raw value
        ends = [i for i in choices if i in model.eos_ids or i in closing]
        token = generator.choice(ends if ends and generator.random() < 0.3 else choices)
        if planned:
            token = planned.pop(0) if planned[0] in choices else token
        state.accept(token)
        if token in model.eos_ids:
            assert state.is_finished
            return model.detokenizer().push(ids)
        ids.append(token)
    pytest.fail(f"no end after {max_tokens} tokens: {model.decode(ids)[-300:]}")


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", messages=SAID, **fields)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", ["chatml", "qwen3", "qwen_xml"])
def test_output_conforms_to_a_json_schema_after_any_reasoning(
    matchers: Matcher, make_model: Any, family: str, seed: int
) -> None:
    model = make_model(family)
    asked = request(output=OutputFormat(kind="json_schema", schema=SCHEMA))
    text = draw(matchers, model, model.grammar(asked) or "", seed)
    parser = model.parser(asked, model.render(asked))
    events = parser.push(text) + parser.finish()
    answer = json.loads("".join(event.text for event in events if isinstance(event, TextDelta)))
    assert answer["city"] in ("Bern", "Zürich")
    assert 1 <= answer["days"] <= 9


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("mode", ["required", "named"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forced_tool_call_is_always_parsed(
    matchers: Matcher, make_model: Any, family: str, mode: Any, parallel: bool, seed: int
) -> None:
    model = make_model(family)
    choice = ToolChoice(mode=mode, name="set_flag" if mode == "named" else None, parallel=parallel)
    asked = request(tools=TOOLS, tool_choice=choice)
    text = draw(matchers, model, model.grammar(asked) or "", seed)
    parser = model.parser(asked, model.render(asked))
    events = parser.push(text) + parser.finish()
    assert not [event for event in events if isinstance(event, TextDelta)], text
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = [json.loads(event.arguments) for event in events if isinstance(event, ToolCallDelta)]
    assert names
    assert parallel or len(names) == 1
    for name, given in zip(names, arguments, strict=True):
        if name == "set_flag":
            assert isinstance(given["on"], bool)
        else:
            assert mode == "required"
            assert given["city"] in ("Bern", "Zürich")
            assert isinstance(given["days"], int)


@pytest.mark.parametrize("seed", range(5))
def test_xml_values_are_any_text_and_optional_parameters_can_be_omitted(
    matchers: Matcher, make_model: Any, seed: int
) -> None:
    model = make_model("qwen_xml")
    schema = {
        "type": "object",
        "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
        "properties": {
            "note": {"type": "string"},
            "at": {"$ref": "#/$defs/point"},
            "tags": {"anyOf": [{"type": "null"}]},
        },
        "required": ["at"],
    }
    asked = request(tools=(Tool(name="pin", parameters=schema),), tool_choice=ToolChoice(mode="required"))
    text = draw(matchers, model, model.grammar(asked) or "", seed)
    parser = model.parser(asked, model.render(asked))
    events = parser.push(text) + parser.finish()
    for event in events:
        if isinstance(event, ToolCallDelta):
            given = json.loads(event.arguments)
            assert len(given["at"]) == 2
            assert given.keys() <= {"note", "at", "tags"}


@pytest.mark.parametrize("seed", range(5))
def test_with_tools_and_a_format_the_response_is_either(matchers: Matcher, make_model: Any, seed: int) -> None:
    model = make_model("hermes")
    asked = request(tools=TOOLS, output=OutputFormat(kind="json_schema", schema=SCHEMA))
    text = draw(matchers, model, model.grammar(asked) or "", seed)
    parser = model.parser(asked, model.render(asked))
    events = parser.push(text) + parser.finish()
    if not any(isinstance(event, ToolCallStart) for event in events):
        assert json.loads(text)["city"]


@pytest.mark.parametrize(
    ("output", "fits"),
    [
        (OutputFormat(kind="json_object"), lambda text: isinstance(json.loads(text), dict)),
        (OutputFormat(kind="json_schema"), lambda text: isinstance(json.loads(text), dict)),
        (OutputFormat(kind="regex", text=r"\d{3}/[a-c]+é"), lambda text: re.fullmatch(r"\d{3}/[a-c]+é", text)),
        (
            OutputFormat(kind="choice", choices=("ja", 'nein "doch"', "vielleicht\n")),
            lambda text: text[:2] in "ja ne vi",
        ),
        (OutputFormat(kind="grammar", text='start: "a" B+\nB: /[xy]/'), lambda text: re.fullmatch("a[xy]+", text)),
        (OutputFormat(kind="grammar", text='root ::= "a" [xy]+'), lambda text: re.fullmatch("a[xy]+", text)),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_output_conforms_to_every_kind_of_format(
    matchers: Matcher, make_model: Any, output: OutputFormat, fits: Any, seed: int
) -> None:
    model = make_model("chatml")
    assert fits(draw(matchers, model, model.grammar(request(output=output)) or "", seed))


def test_output_is_one_of_the_choices(matchers: Matcher, make_model: Any) -> None:
    model = make_model("chatml")
    choices = ("ja", 'nein "doch"', "vielleicht\n", "😀")
    grammar = model.grammar(request(output=OutputFormat(kind="choice", choices=choices)))
    assert {draw(matchers, model, grammar, seed) for seed in range(40)} == set(choices)


def test_thousands_of_choices_can_be_matched(matchers: Matcher, make_model: Any) -> None:
    choices = tuple(f"choice number {number}" for number in range(5000))
    grammar = make_model("chatml").grammar(request(output=OutputFormat(kind="choice", choices=choices)))
    assert draw(matchers, make_model("chatml"), grammar, 1) in choices


def test_rejects_a_grammar_that_takes_too_long_to_compile(make_model: Any) -> None:
    asked = request(output=OutputFormat(kind="choice", choices=("a", "b")))
    with pytest.raises(InvalidValue, match=r"0 s to compile .text\.max_grammar_cpu_s"):
        make_model("chatml").grammar(asked, PromptRules(max_grammar_cpu_s=0))


def test_reasoning_is_allowed_only_if_the_model_reasons(matchers: Matcher, make_model: Any) -> None:
    row = numpy.zeros(matchers.mask_words, dtype=numpy.int32)

    def may_start_with(family: str, token: str, enabled: bool | None) -> bool:
        model = make_model(family)
        output = OutputFormat(kind="json_object")
        grammar = model.grammar(request(output=output, thinking=Thinking(enabled=enabled)))
        matchers.compile(grammar).fill_mask(row)
        return id_of(model.tokenizer, token) in allowed(row)

    assert may_start_with("qwen3", "<think>", None)
    assert may_start_with("qwen3", "{", None)
    assert not may_start_with("qwen3", "<think>", False)
    assert may_start_with("qwen_xml", "</think>", None)  # the prompt has opened reasoning
    assert may_start_with("qwen_xml", "a", None)
    assert not may_start_with("qwen_xml", "a", False)
    assert not may_start_with("chatml", "<think>", None)


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["hermes", "qwen_xml"])
def test_markers_without_a_token_are_spelled_out(backend: Tokenizer, tmp_path: Path, family: str, seed: int) -> None:
    described = json.loads(backend.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["special"]]
    without = Tokenizer.from_str(json.dumps(described))
    path = write_model(tmp_path, without, family)
    model = load_text(path)
    assert id_of(model.tokenizer, "<tool_call>") is None
    asked = request(tools=TOOLS, tool_choice=ToolChoice(mode="required"), thinking=Thinking(enabled=False))
    text = draw(Matcher(path, PADDED_VOCABULARY), model, model.grammar(asked) or "", seed)
    parser = model.parser(asked, model.render(asked))
    events = parser.push(text) + parser.finish()
    assert text.startswith("<tool_call>\n")
    assert isinstance(events[0], ToolCallStart)
    assert not [event for event in events if isinstance(event, TextDelta)]


def test_reasoning_ends_at_a_spelled_out_closing_marker(backend: Tokenizer, tmp_path: Path) -> None:
    described = json.loads(backend.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["special"]]
    path = write_model(tmp_path, Tokenizer.from_str(json.dumps(described)), "qwen_xml")
    model = load_text(path)
    state = Matcher(path, PADDED_VOCABULARY).compile(
        model.grammar(request(output=OutputFormat(kind="json_object"))) or ""
    )
    for token in model.encode('so < </thin </think>\n\n{"a": 1}'):
        state.accept(token)
    assert state.is_finished


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


def test_unconstrained_output_has_no_grammar(make_model: Any) -> None:
    assert make_model("qwen3").grammar(request(tools=TOOLS)) is None


def test_masks_are_written_into_torch_tensors(matchers: Matcher, make_model: Any) -> None:
    grammar = make_model("chatml").grammar(request(output=OutputFormat(kind="json_object")))
    rows = torch.zeros((3, matchers.mask_words), dtype=torch.int32)
    state = matchers.compile(grammar)
    state.fill_mask(rows[1])
    expected = numpy.zeros(matchers.mask_words, dtype=numpy.int32)
    state.fill_mask(expected)
    assert (rows[1].numpy() == expected).all()
    assert not rows[0].any()
    assert not rows[2].any()
    with pytest.raises(ValueError, match="words"):
        state.fill_mask(expected[1:])


def test_finished_output_allows_only_end_tokens(matchers: Matcher, make_model: Any) -> None:
    model = make_model("chatml")
    state = matchers.compile(model.grammar(request(output=OutputFormat(kind="choice", choices=("a",)))))
    assert (state.is_finished, state.is_accepting) == (False, False)
    state.accept(known_id(model.tokenizer, "a"))
    assert state.is_accepting
    row = numpy.zeros(matchers.mask_words, dtype=numpy.int32)
    state.fill_mask(row)
    assert set(allowed(row)) == set(model.eos_ids)
    assert state.is_finished


def test_rejects_a_token_outside_the_mask(matchers: Matcher, make_model: Any) -> None:
    model = make_model("chatml")
    state = matchers.compile(model.grammar(request(output=OutputFormat(kind="json_object"))))
    with pytest.raises(GrammarRejected, match="does not fit"):
        state.accept(known_id(model.tokenizer, "a"))
    with pytest.raises(GrammarRejected, match="does not compile"):
        matchers.compile("start: nothing_here")


def test_rejects_a_vocabulary_larger_than_the_model(backend: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(GrammarRejected, match="belongs to the model"):
        Matcher(write_model(tmp_path, backend, "chatml"), 100).compile('start: "a"')


def test_demo_models_vocabulary_compiles_grammars(demo_model: Path) -> None:
    model = load_text(demo_model)
    matcher = Matcher(demo_model, model.vocab_size)
    grammar = model.grammar(request(output=OutputFormat(kind="json_schema", schema=SCHEMA)))
    assert json.loads(draw(matcher, model, grammar or "", seed=1))["city"]


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


def test_call_of_a_model_without_tools_in_its_template_is_forced(matchers: Matcher, make_model: Any) -> None:
    model = make_model("chatml")
    asked = request(tools=TOOLS, tool_choice=ToolChoice(mode="named", name="get_weather"))
    parser = model.parser(asked, model.render(asked))
    events = parser.push(draw(matchers, model, model.grammar(asked), seed=2)) + parser.finish()
    (start,) = [event for event in events if isinstance(event, ToolCallStart)]
    arguments = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    assert start.name == "get_weather"
    assert set(json.loads(arguments)) == {"city", "days"}


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


def test_compiling_a_grammar_again_gives_an_independent_state(matchers: Matcher, backend: Tokenizer) -> None:
    grammar = 'start: "ab" | "ba"'
    vocabulary = backend.get_vocab()
    a, b = vocabulary["a"], vocabulary["b"]
    first, second = matchers.compile(grammar), matchers.compile(grammar)
    first.accept(a)
    second.accept(b)
    third = matchers.compile(grammar)
    row = numpy.zeros(matchers.mask_words, dtype=numpy.int32)
    third.fill_mask(row)
    assert {a, b} <= set(allowed(row))
    first.fill_mask(row)
    assert a not in allowed(row)
