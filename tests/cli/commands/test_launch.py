"""Which command and variables start each agent, and which model it gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cortex.cli.commands.launch import planned, suitable

URL = "http://gateway:31313"


def entry(id: str, *, tools: bool = True, loaded: bool = False, context: int | None = None, chat: bool = True) -> Any:
    return {
        "id": id,
        "capabilities": {"chat": chat, "tools": tools},
        "loaded": loaded,
        "max_model_len": context,
    }


@pytest.mark.parametrize(
    ("models", "chosen"),
    [
        ([], None),
        ([entry("embed", chat=False)], None),
        ([entry("plain", tools=False, loaded=True), entry("tools")], "tools"),
        ([entry("cold", context=9000), entry("warm", loaded=True, context=10)], "warm"),
        ([entry("short", context=10), entry("long", context=9000)], "long"),
        ([{"id": "bare"}], "bare"),
    ],
)
def test_agent_gets_a_loaded_model_with_tools(models: list[Any], chosen: str | None) -> None:
    assert suitable(models) == chosen


def test_every_agent_is_sent_to_the_gateway() -> None:
    claude = planned("claude", URL, "k", "m")
    assert claude.environment["ANTHROPIC_BASE_URL"] == URL
    assert claude.environment["ANTHROPIC_MODEL"] == "m"
    codex = planned("codex", URL, "k", "m")
    assert codex.arguments[-2:] == ("-m", "m")
    assert f'base_url="{URL}/v1"' in codex.arguments[1]
    assert codex.environment == {"CORTEX_AGENT_KEY": "k"}
    settings = json.loads(planned("opencode", URL, "k", "m").environment["OPENCODE_CONFIG_CONTENT"])
    assert settings["model"] == "cortex/m"
    assert settings["provider"]["cortex"]["options"] == {"baseURL": f"{URL}/v1", "apiKey": "k"}
    aider = planned("aider", URL, "k", "m")
    assert aider.arguments == ("--model", "openai/m")
    assert aider.environment["OPENAI_API_BASE"] == f"{URL}/v1"
