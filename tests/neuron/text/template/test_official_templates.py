"""The templates of published models: rendered like the reference library, and what they write is read back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from cortex.neuron.families.registry import BY_TYPE
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.detect import reasoning_markers, tool_syntax
from cortex.neuron.text.template.prompt import Rendered
from cortex.wire.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.requests import GenerateRequest, Message, Reasoning, Text, Tool, ToolCall, ToolResult

from ..conftest import TEMPLATES, random_splits
from ..syntax_names import S
from .conversations import ARGUMENTS, WEATHER, said

SYNTAXES = {
    "bielik-3": S.HERMES_JSON,
    "deepseek-r1-distill": S.DEEPSEEK_BLOCK,
    "deepseek-v3.1": S.DEEPSEEK,
    "deepseek-v3.2": S.DSML,
    "gemma-4": S.GEMMA,
    "gigachat-3.1": S.GIGACHAT_JSON,
    "glm-4.6": S.GLM_XML,
    "glm-4.7-flash": S.GLM_XML,
    "gpt-oss": S.HARMONY,
    "granite-3.3": S.GRANITE_JSON,
    "granite-4.0": S.HERMES_JSON,
    "laguna": S.GLM_XML,
    "minimax-m2": S.MINIMAX_XML,
    "ministral-3": S.MISTRAL,
    "mistral-nemo": S.MISTRAL_JSON,
    "mistral-small-3.2": S.MISTRAL,
    "phi-3.5": S.HERMES_JSON,
    "qwen2.5": S.HERMES_JSON,
    "qwen3": S.HERMES_JSON,
    "qwen3-coder": S.QWEN_XML,
    "qwen3.5": S.QWEN_XML,
    "seed-oss": S.SEED_XML,
    "smollm3": S.HERMES_JSON,
    "step-3.5": S.QWEN_XML,
}
THINKING = frozenset(
    {
        *("bielik-3", "gemma-4", "glm-4.6", "glm-4.7-flash", "gpt-oss", "laguna", "minimax-m2"),
        *("qwen3", "qwen3.5", "seed-oss", "step-3.5"),
    }
)
"""They show the reasoning of a turn that calls a tool."""
CALLS_AS_TEXT = frozenset({"granite-3.3", "phi-3.5", "smollm3"})
"""They do not show calls."""
TOOLS_AS_TEXT = frozenset({"deepseek-r1-distill", "deepseek-v3.1", "phi-3.5", "smollm3"})
"""They have no place for tools."""

TURN_ENDS = ("<|tool_response>", "<｜end▁of▁sentence｜><｜Assistant｜>")
"""Tokens that end a turn with calls only."""
TOOLS = (
    Tool(name="get_weather", description="The weather & more", parameters=WEATHER),
    Tool(name="stop", description="Stops", parameters={"type": "object", "properties": {}}),
)
REFERENCE_TOOLS: list[dict[Any, Any] | Callable[..., Any]] = [
    {
        "type": "function",
        "function": {"name": each.name, "description": each.description, "parameters": each.parameters},
    }
    for each in TOOLS
]

ID = "a1b2c3d4e"
CALLED = ToolCall(id=ID, name="get_weather", arguments=json.dumps(ARGUMENTS))
CALLING = Message(role="assistant", parts=(Reasoning(text="I need\nthe tool."), CALLED))
ANSWERED = Message(role="tool", parts=(ToolResult(call_id=ID, parts=(Text(text='{"t": 21}'),)),))
TURNS = (said("user", "a"), said("assistant", "b"), said("user", " c ✓"))
AGENT = (said("system", "Be <brief>."), said("user", "Weather?"), CALLING, ANSWERED)
CONVERSATIONS = {
    "one question": (said("user", "Hi <é>"),),
    "several turns": TURNS,
    "system message": (said("system", "Be <brief>."), *TURNS),
    "tool call": AGENT[:3],
    "tool result": AGENT,
    "after the tools": (*AGENT, said("assistant", "21 degrees"), said("user", "Thanks")),
}


def plain(message: Message) -> dict[str, Any]:
    """A message as a user of the reference library writes it."""
    texts = [part.text for part in message.parts if isinstance(part, Text)]
    turn: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
    for part in message.parts:
        match part:
            case Reasoning():
                turn |= {"reasoning_content": part.text, "thinking": part.text}
            case ToolCall():
                function = {"name": part.name, "arguments": json.loads(part.arguments)}
                turn["tool_calls"] = [{"id": part.id, "type": "function", "function": function}]
            case ToolResult():
                turn |= {"tool_call_id": part.call_id, "name": "get_weather", "content": part.parts[0].text}  # type: ignore[union-attr]
            case _:
                pass
    return turn


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / "official" / f"{name}.jinja").read_text())


def model_of(name: str, make_model: Any) -> TextModel:
    base, template = make_model("chatml"), template_of(name)
    return TextModel(base.tokenizer, template, template, SamplingDefaults())


@pytest.mark.parametrize("name", SYNTAXES)
def test_official_template_renders_like_the_reference(backend: Tokenizer, make_model: Any, name: str) -> None:
    model = model_of(name, make_model)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **dict(model.tokenizer.named_tokens))
    for title, messages in CONVERSATIONS.items():
        calls = any(isinstance(part, ToolCall) for message in messages for part in message.parts)
        if calls and name in CALLS_AS_TEXT:
            continue
        turns: list[dict[str, str]] = [plain(message) for message in messages]
        for with_tools in (False, True) if name not in TOOLS_AS_TEXT else (False,):
            request = GenerateRequest(model="m", messages=messages, tools=TOOLS if with_tools else ())
            expected = theirs.apply_chat_template(
                turns,
                tools=REFERENCE_TOOLS if with_tools else None,
                chat_template=model.template.source,
                tokenize=False,
                add_generation_prompt=True,
            )
            assert model.render(request).text == expected, (title, with_tools)


@pytest.mark.parametrize("name", SYNTAXES)
def test_final_message_is_continued_like_the_reference(backend: Tokenizer, make_model: Any, name: str) -> None:
    model = model_of(name, make_model)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **dict(model.tokenizer.named_tokens))
    for earlier in (TURNS[:1], (said("system", "Be <brief>."), *TURNS)):
        messages = (*earlier, said("assistant", "Sure <é>, and"))
        request = GenerateRequest(model="m", messages=messages, template_args={"continue_final_message": True})
        turns: list[dict[str, str]] = [plain(message) for message in messages]
        expected = theirs.apply_chat_template(
            turns, chat_template=model.template.source, tokenize=False, continue_final_message=True
        )
        rendered = model.render(request).text
        assert rendered == expected
        assert rendered.endswith("Sure <é>, and")


@pytest.mark.parametrize("path", sorted((TEMPLATES / "local").glob("*.jinja")), ids=lambda path: path.stem)
def test_local_template_renders_like_the_reference(backend: Tokenizer, make_model: Any, path: Path) -> None:
    """Where the template has a place for what a conversation has: the others are adapted to the template."""
    base, template = make_model("chatml"), ChatTemplate(path.read_text())
    model = TextModel(base.tokenizer, template, template, SamplingDefaults())
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **dict(model.tokenizer.named_tokens))
    num_rendered = 0
    for title, messages in CONVERSATIONS.items():
        calls = any(isinstance(part, ToolCall) for message in messages for part in message.parts)
        if calls and "tool_calls" not in template.source:
            continue
        for with_tools in (False, True) if "tools" in template.source else (False,):
            turns: list[dict[str, str]] = [plain(message) for message in messages]
            try:
                expected = theirs.apply_chat_template(
                    turns,
                    tools=REFERENCE_TOOLS if with_tools else None,
                    chat_template=template.source,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            except Exception:  # noqa: BLE001 - a template raises what it likes
                continue
            num_rendered += 1
            request = GenerateRequest(model="m", messages=messages, tools=TOOLS if with_tools else ())
            assert model.render(request).text == expected, (title, with_tools)
    assert num_rendered >= 3


@pytest.mark.parametrize("name", SYNTAXES)
def test_what_an_official_template_writes_is_read_back(make_model: Any, name: str) -> None:
    model = model_of(name, make_model)
    assert tool_syntax(model.template) is SYNTAXES[name]
    question = (said("user", "Weather?"),)

    def rendered(*messages: Message, prompts: bool = False) -> str:
        arguments = {"add_generation_prompt": prompts}
        request = GenerateRequest(model="m", messages=(*question, *messages), tools=TOOLS, template_args=arguments)
        return model.render(request).text

    called, said_done = rendered(CALLING), rendered(said("assistant", "Done."))
    end = said_done[said_done.rindex("Done.") + len("Done.") :]
    prompt = shared_beginning(rendered(prompts=True), called)
    response = called[len(prompt) :].removesuffix(end).removeprefix("</think>")
    request = GenerateRequest(model="m", messages=question, tools=TOOLS)
    start = Rendered(prompt, tuple(model.encode(prompt)), starts_in_reasoning=is_in_reasoning(prompt))
    whole = read([response], model, request, start)
    assert whole["name"] == "get_weather"
    assert json.loads(whole["arguments"]) == ARGUMENTS
    assert whole["text"] in ("", *TURN_ENDS)
    assert whole["reasoning"] == ("I need\nthe tool." if name in THINKING else "")
    for pieces in random_splits(response, seed=len(response), count=5):
        assert read(pieces, model, request, start) == whole


FAMILIES = {
    "deepseek-v3.1": "deepseek_v3",
    "gemma-4": "gemma4",
    "glm-4.6": "glm4_moe",
    "glm-4.7-flash": "glm4_moe_lite",
    "gpt-oss": "gpt_oss",
    "granite-3.3": "granite",
    "granite-4.0": "granitemoehybrid",
    "laguna": "laguna",
    "minimax-m2": "minimax_m2",
    "ministral-3": "ministral3",
    "mistral-nemo": "mistral",
    "mistral-small-3.2": "mistral3",
    "phi-3.5": "phi3",
    "qwen2.5": "qwen2",
    "qwen3": "qwen3",
    "qwen3-coder": "qwen3_moe",
    "qwen3.5": "qwen3_5",
    "seed-oss": "seed_oss",
    "smollm3": "smollm3",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_documented_syntaxes_of_a_family_are_those_of_its_templates(name: str) -> None:
    documented, template = BY_TYPE[FAMILIES[name]], template_of(name)
    assert tool_syntax(template) in documented.tool_syntaxes
    markers = reasoning_markers(template)
    assert markers is None or (documented.reasoning and markers.open == documented.reasoning.open)


def shared_beginning(one: str, other: str) -> str:
    """What both begin with, without the beginning of a marker."""
    shared = "".join(a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return shared if shared == one else shared[: shared.rindex("<")] if shared.endswith(("<", "</")) else shared


def is_in_reasoning(prompt: str) -> bool:
    return prompt.rstrip().endswith(("<think>", "[THINK]", "<seed:think>", "<|channel>thought"))


def read(pieces: list[str], model: TextModel, request: GenerateRequest, start: Rendered) -> dict[str, str]:
    parser = model.parser(request, start)
    parts = {"text": "", "reasoning": "", "name": "", "arguments": ""}
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
        match event:
            case TextDelta(text=text):
                parts["text"] += text
            case ReasoningDelta(text=text):
                parts["reasoning"] += text
            case ToolCallStart():
                parts["name"] += event.name
            case ToolCallDelta():
                parts["arguments"] += event.arguments
            case _:
                pass
    return parts
