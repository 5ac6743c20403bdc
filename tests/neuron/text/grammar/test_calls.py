"""Forced and forbidden calls in every syntax: what the grammar allows, the parser reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from cortex.neuron.families.registry import SYNTAXES
from cortex.neuron.families.tool_calls import ToolSyntax
from cortex.neuron.text.grammar.matcher import Matcher
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.output import harmony
from cortex.neuron.text.template.chat_template import CHATML
from cortex.wire.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from cortex.wire.requests import GenerateRequest, Message, Text, Tool, ToolChoice

from ..conftest import load_text, write_model
from ..syntax_names import S
from ..syntax_templates import MENTIONS, template_of
from .drawing import draw

CONTROL = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<arg_key>",
    "</arg_key>",
    "<|channel>",
    "<channel|>",
    *harmony.MARKERS,
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Zürich"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "on": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (Tool(name="get_weather", parameters=SCHEMA), Tool(name="stop", parameters={}))


@pytest.fixture(scope="module")
def directory(backend: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the markers are control tokens of this vocabulary, others are spelled out."""
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL])
    return write_model(tmp_path_factory.mktemp("syntaxes"), tokenizer, None)


@pytest.fixture(scope="module")
def matcher(directory: Path) -> Matcher:
    return Matcher(directory, 512)


def load(directory: Path, syntax: ToolSyntax) -> TextModel:
    (directory / "chat_template.jinja").write_text(template_of(syntax))
    return load_text(directory)


def request(mode: Any, *, parallel: bool = True) -> GenerateRequest:
    said = (Message(role="user", parts=(Text(text="x"),)),)
    return GenerateRequest(model="m", messages=said, tools=TOOLS, tool_choice=ToolChoice(mode=mode, parallel=parallel))


@pytest.mark.parametrize("syntax", MENTIONS)
@pytest.mark.parametrize(("seed", "parallel"), [(0, True), (1, True), (2, False)])
def test_forced_call_is_always_parsed(
    directory: Path, matcher: Matcher, syntax: ToolSyntax, seed: int, parallel: bool
) -> None:
    model, asked = load(directory, syntax), request("required", parallel=parallel)
    text = draw(matcher, model, model.grammar(asked) or "", seed)
    parser = model.parser(asked, model.render(asked))
    events = parser.push(text) + parser.finish()
    assert not [event for event in events if isinstance(event, TextDelta)], text
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = [json.loads(event.arguments) for event in events if isinstance(event, ToolCallDelta)]
    assert names
    assert parallel or len(names) == 1
    for name, given in zip(names, arguments, strict=True):
        if name == "get_weather":
            assert given["city"] in ("Bern", "Zürich")
            assert isinstance(given["days"], int)
            assert isinstance(given.get("on", True), bool)
        else:
            assert name == "stop"


@pytest.mark.parametrize("syntax", [each for each in SYNTAXES.values() if each.frame], ids=str)
def test_without_a_choice_no_call_can_be_written(directory: Path, matcher: Matcher, syntax: ToolSyntax) -> None:
    model = load(directory, syntax)
    text = draw(matcher, model, model.grammar(request("none")) or "", 1, tools=())
    assert syntax.frame is not None
    assert syntax.frame.opening not in text


@pytest.mark.parametrize(("tools", "shown"), [(TOOLS, "[TOOL_CALLS]f[ARGS]{}"), ((), "f{}")])
def test_control_tokens_of_calls_are_hidden_where_no_calls_are_read(
    directory: Path, tools: tuple[Tool, ...], shown: str
) -> None:
    model = load(directory, S.MISTRAL)
    asked = GenerateRequest(model="m", tools=tools)
    assert model.detokenizer(asked).push(model.encode("[TOOL_CALLS]f[ARGS]{}<|im_end|>")) == shown


def test_reasoning_marker_that_only_begins_with_a_token_is_read(directory: Path, matcher: Matcher) -> None:
    (directory / "chat_template.jinja").write_text(CHATML + "{# <|channel>thought <channel|> #}")
    model = load_text(directory)
    asked = request("required")
    text = "<|channel>thought\nhm\n<channel|>"
    state = matcher.compile(model.grammar(asked) or "")
    for token in model.encode(text):
        state.accept(token)
    assert model.detokenizer(asked).push(model.encode(f"{text}<|im_end|>")) == text
    parser = model.parser(asked, model.render(asked))
    assert [event.text for event in parser.push(text) if isinstance(event, ReasoningDelta)] == ["hm"]
