"""Constraints of a harmony response: they apply to its last message only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from cortex.neuron.text.grammar.matcher import Matcher
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.output import harmony
from cortex.neuron.text.preparation import prepare
from cortex.neuron.text.template.prompt import NO_RULES
from cortex.wire.requests import GenerateRequest, OutputFormat, Thinking, ToolChoice

from ..conftest import load_text, write_model
from .drawing import SAID, SCHEMA, TOOLS

ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
BERN = '{"city": "Bern", "days": 3}'
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{BERN}"
IN_ROLE = f" to=functions.get_weather<|channel|>commentary json<|message|>{BERN}"
OTHER = '<|channel|>commentary to=functions.set_flag<|message|>{"on": true}'
JSON = OutputFormat(kind="json_schema", param="response_format", schema=SCHEMA)


@pytest.fixture(scope="module")
def directory(backend: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in harmony.MARKERS])
    return write_model(tmp_path_factory.mktemp("harmony"), tokenizer, "harmony")


@pytest.fixture(scope="module")
def model(directory: Path) -> TextModel:
    return load_text(directory)


@pytest.fixture(scope="module")
def matcher(directory: Path) -> Matcher:
    return Matcher(directory, 512)


def accepts(matcher: Matcher, model: TextModel, grammar: str | None, text: str) -> bool:
    """Whether `text` is a whole response of the grammar."""
    assert grammar is not None
    state = matcher.compile(grammar)
    for token in model.encode(text):
        try:
            state.accept(token)
        except Exception:  # noqa: BLE001 - the library names no error
            return False
    return state.is_accepting


def request(**options: Any) -> GenerateRequest:
    return GenerateRequest(model="m", messages=SAID, **options)


@pytest.mark.parametrize(
    ("asked", "allowed", "forbidden"),
    [
        (request(output=JSON), [FINAL + BERN, ANALYSIS + FINAL + BERN], [BERN, FINAL + "x", PREAMBLE + FINAL + BERN]),
        (
            request(output=JSON, tools=TOOLS),
            [FINAL + BERN, ANALYSIS + CALL, OTHER],
            [FINAL + "x", PREAMBLE + FINAL + BERN],
        ),
        (
            request(tools=TOOLS, tool_choice=ToolChoice(mode="required")),
            [CALL, IN_ROLE, ANALYSIS + ANALYSIS + IN_ROLE, OTHER],
            [FINAL + "x", ANALYSIS, CALL.replace("Bern", "Rome"), PREAMBLE + CALL],
        ),
        (request(tools=TOOLS, tool_choice=ToolChoice(mode="named", name="get_weather")), [CALL], [OTHER]),
        (request(tools=TOOLS, tool_choice=ToolChoice(mode="none")), [PREAMBLE + FINAL + "x"], [CALL, IN_ROLE]),
    ],
)
def test_constraint_applies_to_the_last_message(
    matcher: Matcher, model: TextModel, asked: GenerateRequest, allowed: list[str], forbidden: list[str]
) -> None:
    grammar = model.grammar(asked)
    for text in allowed:
        assert accepts(matcher, model, grammar, text), text
    for text in forbidden:
        assert not accepts(matcher, model, grammar, text), text


def test_after_a_budget_of_reasoning_the_model_answers_or_calls(matcher: Matcher, model: TextModel) -> None:
    thinking = Thinking(enabled=True, budget_tokens=20)
    free = prepare(model, request(thinking=thinking, tools=TOOLS), NO_RULES)
    assert free.grammar is None
    for text in (FINAL + "x", PREAMBLE + CALL, CALL.replace("Bern", "Rome")):
        assert accepts(matcher, model, free.response_grammar, text), text
    assert not accepts(matcher, model, free.response_grammar, ANALYSIS + FINAL + "x")
    fixed = prepare(model, request(thinking=thinking, output=JSON), NO_RULES)
    assert accepts(matcher, model, fixed.response_grammar, FINAL + json.dumps({"city": "Bern", "days": 3}))
    assert not accepts(matcher, model, fixed.response_grammar, FINAL + "x")
    assert model.decode(model.reasoning_end) == "<|end|><|start|>assistant"
    assert prepare(model, request(tools=TOOLS), NO_RULES).response_grammar is None
