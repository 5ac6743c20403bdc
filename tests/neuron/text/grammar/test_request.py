"""Output drawn at random from the masks always parses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
from tokenizers import Tokenizer

from cortex.neuron.text.grammar.matcher import Matcher
from cortex.wire.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from cortex.wire.requests import OutputFormat, Thinking, Tool, ToolChoice

from ..conftest import id_of, load_text, write_model
from .drawing import FAMILIES, PADDED_VOCABULARY, SCHEMA, TOOLS, allowed, draw, request


@pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("seed", range(3))
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


def test_unconstrained_output_has_no_grammar(make_model: Any) -> None:
    assert make_model("qwen3").grammar(request(tools=TOOLS)) is None


def test_call_of_a_model_without_tools_in_its_template_is_forced(matchers: Matcher, make_model: Any) -> None:
    model = make_model("chatml")
    asked = request(tools=TOOLS, tool_choice=ToolChoice(mode="named", name="get_weather"))
    parser = model.parser(asked, model.render(asked))
    events = parser.push(draw(matchers, model, model.grammar(asked), seed=2)) + parser.finish()
    (start,) = [event for event in events if isinstance(event, ToolCallStart)]
    arguments = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
    assert start.name == "get_weather"
    assert set(json.loads(arguments)) == {"city", "days"}


MUSE = (
    "{{ tools }}{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|eom|>"
    "{% endfor %}<|start|>assistant{% if false %} to=self<|message|><atem:function_calls>{% endif %}"
)


@pytest.mark.parametrize("reasoning", [" to=self<|message|>hm<|eom|><|start|>assistant", ""])
def test_forced_call_of_a_model_that_addresses_messages_has_a_header(
    backend: Tokenizer, tmp_path: Path, reasoning: str
) -> None:
    extended = Tokenizer.from_str(backend.to_str())
    extended.add_special_tokens(["<|start|>", "<|message|>", "<|eom|>"])
    path = write_model(tmp_path, extended, None)
    (path / "chat_template.jinja").write_text(MUSE)
    model = load_text(path)
    asked = request(tools=TOOLS, tool_choice=ToolChoice(mode="named", name="set_flag"))
    call = '<atem:invoke name="set_flag">\n<atem:parameter name="on">true</atem:parameter>\n</atem:invoke>'
    wrapped = f"<atem:function_calls>\n{call}\n</atem:function_calls>"
    ids = model.encode(f"{reasoning} to=set_flag<|message|>{wrapped}")
    state = Matcher(path, PADDED_VOCABULARY).compile(model.grammar(asked) or "")
    for token in (*ids, min(model.eos_ids)):
        state.accept(token)
    assert state.is_finished
    parser = model.parser(asked, model.render(asked))
    events = parser.push(model.detokenizer(asked).push(ids)) + parser.finish()
    assert [event.text for event in events if isinstance(event, ReasoningDelta)] == (["hm"] if reasoning else [])
    assert not [event for event in events if isinstance(event, TextDelta)]
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["set_flag"]
    assert model.reasoning_end == tuple(model.encode("\n<|eom|><|start|>assistant"))
