"""Conversations, efforts and end tokens of a model that writes harmony."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from cortex.neuron.text.model import TextModel
from cortex.neuron.text.output import harmony
from cortex.neuron.text.template.conversation import CallForm, call_form
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from cortex.wire.errors import InvalidValue
from cortex.wire.events import ReasoningDelta, TextDelta
from cortex.wire.requests import GenerateRequest, Message, Reasoning, Text, Thinking, Tool, ToolCall, ToolResult

from ..conftest import load_text, write_model
from .conversations import TOOLS, said


@pytest.fixture(scope="module")
def directory(backend: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in harmony.MARKERS])
    ends = [tokenizer.token_to_id(text) for text in ("<|return|>", "<|end|>")]
    return write_model(
        tmp_path_factory.mktemp("harmony"), tokenizer, "harmony", generation_config={"eos_token_id": ends}
    )


@pytest.fixture(scope="module")
def model(directory: Path) -> TextModel:
    return load_text(directory)


def rendered(model: TextModel, *messages: Message, **options: Any) -> str:
    return model.render(GenerateRequest(model="m", messages=messages, **options)).text


def result(id: str, text: str) -> Message:
    return Message(role="tool", parts=(ToolResult(call_id=id, parts=(Text(text=text),)),))


def calling(*calls: tuple[str, str], before: tuple[Any, ...] = ()) -> Message:
    parts = (ToolCall(id=id, name=name, arguments='{"n": 1}') for id, name in calls)
    return Message(role="assistant", parts=(*before, *parts))


def test_instructions_of_both_roles_are_the_developers(model: TextModel) -> None:
    messages = (said("system", "Be kind."), said("developer", "Be short."), said("user", "hi"))
    text = rendered(model, *messages, tools=TOOLS)
    assert "<|start|>developer<|message|># Instructions\n\nBe kind.\n\nBe short." in text
    assert "namespace functions {\n// The weather & more\ntype get_weather = (_: {city: string,days: integer,})" in text
    assert "// \ntype stop = (_: {}) => any;" in text
    assert text.endswith("<|start|>user<|message|>hi<|end|><|start|>assistant")


def test_default_of_a_choice_is_text_for_the_template(model: TextModel) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "enum": [1, 2], "default": 2}, "any": True}}
    text = rendered(model, said("user", "x"), tools=(Tool(name="f", parameters=schema),))
    assert "{n: integer // default: 2,any: any,}" in text


def test_each_call_of_a_turn_is_shown_before_its_result(model: TextModel) -> None:
    turn = calling(("1", "get_weather"), ("2", "stop"), before=(Reasoning(text="I look."), Text(text="Wait.")))
    text = rendered(model, said("user", "x"), turn, result("2", "two"), result("1", "one"), said("user", "y"))
    head = "<|channel|>commentary json<|message|>"
    assert text.split("<|start|>")[3:] == [
        "assistant<|channel|>analysis<|message|>I look.\n\nWait.<|end|>",
        f'assistant to=functions.get_weather{head}{{"n": 1}}<|call|>',
        'functions.get_weather to=assistant<|channel|>commentary<|message|>"one"<|end|>',
        f'assistant to=functions.stop{head}{{"n": 1}}<|call|>',
        'functions.stop to=assistant<|channel|>commentary<|message|>"two"<|end|>',
        "user<|message|>y<|end|>",
        "assistant",
    ]
    assert call_form(model.tools_template) == CallForm(takes_several=False, takes_both=False)


def test_results_without_a_call_stay_after_the_calls_of_their_turn(model: TextModel) -> None:
    turn = calling(("1", "get_weather"), ("2", "stop"))
    text = rendered(model, said("user", "x"), turn, result("9", "lost"), result("1", "one"), calling(("3", "stop")))
    order = [text.index(part) for part in ('"one"', "to=functions.stop", '"lost"')]
    assert order == sorted(order)
    assert text.count("<|call|>") == 3


@pytest.mark.parametrize(
    ("thinking", "effort"),
    [
        (Thinking(), "medium"),
        (Thinking(effort="high"), "high"),
        (Thinking(effort="minimal"), "low"),
        (Thinking(effort="none"), "low"),
        (Thinking(effort="xhigh"), "high"),
        (Thinking(enabled=False), "low"),
        (Thinking(enabled=True, budget_tokens=500), "low"),
        (Thinking(enabled=True, budget_tokens=32_000), "high"),
    ],
)
def test_effort_reaches_the_template_as_one_that_the_model_knows(
    model: TextModel, thinking: Thinking, effort: str
) -> None:
    assert f"Reasoning: {effort}\n" in rendered(model, said("user", "x"), thinking=thinking)


def test_built_in_tools_are_rejected_by_name(model: TextModel) -> None:
    with pytest.raises(InvalidValue, match="browser"):
        rendered(model, said("user", "x"), template_args={"builtin_tools": ["browser", "python"]})


def test_a_response_ends_after_the_answer_or_a_call_and_not_after_each_message(directory: Path) -> None:
    tokenizer = LibraryTokenizer.load(directory)
    ends = [tokenizer.backend.id_to_token(i) for i in tokenizer.eos_ids]
    assert set(ends) == {"<|return|>", "<|call|>", "<|im_end|>"}


def test_tokens_of_a_response_become_reasoning_and_text(model: TextModel) -> None:
    request = GenerateRequest(model="m", messages=(said("user", "x"),))
    parser, shown = model.parser(request, model.render(request)), model.detokenizer(request)
    ids = model.encode(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|im_end|>"
    )
    assert parser.push(shown.push(ids)) == [ReasoningDelta(index=0, text="Hm."), TextDelta(index=0, text="Hi")]
    assert model.capabilities.reasoning
    raw = GenerateRequest(model="m", prompt="x")
    assert model.detokenizer(raw).push(ids) == "analysisHm.assistantfinalHi"


def test_the_message_that_is_continued_goes_on_as_text(model: TextModel) -> None:
    messages = (said("user", "x"), said("assistant", "It "))
    arguments = {"continue_final_message": True, "add_generation_prompt": False}
    request = GenerateRequest(model="m", messages=messages, template_args=arguments)
    parser = model.parser(request, model.render(request))
    assert parser.push("rains.") == [TextDelta(index=0, text="rains.")]
