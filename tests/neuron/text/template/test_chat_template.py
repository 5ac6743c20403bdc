"""Templates of each family against the reference library's rendering of the same conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cortex.neuron.text.defaults import GenerationDefaults
from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.call_form import CallForm, call_form
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.wire.errors import InvalidValue, TemplateRenderFailed, UnsupportedModality
from cortex.wire.requests import (
    GenerateRequest,
    Image,
    Message,
    Reasoning,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)

from ..conftest import TEMPLATES, load_text, write_model

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where? <é>"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = (
    Tool(name="get_weather", description="The weather & more", parameters=WEATHER),
    Tool(name="stop", parameters={}),
)
REFERENCE_TOOLS: list[dict[Any, Any] | Callable[..., Any]] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather & more", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


def said(role: str, text: str) -> Message:
    return Message(role=role, parts=(Text(text=text),))  # type: ignore[arg-type]


ARGUMENTS = {"city": "Zürich <&>", "days": 3}
CALLING = Message(
    role="assistant",
    parts=(
        Reasoning(text="I need\nthe tool."),
        ToolCall(id="call_1", name="get_weather", arguments=json.dumps(ARGUMENTS)),
    ),
)
ANSWERED = Message(role="tool", parts=(ToolResult(call_id="call_1", parts=(Text(text='{"t": 21}'),)),))

REFERENCE_CALLING = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I need\nthe tool.",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}],
}
REFERENCE_ANSWERED = {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": '{"t": 21}'}

PLAIN = ([said("user", " Hi ✓ ")], [{"role": "user", "content": " Hi ✓ "}])
SYSTEM = (
    [said("system", "Be <brief>."), said("user", "a"), said("assistant", "b"), said("user", "c")],
    [
        {"role": "system", "content": "Be <brief>."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ],
)
AGENT = (
    [said("system", "S"), said("user", "Weather?"), CALLING, ANSWERED],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Weather?"},
        REFERENCE_CALLING,
        REFERENCE_ANSWERED,
    ],
)
NEXT_TURN = (
    [*AGENT[0], said("assistant", "21 degrees"), said("user", "Thanks")],
    [*AGENT[1], {"role": "assistant", "content": "21 degrees"}, {"role": "user", "content": "Thanks"}],
)
LATE_SYSTEM = (
    [said("user", "a"), said("system", "S"), said("user", "b")],
    [{"role": "user", "content": "a"}, {"role": "system", "content": "S"}, {"role": "user", "content": "b"}],
)


def reference(backend: Tokenizer, family: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=(TEMPLATES / f"{family}.jinja").read_text(),
    )


CASES = [
    *(
        (family, chat, False)
        for family in ("chatml", "llama3", "qwen3", "qwen_xml", "hermes")
        for chat in (PLAIN, SYSTEM)
    ),
    *((family, chat, False) for family in ("chatml", "llama3", "qwen3", "hermes") for chat in (LATE_SYSTEM,)),
    *(
        (family, chat, True)
        for family in ("llama3", "qwen3", "qwen_xml", "hermes")
        for chat in (PLAIN, AGENT, NEXT_TURN)
    ),
]


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize(("family", "chat", "with_tools"), CASES)
def test_conversation_renders_like_the_reference(
    backend: Tokenizer, make_model: Any, family: str, chat: Any, with_tools: bool, thinking: bool | None
) -> None:
    messages, plain = chat
    request = GenerateRequest(
        model="m",
        messages=tuple(messages),
        tools=TOOLS if with_tools else (),
        thinking=Thinking(enabled=thinking),
    )
    switch: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    tools = REFERENCE_TOOLS if with_tools else None
    theirs = reference(backend, family)
    expected = theirs.apply_chat_template(plain, tools=tools, tokenize=False, add_generation_prompt=True, **switch)
    rendered = make_model(family).render(request)
    assert rendered.text == expected
    ids = theirs.apply_chat_template(plain, tools=tools, add_generation_prompt=True, return_dict=False, **switch)
    assert list(rendered.ids) == ids


def test_demo_models_template_renders_like_the_reference(backend: Tokenizer, demo_model: Path) -> None:
    model = load_text(demo_model)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=model.template.source)
    for messages, plain in (PLAIN, SYSTEM):
        expected = theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        assert model.render(GenerateRequest(model="m", messages=tuple(messages))).text == expected


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen3", "hermes"])
@pytest.mark.parametrize("ending", ["So far", "So far, "])
def test_final_message_is_continued_like_in_the_reference(
    backend: Tokenizer, make_model: Any, family: str, ending: str
) -> None:
    request = GenerateRequest(
        model="m",
        messages=(said("user", "Go"), said("assistant", ending)),
        template_args={"continue_final_message": True},
    )
    plain = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": ending}]
    expected = reference(backend, family).apply_chat_template(plain, tokenize=False, continue_final_message=True)
    assert make_model(family).render(request).text == expected


def test_extra_template_arguments_reach_the_template(make_model: Any) -> None:
    request = GenerateRequest(
        model="m", messages=(said("user", "x"),), template_args={"add_generation_prompt": False, "unknown": [1]}
    )
    assert make_model("qwen3").render(request).text == "<|im_start|>user\nx<|im_end|>\n"


def test_template_argument_cannot_replace_the_conversation(make_model: Any) -> None:
    request = GenerateRequest(model="m", messages=(said("user", "x"),), template_args={"messages": []})
    with pytest.raises(InvalidValue, match="messages"):
        make_model("qwen3").render(request)


def test_thinking_is_passed_under_every_name(make_model: Any) -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }} {{ thinking_budget }}")
    model = make_model("chatml")
    shown = TextModel(model.tokenizer, template, template, model.generation)
    thinking = Thinking(enabled=True, effort="high", budget_tokens=99)
    request = GenerateRequest(model="m", messages=(said("user", "x"),), thinking=thinking)
    assert shown.render(request).text == "True True high 99"


@pytest.mark.parametrize(
    ("family", "messages", "reason"),
    [
        ("llama3", [said("user", "x"), Message(role="assistant", parts=CALLING.parts * 2)], "single tool-calls"),
        ("qwen_xml", [Message(role="assistant", parts=(ToolCall(id="1", name="f", arguments="not json"),))], "mapping"),
    ],
)
def test_template_error_has_the_templates_own_reason(
    make_model: Any, family: str, messages: list[Message], reason: str
) -> None:
    with pytest.raises(TemplateRenderFailed, match=reason):
        make_model(family).render(GenerateRequest(model="m", messages=tuple(messages), tools=TOOLS))


@pytest.mark.parametrize("source", ["{% if %}", "{{ none + 'x' }}", "{{ messages[7].role + 1 }}", "{{ 1 / 0 }}"])
def test_broken_template_is_an_error_without_fallback(make_model: Any, source: str) -> None:
    model = make_model("chatml")
    broken = TextModel(model.tokenizer, ChatTemplate(source), ChatTemplate(source), model.generation)
    with pytest.raises(TemplateRenderFailed):
        broken.render(GenerateRequest(model="m", messages=(said("user", "x"),)))


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ dict.__init__.__globals__ }}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_template_cannot_leave_its_sandbox(make_model: Any, source: str) -> None:
    with pytest.raises(TemplateRenderFailed):
        ChatTemplate(source).render({"messages": []})


def test_rejects_images_in_any_position(make_model: Any) -> None:
    picture = Image(url="data:image/png;base64,AA==")
    result = Message(role="tool", parts=(ToolResult(call_id="1", parts=(picture,)),))
    for message in (Message(role="user", parts=(Text(text="see"), picture)), result):
        with pytest.raises(UnsupportedModality, match="image"):
            make_model("qwen3").render(GenerateRequest(model="m", messages=(said("user", "x"), message)))


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
    model = TextModel(make_model("chatml").tokenizer, template, template, GenerationDefaults())
    text = model.render(GenerateRequest(model="m", messages=(said("user", "x"),), tools=TOOLS)).text
    assert text.startswith("user:You can call functions.")
    assert text.endswith("tags.\n\nx|")


def test_rejects_calls_that_the_template_would_drop(make_model: Any) -> None:
    template = ChatTemplate("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    model = TextModel(make_model("chatml").tokenizer, template, template, GenerationDefaults())
    with pytest.raises(UnsupportedModality, match="tool calls"):
        model.render(GenerateRequest(model="m", messages=(said("user", "x"), CALLING)))


@pytest.mark.parametrize("family", ["qwen3", "llama3", "chatml", "qwen_xml"])
def test_prompt_says_that_a_tool_reported_an_error(make_model: Any, family: str) -> None:
    def rendered(*, is_error: bool) -> str:
        result = ToolResult(call_id="c1", parts=(Text(text="disk full"),), is_error=is_error)
        messages = (said("user", "x"), CALLING, Message(role="tool", parts=(result,)))
        return str(make_model(family).render(GenerateRequest(model="m", messages=messages, tools=TOOLS)).text)

    assert "The tool reported an error:" not in rendered(is_error=False)
    text = rendered(is_error=True).encode().decode("unicode_escape")
    assert "The tool reported an error:\ndisk full" in text


def test_tool_arguments_that_are_not_json_are_rendered_unchanged(make_model: Any) -> None:
    broken = Message(role="assistant", parts=(ToolCall(id="1", name="f", arguments='{"a": '),))
    text = make_model("qwen3").render(GenerateRequest(model="m", messages=(said("user", "x"), broken))).text
    assert '{"name": "f", "arguments": {"a": }' in text


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


OBJECT, JOINED = "call.function.arguments | tojson", "call.function.arguments + ''"


@pytest.mark.parametrize(
    ("condition", "arguments", "form"),
    [
        ("m.tool_calls", OBJECT, CallForm()),
        ("m.tool_calls and m.content is none", OBJECT, CallForm(None)),
        ("m.tool_calls", JOINED, CallForm("", arguments_as_text=True)),
        ("m.tool_calls and m.content is none", JOINED, CallForm(None, arguments_as_text=True)),
        ("m.tool_calls and m.reasoning_content is not none and m.content.strip() == ''", OBJECT, CallForm()),
    ],
)
def test_calls_have_the_form_that_the_template_shows(
    make_model: Any, condition: str, arguments: str, form: CallForm
) -> None:
    template = ChatTemplate(
        f"{{% for m in messages if {condition} %}}{{% for call in m.tool_calls %}}"
        f"{{{{ call.function.name }}}}: {{{{ {arguments} }}}}{{% endfor %}}{{% endfor %}}"
    )
    model = TextModel(make_model("chatml").tokenizer, template, template, GenerationDefaults())
    text = model.render(GenerateRequest(model="m", messages=(said("user", "x"), CALLING))).text
    assert text.startswith("get_weather: {")
    assert '"days": 3' in text
    assert call_form(template) == form


def test_user_text_blocks_stay_separate_and_assistant_pieces_join(make_model: Any) -> None:
    blocks = (Text(text="a"), Text(text="b"))
    messages = (Message(role="user", parts=blocks), Message(role="assistant", parts=blocks), said("user", "c"))
    text = make_model("qwen3").render(GenerateRequest(model="m", messages=messages)).text
    assert "user\na\nb<|im_end|>" in text
    assert "assistant\nab<|im_end|>" in text


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"chat_template": {"chat_template": "json"}, "tokenizer_config": {"chat_template": "config"}}, "json"),
        ({"tokenizer_config": {"chat_template": "config"}}, "config"),
        ({"tokenizer_config": {"chat_template": [{"name": "default", "template": "listed"}]}}, "listed"),
        ({"tokenizer_config": {"chat_template": [{"name": "tool_use", "template": "only {{ tools }}"}]}}, "only None"),
        ({}, "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_template_is_found_in_each_place(
    backend: Tokenizer, tmp_path: Path, files: dict[str, Any], expected: str
) -> None:
    model = load_text(write_model(tmp_path, backend, None, **files))
    request = GenerateRequest(model="m", messages=(said("user", "x"),))
    assert model.render(request).text == expected
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_text(tmp_path).render(request).text == "file"


def test_second_template_is_used_for_requests_with_tools(backend: Tokenizer, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    model = load_text(write_model(tmp_path, backend, None, tokenizer_config={"chat_template": named}))
    request = GenerateRequest(model="m", messages=(said("user", "x"),))
    assert model.render(request).text == "plain"
    with_tools = GenerateRequest(model="m", messages=(said("user", "x"),), tools=TOOLS)
    assert model.render(with_tools).text == "2 tools"
    assert model.capabilities.tools


def test_rejects_a_template_of_the_wrong_type(backend: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(TextFileMalformed, match="chat_template"):
        load_text(write_model(tmp_path, backend, None, tokenizer_config={"chat_template": 5}))


def test_rejects_a_conversation_without_messages(make_model: Any) -> None:
    with pytest.raises(InvalidValue, match="empty"):
        make_model("qwen3").render(GenerateRequest(model="m"))
