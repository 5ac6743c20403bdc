"""Which command and variables start each agent, and which model it gets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cortex.cli.commands.launch import planned, suitable
from cortex.cli.failures import ExitCode

if TYPE_CHECKING:
    from ..conftest import CannedGateway, Invoke

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
    best = suitable(models)
    assert (None if best is None else best["id"]) == chosen


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
    assert aider.arguments[:2] == ("--model", "openai/m")
    assert aider.environment["OPENAI_API_BASE"] == f"{URL}/v1"


def test_context_of_the_model_reaches_agents_that_ask_for_it() -> None:
    assert planned("codex", URL, "k", "m", 9000).arguments[:2] == ("-c", "model_context_window=9000")
    settings = json.loads(planned("opencode", URL, "k", "m", 9000).environment["OPENCODE_CONFIG_CONTENT"])
    assert settings["provider"]["cortex"]["models"]["m"]["limit"] == {"context": 9000, "output": 9000}


def test_every_size_of_claude_is_the_chosen_model() -> None:
    environment = planned("claude", URL, "k", "m").environment
    assert {environment[f"ANTHROPIC_DEFAULT_{size}_MODEL"] for size in ("OPUS", "SONNET", "HAIKU")} == {"m"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """The programs that would replace this one."""
    found: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("shutil.which", lambda program: f"/bin/{program}")
    monkeypatch.setattr("os.execve", lambda _, arguments, environment: found.append((arguments, environment)))
    return found


def test_model_that_does_not_exist_starts_nothing(gateway: CannedGateway, invoke: Invoke, started: list[Any]) -> None:
    error = {"message": "There is no model `nosuch`; did you mean `such`?", "code": "model_not_found"}
    gateway.responses["GET", "/v1/models/nosuch"] = (404, {"error": error})
    outcome = invoke("launch", "claude", "--model", "nosuch")
    assert outcome.code is ExitCode.NOT_FOUND
    assert "nosuch" in outcome.error
    assert not started


def test_model_that_cannot_chat_starts_nothing(gateway: CannedGateway, invoke: Invoke, started: list[Any]) -> None:
    gateway.responses["GET", "/v1/models/embed"] = entry("embed", chat=False)
    assert invoke("launch", "codex", "--model", "embed").code is ExitCode.USAGE
    gateway.responses["GET", "/v1/models"] = {"data": [entry("embed", chat=False)]}
    assert invoke("launch", "codex").code is ExitCode.NOT_FOUND
    assert not started


def test_arguments_go_to_the_agent_and_its_own_key_does_not(
    gateway: CannedGateway, invoke: Invoke, started: list[tuple[list[str], dict[str, str]]]
) -> None:
    gateway.responses["GET", "/v1/models/org/m:latest"] = entry("org/m")
    invoke("launch", "claude", "--model", "org/m:latest", "--", "-p", "hi", env={"ANTHROPIC_API_KEY": "sk-theirs"})
    [(arguments, environment)] = started
    assert arguments == ["/bin/claude", "-p", "hi"]
    assert environment["ANTHROPIC_MODEL"] == "org/m:latest"
    assert "ANTHROPIC_API_KEY" not in environment
