"""`allowed_tools`: the prompt names every tool, and the model may call only some of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy
import pytest
from tokenizers import Tokenizer

from cortex.neuron.text.grammar.lark import LarkGrammar, literal
from cortex.neuron.text.grammar.matcher import Matcher
from cortex.neuron.text.model import TextModel
from cortex.wire.events import TextDelta, ToolCallStart
from cortex.wire.requests import GenerateRequest, Message, OutputFormat, Text, Thinking, Tool, ToolChoice

from ..conftest import write_model

FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
TOOLS = (Tool(name="allowed", parameters=FLAG), Tool(name="forbidden", parameters=FLAG))
CALLS = {
    "hermes": '<tool_call>\n{{"name": "{name}", "arguments": {{"on": true}}}}\n</tool_call>',
    "qwen_xml": "<tool_call>\n<function={name}>\n<parameter=on>\ntrue\n</parameter>\n</function>\n</tool_call>",
}
BARE = '{{"name": "{name}", "parameters": {{"on": true}}}}'


@pytest.fixture(scope="module")
def matchers(backend: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Matcher:
    return Matcher(write_model(tmp_path_factory.mktemp("matcher"), backend, "qwen3"), 512)


def request(mode: Any = "auto", *, parallel: bool = True, **fields: Any) -> GenerateRequest:
    choice = ToolChoice(mode=mode, parallel=parallel, allowed=("allowed",))
    said = (Message(role="user", parts=(Text(text="x"),)),)
    return GenerateRequest(
        model="m", messages=said, tools=TOOLS, tool_choice=choice, thinking=Thinking(enabled=False), **fields
    )


def can_say(matcher: Matcher, model: TextModel, asked: GenerateRequest, text: str) -> bool:
    """Whether the grammar of `asked` allows `text` as the whole output."""
    return lets_pass(matcher, model.grammar(asked) or "", [*model.encode(text), next(iter(model.eos_ids))])


def lets_pass(matcher: Matcher, grammar: str, tokens: list[int]) -> bool:
    state = matcher.compile(grammar)
    row = numpy.zeros(matcher.mask_words, dtype=numpy.int32)
    for token in tokens:
        state.fill_mask(row)
        if not row.view(numpy.uint32)[token // 32] >> (token % 32) & 1:
            return False
        state.accept(token)
    return True


def parsed(model: TextModel, asked: GenerateRequest, text: str) -> tuple[list[str], str]:
    """(names of the calls, text) as a client gets them."""
    parser = model.parser(asked, model.render(asked))
    events = parser.push(text) + parser.finish()
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    return names, "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.parametrize("family", CALLS)
def test_with_auto_only_allowed_tools_can_be_called(matchers: Matcher, make_model: Any, family: str) -> None:
    model, asked = make_model(family), request()
    allowed, forbidden = (CALLS[family].format(name=name) for name in ("allowed", "forbidden"))
    for text in ("", "Hello, I call nothing: {}<\n", allowed, f"Let me see.\n{allowed}", f"{allowed}\n{allowed}"):
        assert can_say(matchers, model, asked, text), text
    for text in (forbidden, f"Let me see.\n{forbidden}", f"{allowed}\n{forbidden}"):
        assert not can_say(matchers, model, asked, text), text
    assert not can_say(matchers, model, request(parallel=False), f"{allowed}\n{allowed}")
    assert parsed(model, asked, f"Let me see.\n{allowed}")[0] == ["allowed"]


@pytest.mark.parametrize("family", CALLS)
def test_restriction_holds_for_markers_without_a_token(
    backend: Tokenizer, make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    described = json.loads(backend.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["special"]]
    without = Tokenizer.from_str(json.dumps(described))
    matcher = Matcher(write_model(tmp_path, without, family), 512)
    monkeypatch.setattr(LarkGrammar, "marker", lambda _, text: literal(text))
    model = make_model(family)
    grammar, end = model.grammar(request()), next(iter(model.eos_ids))

    def passes(text: str) -> bool:
        return lets_pass(matcher, grammar, [*without.encode(text, add_special_tokens=False).ids, end])

    allowed, forbidden = (CALLS[family].format(name=name) for name in ("allowed", "forbidden"))
    assert all(map(passes, ("", "Hello <tool_cal <", allowed, f"Let me see.\n{allowed}", f"{allowed}\n{allowed}")))
    assert not any(map(passes, (forbidden, f"Let me see.\n{forbidden}", f"{allowed}\n{forbidden}")))


@pytest.mark.parametrize("family", CALLS)
def test_required_call_is_of_an_allowed_tool(matchers: Matcher, make_model: Any, family: str) -> None:
    model = make_model(family)
    assert can_say(matchers, model, request("required"), CALLS[family].format(name="allowed"))
    assert not can_say(matchers, model, request("required"), CALLS[family].format(name="forbidden"))


def test_beside_an_output_format_only_allowed_calls_are_offered(matchers: Matcher, make_model: Any) -> None:
    model, asked = make_model("hermes"), request(output=OutputFormat(kind="json_object"))
    assert can_say(matchers, model, asked, "{}")
    assert can_say(matchers, model, asked, CALLS["hermes"].format(name="allowed"))
    assert not can_say(matchers, model, asked, CALLS["hermes"].format(name="forbidden"))


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("parallel", [True, False])
def test_response_can_end_after_an_allowed_call(
    matchers: Matcher, make_model: Any, family: str, parallel: bool
) -> None:
    """Whatever follows the call, the text never has to contain another one."""
    model, asked = make_model(family), request(parallel=parallel)
    allowed = CALLS[family].format(name="allowed")
    assert can_say(matchers, model, asked, f"Let me see.\n{allowed}")
    assert can_say(matchers, model, asked, f"{allowed}\nI wait for it.") is parallel
    state = matchers.compile(model.grammar(asked) or "")
    for token in model.encode(allowed):
        state.accept(token)
    assert state.is_finished is not parallel
    assert state.is_accepting


@pytest.mark.parametrize("family", CALLS)
def test_without_a_choice_no_call_can_be_written(matchers: Matcher, make_model: Any, family: str) -> None:
    model, asked = make_model(family), request("none")
    assert can_say(matchers, model, asked, "Hello: {}<tool")
    assert not can_say(matchers, model, asked, CALLS[family].format(name="allowed"))
    assert not can_say(matchers, model, asked, "See: <tool_call>")
    assert can_say(matchers, model, asked, "<function=allowed>") is (family == "hermes")


def test_disallowed_call_without_markers_is_text(make_model: Any) -> None:
    model, asked = make_model("llama3"), request()
    assert model.grammar(asked) is None
    assert parsed(model, asked, BARE.format(name="allowed")) == (["allowed"], "")
    forbidden = BARE.format(name="forbidden")
    assert parsed(model, asked, forbidden) == ([], forbidden)


def test_prompt_names_every_tool_in_its_place(make_model: Any) -> None:
    """The allowed tools may change from turn to turn; the cached prefix stays valid."""
    model = make_model("hermes")
    free = msgspec.structs.replace(request(), tool_choice=ToolChoice())
    assert model.render(request()) == model.render(free)
    assert model.grammar(free) is None


def test_list_of_all_tools_restricts_nothing(make_model: Any) -> None:
    asked = request()
    everything = ToolChoice(allowed=("allowed", "forbidden"))
    same = GenerateRequest(model="m", messages=asked.messages, tools=TOOLS, tool_choice=everything)
    assert make_model("hermes").grammar(same) is None
