"""Templates of each family against the reference library's rendering of the same conversation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.conversation import CallForm, call_form
from cortex.wire.errors import InvalidValue, TemplateRenderFailed, UnsupportedModality
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.requests import GenerateRequest, Message, PicturePart, Text, Thinking, ToolCall, ToolResult

from ..conftest import TEMPLATES, load_text, write_model
from .conversations import ARGUMENTS, CALLING, TOOLS, WEATHER, said

REFERENCE_TOOLS: list[dict[Any, Any] | Callable[..., Any]] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather & more", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]


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
        ("hermes", [Message(role="tool", parts=(ToolResult(call_id="9", parts=()),))], "require a name key"),
        ("qwen_xml", [Message(role="assistant", parts=(ToolCall(id="1", name="f", arguments="not json"),))], "mapping"),
    ],
)
def test_template_error_has_the_templates_own_reason(
    make_model: Any, family: str, messages: list[Message], reason: str
) -> None:
    with pytest.raises(TemplateRenderFailed, match=reason):
        make_model(family).render(GenerateRequest(model="m", messages=tuple(messages), tools=TOOLS))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("\n{% if %}", "is not valid, in line 2: Expected an expression"),
        ("{{ none + 'x' }}", "rejected this conversation"),
        ("{{ messages[7].role + 1 }}", "rejected this conversation"),
        ("{{ 1 / 0 }}", "rejected this conversation"),
    ],
)
def test_broken_template_is_an_error_without_fallback(make_model: Any, source: str, reason: str) -> None:
    model = make_model("chatml")
    broken = TextModel(model.tokenizer, ChatTemplate(source), ChatTemplate(source), model.generation)
    with pytest.raises(TemplateRenderFailed, match=reason):
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
    picture = PicturePart(width=64, height=64)
    result = Message(role="tool", parts=(ToolResult(call_id="1", parts=(picture,)),))
    for message in (Message(role="user", parts=(Text(text="see"), picture)), result):
        with pytest.raises(UnsupportedModality, match="picture"):
            make_model("qwen3").render(GenerateRequest(model="m", messages=(said("user", "x"), message)))


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
    model = TextModel(make_model("chatml").tokenizer, template, template, SamplingDefaults())
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
