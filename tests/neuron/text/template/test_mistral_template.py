"""The template of Mistral's models that have none, against those that Mistral publishes for the same versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.families.tool_calls import ToolSyntax
from cortex.neuron.text.errors import TokenizerUnsupported
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.template.detect import reasoning_markers, tool_syntax
from cortex.neuron.text.template.template_source import from_directory, mistral_template
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.requests import GenerateRequest

from ..syntax_names import S
from .conversations import said
from .test_official_templates import AGENT, TOOLS, TURNS, template_of

CONVERSATIONS = {
    "several turns": (said("system", "Be <brief>."), *TURNS),
    "tool result": AGENT,
    "after the tools": (*AGENT, said("assistant", "21 degrees"), said("user", "Thanks")),
}


@pytest.mark.parametrize(
    ("version", "published"), [(3, "mistral-nemo"), (11, "mistral-small-3.2"), (13, "ministral-3")]
)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_prompt_is_that_of_the_published_template(
    make_model: Any, version: int, published: str, conversation: str
) -> None:
    """With a system message: without one, published templates have their own."""
    tokenizer = make_model("chatml").tokenizer
    ours = ChatTemplate(mistral_template(version, reasons=False))
    for tools in ((), TOOLS):
        request = GenerateRequest(model="m", messages=CONVERSATIONS[conversation], tools=tools)
        prompts = [
            TextModel(tokenizer, each, each, SamplingDefaults()).render(request).text
            for each in (ours, template_of(published))
        ]
        assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    ("version", "tokens", "expected"),
    [
        ("v3", None, S.MISTRAL_JSON),
        ("v7", ["[SYSTEM_PROMPT]"], S.MISTRAL_JSON),
        ("v11", ["[ARGS]"], S.MISTRAL),
        ("v13", ["[ARGS]", "[THINK]"], S.MISTRAL),
    ],
)
def test_tokenizer_without_a_template_gets_that_of_its_version(
    tmp_path: Path, version: str, tokens: list[str] | None, expected: ToolSyntax
) -> None:
    listed = {} if tokens is None else {"special_tokens": [{"rank": 0, "token_str": token} for token in tokens]}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": {"version": version}, **listed}))
    source = from_directory(tmp_path).default
    assert source is not None
    template = ChatTemplate(source)
    assert tool_syntax(template) is expected
    assert template.takes_tools
    assert (reasoning_markers(template) is not None) == ("[THINK]" in (tokens or ()))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert from_directory(tmp_path).default == "{{ messages }}"


def test_template_is_only_that_of_the_tokenizer_in_use(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps({"config": {"version": "v7"}}))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert from_directory(tmp_path).default is None


@pytest.mark.parametrize("config", [{"version": "v15"}, {"version": "v4"}, {"version": 7}, {}, None])
def test_tokenizer_of_another_version_asks_for_a_template(tmp_path: Path, config: Any) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config}))
    with pytest.raises(TokenizerUnsupported, match=r"tekken\.json .* v3, v7, v11, v13; .* chat_template\.jinja"):
        from_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert from_directory(tmp_path).default == "{{ messages }}"


QUESTION, SYSTEM, TOOLS_HERE = "[INST]user[/INST]", "[SYSTEM_PROMPT]system[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"


@pytest.mark.parametrize(
    ("version", "roles", "expected"),
    [
        (13, "user assistant system user", f"{TOOLS_HERE}{QUESTION}assistant</s>{SYSTEM}{QUESTION}"),
        (13, "system system user user", f"{SYSTEM}{SYSTEM}{TOOLS_HERE}{QUESTION}{QUESTION}"),
        (13, "assistant user", f"assistant</s>{TOOLS_HERE}{QUESTION}"),
        (13, "system", f"{SYSTEM}{TOOLS_HERE}"),
        (11, "user assistant user", f"{QUESTION}assistant</s>{TOOLS_HERE}{QUESTION}"),
        (7, "system user user assistant", f"{SYSTEM}{QUESTION}{TOOLS_HERE}{QUESTION}assistant</s>"),
        (3, "user assistant user", f"{QUESTION}assistant</s>{TOOLS_HERE}{QUESTION}"),
    ],
)
def test_tools_are_described_once_and_before_a_question(version: int, roles: str, expected: str) -> None:
    """Before the first question since version 13, before the last one in older ones, also where questions are equal."""
    messages = [{"role": role, "content": role} for role in roles.split()]
    text = ChatTemplate(mistral_template(version, reasons=False)).render(
        {"messages": messages, "tools": ["x"], "bos_token": "<s>", "eos_token": "</s>"}
    )
    assert text == "<s>" + expected.replace(TOOLS_HERE, '[AVAILABLE_TOOLS]["x"][/AVAILABLE_TOOLS]')


def test_reasoning_of_earlier_turns_and_pictures_are_written() -> None:
    template = ChatTemplate(mistral_template(13, reasons=True))
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A cat.", "reasoning_content": "fur"},
    ]
    text = template.render({"messages": messages, "tools": None, "bos_token": "<s>", "eos_token": "</s>"})
    assert text == "<s>[INST][IMG]What?[/INST][THINK]fur[/THINK]A cat.</s>"
