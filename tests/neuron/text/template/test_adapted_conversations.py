"""Conversations that a template has no place for: tools, several system messages, other roles."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cortex.neuron.families.registry import SYNTAXES
from cortex.neuron.families.tool_calls import ToolSyntax
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.literal_content import LiteralContent
from cortex.neuron.text.tools.write import MarkupText, TextPiece
from cortex.wire.errors import TemplateRenderFailed
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.requests import GenerateRequest, Message, Text, ToolCall, ToolChoice, ToolResult

from ..responses import call, parse
from ..syntax_names import S
from ..syntax_templates import MENTIONS
from .conversations import ARGUMENTS, CALLING, TOOLS, said

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}|{% endfor %}"
)


def test_tools_without_a_place_in_the_template_are_described_in_the_system_message(make_model: Any) -> None:
    model = make_model("chatml")
    result = ToolResult(call_id="c1", parts=(Text(text="rain"),))
    history = (said("user", "x"), CALLING, Message(role="tool", parts=(result,)), said("user", "and now?"))
    text = model.render(GenerateRequest(model="m", messages=history, tools=TOOLS)).text
    first, user, assistant, answer, _ = text.split("<|im_start|>")[1:]
    assert first.startswith("system\n")
    assert '"name": "get_weather"' in first
    assert "<tool_call>" in first
    assert user.rstrip() == "user\nx<|im_end|>"
    assert assistant.startswith('assistant\n<tool_call>\n{"name": "get_weather", "arguments": {')
    assert answer.rstrip() == "user\n<tool_response>\nrain\n</tool_response>\nand now?<|im_end|>"
    with_system = GenerateRequest(model="m", messages=(said("system", "Be kind."), *history), tools=TOOLS)
    assert "<|im_start|>system\nBe kind.\n\nYou can call functions." in model.render(with_system).text
    unused = GenerateRequest(model="m", messages=history, tools=TOOLS, tool_choice=ToolChoice(mode="none"))
    assert "get_weather" in model.render(unused).text
    assert "You can call functions." not in model.render(unused).text


def test_tools_are_described_in_the_first_message_of_a_template_without_system_messages(make_model: Any) -> None:
    template = ChatTemplate(NO_SYSTEM)
    model = TextModel(make_model("chatml").tokenizer, template, template, SamplingDefaults())
    text = model.render(GenerateRequest(model="m", messages=(said("user", "x"),), tools=TOOLS)).text
    assert text.startswith("user:You can call functions.")
    assert text.endswith("tags.\n\nx|")


@pytest.mark.parametrize("syntax", [each for each in SYNTAXES.values() if each is not S.HARMONY])
def test_calls_that_a_template_does_not_show_are_written_in_the_syntax_of_the_model(
    make_model: Any, syntax: ToolSyntax
) -> None:
    template = ChatTemplate(
        "{{ tools }}{% if false %}" + MENTIONS[syntax] + "{% endif %}#"
        "{% for m in messages %}{{ m.metadata }}\n{{ m.content }}|{% endfor %}"
    )
    model = TextModel(make_model("chatml").tokenizer, template, template, SamplingDefaults())
    stop = Message(role="assistant", parts=(ToolCall(id="2", name="stop", arguments="{}"),))
    calling = Message(role="assistant", parts=CALLING.parts + stop.parts)
    request = GenerateRequest(model="m", messages=(said("user", "x"), calling), tools=TOOLS)
    text = model.render(request).text.split("#", 1)[1].removeprefix("\nx|").removesuffix("|")
    if syntax is S.NAME_LINE:
        text = text.replace("|", "\n")
    # A template without markers is that of a model which has tokens for Hermes JSON.
    parts = parse([text.lstrip()], S.HERMES_JSON if syntax is S.PLAIN_JSON else syntax)
    assert parts == [call("get_weather", **ARGUMENTS), call("stop")]


def test_markers_of_written_calls_are_control_tokens_and_those_in_their_values_are_not(make_model: Any) -> None:
    template = ChatTemplate("{{ tools }}<|im_start|>{% for m in messages %}{{ m.content }}{% endfor %}")
    model = TextModel(make_model("chatml").tokenizer, template, template, SamplingDefaults())
    pieces = (TextPiece("<|im_start|>", True), TextPiece("<|im_end|>", False))
    spelled = LiteralContent(model.tokenizer.vocabulary, template)
    values = {"messages": [{"content": MarkupText(pieces)}], "tools": None}
    rendered = spelled.render(template.render, values, ())
    assert [rendered.text[place:] for place in rendered.literal_at] == ["<|im_end|>"]


def test_tools_of_a_template_that_only_shows_calls_are_described_in_its_syntax(make_model: Any) -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}"
        "<｜tool▁sep｜>{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}{% endfor %}"
    )
    model = TextModel(make_model("chatml").tokenizer, template, template, SamplingDefaults())
    text = model.render(GenerateRequest(model="m", messages=(said("user", "x"), CALLING), tools=TOOLS)).text
    assert "<｜tool▁call▁begin｜>function_name<｜tool▁sep｜>{}<｜tool▁call▁end｜>" in text
    assert "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{" in text


SEVERAL = (said("developer", "First."), said("developer", "Second."), said("user", "hi"))
LATER = (*SEVERAL[1:], said("assistant", "ho"), said("system", "Later."), said("user", "x"))
SKIPS = (
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content }}|{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }}|{% endfor %}"
)
REFUSES = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only first') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}|{% endfor %}"
)
SHOWS_ALL = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (SHOWS_ALL, SEVERAL, "system:First.|system:Second.|user:hi|"),
        (REFUSES, SEVERAL, "system:First.\n\nSecond.|user:hi|"),
        (SKIPS, SEVERAL, "S:First.\n\nSecond.|user:hi|"),
        (SHOWS_ALL, LATER, "system:Second.|user:hi|assistant:ho|system:Later.|user:x|"),
        (REFUSES, LATER, "system:Second.|user:hi|assistant:ho|user:Later.|user:x|"),
        (SKIPS, LATER, "S:Second.|user:hi|assistant:ho|user:Later.|user:x|"),
    ],
)
def test_every_system_message_reaches_the_model_in_its_place(
    make_model: Any, source: str, messages: tuple[Message, ...], text: str
) -> None:
    model, template = make_model("chatml"), ChatTemplate(source)
    strict = TextModel(model.tokenizer, template, template, model.generation)
    assert strict.render(GenerateRequest(model="m", messages=messages)).text == text


def test_template_without_system_messages_raises_its_own_error(make_model: Any) -> None:
    model = make_model("chatml")
    template = ChatTemplate("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}")
    with pytest.raises(TemplateRenderFailed, match="no system"):
        TextModel(model.tokenizer, template, template, model.generation).render(
            GenerateRequest(model="m", messages=SEVERAL)
        )


def test_several_system_messages_fit_a_template_that_accepts_one(make_model: Any) -> None:
    text = make_model("qwen_xml").render(GenerateRequest(model="m", messages=(*SEVERAL, *LATER[2:]), tools=TOOLS)).text
    assert "First.\n\nSecond." in text
    assert "<|im_start|>user\nLater.<|im_end|>" in text


def test_developer_role_is_system_unless_the_template_knows_it(make_model: Any) -> None:
    request = GenerateRequest(model="m", messages=(said("developer", "D"), said("user", "x")))
    assert make_model("qwen3").render(request).text.startswith("<|im_start|>system\nD<|im_end|>")
    model = make_model("chatml")
    knows = ChatTemplate("{# developer #}{{ messages[0].role }}")
    assert TextModel(model.tokenizer, knows, knows, model.generation).render(request).text == "developer"


NINE = (
    "{% macro check(id) %}{% if id|length != 9 %}{{ raise_exception('not nine') }}{% endif %}{{ id }}{% endmacro %}"
    "{{ tools }}{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }} {{ check(c.id) }}]{{ '' + eos_token }}{% endfor %}"
    "{% elif m.role == 'tool' %}[result of {{ check(m.tool_call_id) }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("call_id", ["call_0123456789abcdef01234567", "c1", "a1b2c3d4e"])
def test_ids_of_calls_fit_a_template_that_accepts_only_nine_characters(make_model: Any, call_id: str) -> None:
    template = ChatTemplate(NINE)
    model = TextModel(make_model("chatml").tokenizer, template, template, SamplingDefaults())
    calling = Message(role="assistant", parts=(ToolCall(id=call_id, name="f", arguments="{}"),))
    result = Message(role="tool", parts=(ToolResult(call_id=call_id, parts=(Text(text="rain"),)),))
    text = model.render(GenerateRequest(model="m", messages=(said("user", "x"), calling, result), tools=TOOLS)).text
    called, answered = re.findall(r"[0-9a-z]{9}(?=\])", text)
    assert called == answered
    assert (called == call_id) is (len(call_id) == 9)
