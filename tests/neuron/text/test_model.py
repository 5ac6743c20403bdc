"""The text side of a model: from a request to tokens, also between a prefix and a suffix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from cortex.neuron.text.local import text_of_gguf
from cortex.neuron.text.model import TextModel, fill_in_prompt, inspect_text, markers
from cortex.neuron.text.preparation import prepare
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.prompt import PromptRules
from cortex.neuron.weights.errors import CheckpointError
from cortex.wire.errors import ContextLengthExceeded, InvalidValue, UnsupportedModality
from cortex.wire.events import ReasoningDelta, TextDelta, ToolCallStart
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.requests import (
    GenerateRequest,
    Message,
    Reasoning,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)

from .conftest import load_text, write_model

TOOLS = (Tool(name="f", parameters={"type": "object", "properties": {"a": {"type": "integer"}}}),)
SOURCE = Path(__file__).parents[3] / "src"
FAMILIES = ("chatml", "llama3", "qwen3", "qwen_xml", "hermes")


def test_prediction_has_the_limit_of_a_prompt(make_model: Any) -> None:
    text, rules = make_model("qwen3"), PromptRules(max_characters=8)
    fits = GenerateRequest(model="m", prompt="x", prediction="12345678")
    assert prepare(text, fits, rules).prediction == tuple(text.encode("12345678"))
    with pytest.raises(InvalidValue, match=r"text\.max_prompt_mb") as raised:
        prepare(text, GenerateRequest(model="m", prompt="x", prediction="123456789"), rules)
    assert raised.value.param == "prediction"


class _Vocabulary:
    """The part of a tokenizer that knows its control tokens."""

    def __init__(self, *tokens: str) -> None:
        self._ids = {token: index for index, token in enumerate(tokens)}

    def whole_id(self, text: str) -> int | None:
        return self._ids.get(text)


def test_uses_the_tokens_of_the_vocabulary() -> None:
    deepseek: Any = _Vocabulary("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
    assert fill_in_prompt("a", "b", deepseek) == "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"


def test_other_files_come_first_with_the_tokens_for_repositories() -> None:
    files = (("a.py", "x = 1\n"), ("b.py", "y = 2\n"))
    qwen = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    expected = "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>m"
    with_files: Any = _Vocabulary(*qwen, "<|repo_name|>", "<|file_sep|>")
    assert fill_in_prompt("a", "b", with_files, "m", files) == (
        f"<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>b.py\ny = 2\n<|file_sep|>filename\n{expected}"
    )
    without: Any = _Vocabulary(*qwen)
    assert fill_in_prompt("a", "b", without, "m", files) == f"x = 1\n\ny = 2\n\n{expected}"
    assert fill_in_prompt("a", "b", with_files, "m") == expected


def test_model_without_the_tokens_cannot_fill_in() -> None:
    incomplete: Any = _Vocabulary("<fim_prefix>", "<fim_suffix>")
    assert markers(incomplete) is None
    with pytest.raises(UnsupportedModality, match="no tokens for filling in"):
        fill_in_prompt("a", "b", incomplete)


def said(role: str, text: str) -> Message:
    return Message(role=role, parts=(Text(text=text),))  # type: ignore[arg-type]


def ask(*messages: Message, **fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", messages=messages, **fields)


@pytest.mark.parametrize(
    ("family", "tools", "reasoning"),
    [
        ("chatml", True, False),  # by the generic form
        ("llama3", True, False),
        ("qwen3", True, True),
        ("qwen_xml", True, True),
        ("hermes", True, False),
    ],
)
def test_capabilities_are_detected_from_the_template(
    make_model: Any, family: str, tools: bool, reasoning: bool
) -> None:
    capabilities = make_model(family).capabilities
    assert (capabilities.chat, capabilities.tools, capabilities.reasoning) == (True, tools, reasoning)
    assert not capabilities.vision


def test_notes_name_a_missing_template(backend: Tokenizer, tmp_path: Path) -> None:
    model = load_text(write_model(tmp_path, backend, None))
    assert [note.split(":")[0] for note in model.capabilities.notes] == [
        "the model has no chat template",
        "the chat template has no place for tools",
    ]


@pytest.mark.parametrize(
    ("family", "enabled", "expected"),
    [
        ("chatml", None, False),
        ("qwen3", None, False),  # the model opens its reasoning itself
        ("qwen3", False, False),
        ("qwen_xml", None, True),  # the template opens it
        ("qwen_xml", False, False),
    ],
)
def test_end_of_the_prompt_decides_whether_output_starts_in_reasoning(
    make_model: Any, family: str, enabled: bool | None, expected: bool
) -> None:
    request = ask(said("user", "what does <think> mean?"), thinking=Thinking(enabled=enabled))
    assert make_model(family).render(request).starts_in_reasoning is expected


def test_continued_reasoning_is_reasoning(make_model: Any) -> None:
    request = ask(
        said("user", "x"), said("assistant", "<think>\nI was"), template_args={"continue_final_message": True}
    )
    template_without_stripping = make_model("chatml").template
    model = make_model("qwen3")
    continued = TextModel(model.tokenizer, template_without_stripping, model.template, model.generation)
    assert not continued.render(request).starts_in_reasoning  # a model without reasoning
    assert model.render(request).starts_in_reasoning


def grown(family: str) -> tuple[GenerateRequest, list[GenerateRequest]]:
    """A conversation, and its later turns."""
    start = (said("system", "S."), said("user", "Hi"))
    later = [ask(*start, said("assistant", "Hello"), said("user", "Go on"))]
    if family in ("qwen3", "qwen_xml", "hermes", "llama3"):
        call = Message(role="assistant", parts=(Reasoning(text="hm"), ToolCall(id="1", name="f", arguments='{"a": 1}')))
        result = Message(role="tool", parts=(ToolResult(call_id="1", parts=(Text(text="2"),)),))
        later = [ask(*request.messages, tools=TOOLS) for request in later]
        later.append(ask(*start, call, result, tools=TOOLS))
        later.append(ask(*start, call, result, said("assistant", "Two"), said("user", "More"), tools=TOOLS))
        return ask(*start, tools=TOOLS), later
    return ask(*start), later


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("enabled", [None, False])
def test_later_turns_repeat_the_prompt_up_to_the_turn_end(make_model: Any, family: str, enabled: bool | None) -> None:
    model = make_model(family)
    first, later = grown(family)
    thinking = Thinking(enabled=enabled)
    rendered = model.render(ask(*first.messages, tools=first.tools, thinking=thinking))
    assert rendered.turn_ends
    assert list(rendered.turn_ends) == sorted(set(rendered.turn_ends))
    last = rendered.turn_ends[-1]
    assert model.decode(rendered.ids[:last]).rstrip("\n").endswith(("<|im_end|>", "<|eot_id|>"))
    assert "Hi" in model.decode(rendered.ids[:last])
    assert "assistant" in model.decode(rendered.ids[last:])
    for request in later:
        again = model.render(
            GenerateRequest(model="m", messages=request.messages, tools=request.tools, thinking=thinking)
        )
        assert again.ids[:last] == rendered.ids[:last]


def test_turn_ends_include_the_end_of_the_last_query(make_model: Any) -> None:
    """A template may strip the reasoning after a query once the next query comes."""
    model = make_model("qwen3")
    first, later = grown("qwen3")
    during, after = later[1], later[2]
    rendered, next_query = model.render(during), model.render(after)
    system_end, query_end, last = rendered.turn_ends
    assert model.decode(rendered.ids[:system_end]).endswith("</tool_call><|im_end|>\n")
    assert query_end == model.render(first).turn_ends[-1]
    assert next_query.ids[:query_end] == rendered.ids[:query_end]
    assert next_query.ids[:last] != rendered.ids[:last]  # the reasoning is gone


def test_turn_end_is_never_inside_text_that_could_merge(backend: Tokenizer, tmp_path: Path) -> None:
    bare = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    path = write_model(tmp_path, backend, None, tokenizer_config={"chat_template": bare})
    assert load_text(path).render(ask(said("user", "a"))).turn_ends == ()


def test_raw_prompt_is_not_changed(make_model: Any) -> None:
    model = make_model("qwen3")
    text = GenerateRequest(model="m", prompt="Once <|im_start|>")
    assert model.render(text).ids == tuple(model.encode("Once <|im_start|>"))
    ids = GenerateRequest(model="m", prompt=(5, 6, 7))
    assert model.render(ids).ids == (5, 6, 7)
    parser = model.parser(text, model.render(text))
    assert parser.push("<think>raw") == [TextDelta(text="<think>raw")]
    with pytest.raises(InvalidValue, match="99999"):
        model.render(GenerateRequest(model="m", prompt=(99999,)))


def test_tool_calls_are_parsed_only_if_allowed(make_model: Any) -> None:
    model = make_model("hermes")
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for fields, parsed in (
        ({"tools": TOOLS}, True),
        ({}, False),
        ({"tools": TOOLS, "tool_choice": ToolChoice(mode="none")}, False),
    ):
        request = ask(said("user", "x"), **fields)
        parser = model.parser(request, model.render(request), index=2)
        events = parser.push(text) + parser.finish()
        assert isinstance(events[0], ToolCallStart) is parsed
        assert all(event.index == 2 for event in events)


def test_call_ids_are_unique(make_model: Any) -> None:
    model = make_model("hermes")
    request = ask(said("user", "x"), tools=TOOLS)
    parser = model.parser(request, model.render(request))
    events = parser.push('<tool_call>{"name": "f"}</tool_call>' * 3) + parser.finish()
    ids = {event.id for event in events if isinstance(event, ToolCallStart)}
    assert len(ids) == 3
    assert all(call_id.startswith("call_") for call_id in ids)


def test_reasoning_opened_by_the_template_streams_as_reasoning(make_model: Any) -> None:
    model = make_model("qwen_xml")
    request = ask(said("user", "x"))
    parser = model.parser(request, model.render(request))
    assert parser.push("hm") == [ReasoningDelta(text="hm")]
    assert parser.push("</think>\n\nyes") + parser.finish() == [TextDelta(text="yes")]


def test_sampling_defaults_come_from_the_model(
    backend: Tokenizer, tmp_path: Path, gguf_metadata: dict[str, Any]
) -> None:
    stated = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": "bad",
        "repetition_penalty": -1,
    }
    model = load_text(write_model(tmp_path, backend, "chatml", generation_config=stated))
    assert model.generation == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert inspect_text(tmp_path).generation == model.generation
    greedy = load_text(write_model(tmp_path, backend, "chatml", generation_config={"do_sample": False}))
    assert greedy.generation == SamplingDefaults(temperature=0.0)
    sampled = TextModel.of(*text_of_gguf({**gguf_metadata, "general.sampling.temp": 0.5, "general.sampling.top_k": 40}))
    assert sampled.generation == SamplingDefaults(temperature=0.5, top_k=40)


@pytest.mark.parametrize("family", ["qwen3", "hermes", "chatml", None])
def test_capabilities_are_known_without_a_tokenizer(tmp_path: Path, backend: Any, family: str | None) -> None:
    path = write_model(tmp_path, backend, family, config={"vision_config": {}})
    loaded = load_text(path).capabilities
    (path / "tokenizer.json").write_text("{}")
    assert inspect_text(path).capabilities == loaded


def test_tokens_for_filling_in_are_known_without_a_tokenizer(tmp_path: Path, backend: Any) -> None:
    path = write_model(tmp_path, backend, "chatml")
    assert not inspect_text(path).capabilities.insert
    described = json.loads((path / "tokenizer.json").read_text())
    for number, token in enumerate(("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")):
        described["added_tokens"].append({**described["added_tokens"][0], "content": token, "id": 5000 + number})
        (path / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=number == 2))
        assert inspect_text(path).capabilities.insert == (number == 2)


def test_gguf_and_directory_give_the_same_text_model(gguf_metadata: dict[str, Any], make_model: Any) -> None:
    directory = make_model("qwen3")
    gguf = TextModel.of(*text_of_gguf({**gguf_metadata, "tokenizer.chat_template": directory.template.source}))
    request = ask(said("user", "x"), tools=TOOLS)
    assert gguf.render(request) == directory.render(request)
    assert gguf.capabilities == directory.capabilities


def test_rejects_a_damaged_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model")
    for path in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(CheckpointError):
            load_text(path)


def test_text_model_is_thread_safe(make_model: Any) -> None:
    model = make_model("qwen3")
    requests = [ask(said("user", f"question {i} " * 50), tools=TOOLS) for i in range(16)]
    alone = [model.render(request) for request in requests]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(model.render, requests)) == alone


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("cortex.neuron.text.model", ("torch", "transformers", "llguidance")),
        ("cortex.neuron.text.grammar.matcher", ("torch", "msgspec", "jinja2", "llguidance", "cortex.wire")),
    ],
)
def test_package_imports_without_heavy_libraries(module: str, absent: tuple[str, ...]) -> None:
    check = f"import sys, {module}; print([name for name in {absent!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


def test_demo_model_is_read_completely(demo_model: Path) -> None:
    model = load_text(demo_model)
    rendered = model.render(ask(said("user", "Hi")))
    assert rendered.text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert model.decode(rendered.ids) == rendered.text
    assert model.decode(rendered.ids[: rendered.turn_ends[-1]]).endswith("Hi<|im_end|>\n")


def test_conversation_of_another_tenant_is_tokenised_as_if_it_were_new(make_model: Any) -> None:
    model = make_model("chatml")
    request, costs = ask(said("user", "what one tenant says " * 40)), []
    for tenant in (b"one", b"one", b"two", b"", b"one"):
        before = model.tokenizer.encoder.num_tokenised
        model.render(msgspec.structs.replace(request, tenant=tenant))
        costs.append(model.tokenizer.encoder.num_tokenised - before)
    first, again, *others = costs
    assert first > 800 > again
    assert others == [first, first, again]


def test_rejects_a_text_that_cannot_fit_before_tokenising(make_model: Any) -> None:
    model = make_model("chatml")

    class Unasked:
        def encode(self, text: str, literal_at: Any = (), tenant: bytes = b"") -> list[int]:
            raise AssertionError("a text that cannot fit was tokenised")

        encode_document = encode_segmented = encode

    unasked = replace(model, tokenizer=replace(model.tokenizer, encoder=Unasked()))
    long = "word " * 10_000
    for request in (ask(said("user", long)), GenerateRequest(model="m", prompt=long)):
        with pytest.raises(ContextLengthExceeded, match=r"prompt is too long: [0-9]+ tokens > 99 maximum") as rejected:
            unasked.render(request, PromptRules(100))
        assert "This model's maximum context length is 100 tokens" in rejected.value.message
        assert 100 <= rejected.value.details["prompt_tokens"] <= len(model.render(request).ids)
        with pytest.raises(ContextLengthExceeded, match=r"tokens > 50 maximum\. .*limits\.max_prompt_tokens"):
            unasked.render(request, PromptRules(10**6, max_prompt_tokens=50))
        with pytest.raises(ContextLengthExceeded, match=r"prompt is too long: .*text\.max_prompt_mb"):
            unasked.render(request, PromptRules(10**6, max_characters=49_999))
    assert model.render(ask(said("user", long)), PromptRules(10**6, max_characters=60_000)).ids


@pytest.mark.parametrize(
    ("thinking", "budget", "variables"),
    [
        (Thinking(), None, "||"),
        (Thinking(effort="low", enabled=True), 1024, "True|low|1024"),
        (Thinking(effort="high", enabled=True), None, "True|high|"),
        (Thinking(budget_tokens=2000, enabled=True), 2000, "True|medium|2000"),
        (Thinking(budget_tokens=90, effort="high"), 90, "|high|90"),
        (Thinking(enabled=False), None, "False||0"),
        (Thinking(off_by_default=True), None, "False||0"),
        (Thinking(enabled=True, off_by_default=True), None, "True||"),
    ],
)
def test_effort_budget_and_switch_stand_for_each_other(
    make_model: Any, thinking: Thinking, budget: int | None, variables: str
) -> None:
    """A template that reads efforts gets the effort only; other models are held to its budget."""
    said = (Message(role="user", parts=(Text(text="x"),)),)
    request = GenerateRequest(model="m", messages=said, thinking=thinking)
    assert make_model("qwen3").reasoning_budget(request) == budget
    knows = ChatTemplate("{{ enable_thinking }}|{{ reasoning_effort }}|{{ thinking_budget }}")
    model = TextModel(make_model("chatml").tokenizer, knows, knows, SamplingDefaults())
    assert model.render(request).text == variables
    assert model.reasoning_budget(request) == thinking.budget_tokens
