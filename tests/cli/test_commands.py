"""The commands that talk to a gateway: what they send, what they print, how they end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cortex.cli.failures import ExitCode

if TYPE_CHECKING:
    from .conftest import CannedGateway, Invoke

MODELS = {
    "data": [
        {
            "id": "small",
            "loaded": True,
            "locations": [{"node": "beast", "status": "ready", "vram_mb": 900}],
            "feasible_on": ["beast"],
            "limit": {"context": 8192},
            "capabilities": {"chat": True, "tools": False},
        },
        {"id": "fast", "alias_of": "small", "loaded": True, "locations": [{"node": "beast", "status": "ready"}]},
        {"id": "large", "loaded": False, "locations": [], "feasible_on": ["beast", "attic"]},
        {"id": "huge", "loaded": False, "locations": [], "feasible_on": []},
    ]
}


def sse(*events: Any) -> bytes:
    lines = [b": keepalive\n\n", *(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)]
    return b"".join([*lines, b"data: [DONE]\n\n"])


def delta(**fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def test_models_shows_where_each_is_or_could_be(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.answers["GET", "/v1/models"] = MODELS
    shown = invoke("models").stdout
    assert "fast → small" in shown
    assert "8,192" in shown
    assert "(beast, attic)" in shown
    assert "fits nowhere" in shown


def test_models_as_json_is_what_the_gateway_said(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.answers["GET", "/v1/models"] = MODELS
    assert json.loads(invoke("models", "--json").stdout) == MODELS["data"]


@pytest.mark.parametrize(
    ("arguments", "path", "body"),
    [
        (("load", "small"), "/fleet/models/small/load", {}),
        (("load", "owner/name", "--node", "beast"), "/fleet/models/owner%2Fname/load", {"node": "beast"}),
        (("unload", "small", "--force"), "/fleet/models/small/unload", {"force": True}),
        (("pin", "small"), "/fleet/models/small/pin", {"pinned": True}),
        (("unpin", "small"), "/fleet/models/small/pin", {"pinned": False}),
    ],
)
def test_lifecycle_commands_ask_the_gateway(
    gateway: CannedGateway, invoke: Invoke, arguments: tuple[str, ...], path: str, body: dict[str, Any]
) -> None:
    gateway.answers["POST", path] = {"status": "ok"}
    assert invoke(*arguments).code is ExitCode.OK
    _method, asked, sent, _headers = gateway.requests[-1]
    assert asked == path
    assert sent == body


def test_the_key_is_sent_as_bearer(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.answers["GET", "/v1/models"] = {"data": []}
    invoke("models", env={"CORTEX_API_KEY": "sk-secret"})
    assert gateway.requests[-1][3]["authorization"] == "Bearer sk-secret"


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (401, "invalid_api_key", ExitCode.DENIED),
        (403, "model_not_allowed", ExitCode.DENIED),
        (404, "model_not_found", ExitCode.NOT_FOUND),
        (507, "insufficient_capacity", ExitCode.NO_ROOM),
        (502, "load_failed", ExitCode.FAILED),
    ],
)
def test_a_refusal_becomes_its_exit_code_and_keeps_the_reason(
    gateway: CannedGateway, invoke: Invoke, status: int, code: str, expected: ExitCode
) -> None:
    gateway.answers["POST", "/fleet/models/small/load"] = (status, {"error": {"message": "because.", "code": code}})
    outcome = invoke("load", "small")
    assert outcome.code is expected
    assert outcome.error.startswith("because; ")


def test_no_gateway_is_unreachable_with_the_remedy(invoke: Invoke) -> None:
    outcome = invoke("models", "--url", "http://127.0.0.1:9")
    assert outcome.code is ExitCode.UNREACHABLE
    assert "cortex up" in outcome.error


def test_something_that_is_no_gateway_is_named(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.answers["GET", "/v1/models"] = b"<html>hello</html>"
    outcome = invoke("models")
    assert outcome.code is ExitCode.UNREACHABLE
    assert "not a cortex gateway" in outcome.error


def test_chat_answers_a_prompt_once_without_reasoning(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.answers["POST", "/v1/chat/completions"] = sse(
        delta(role="assistant"),
        delta(reasoning_content="hm"),
        delta(content="Hel"),
        delta(content="lo"),
        {"choices": [], "usage": {"completion_tokens": 2}},
    )
    outcome = invoke("chat", "small", "Hi", "-s", "Be kind.", "-t", "0", "-n", "9")
    assert outcome.stdout == "Hello\n"
    sent = gateway.requests[-1][2]
    assert sent["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert (sent["temperature"], sent["max_tokens"], sent["stream"]) == (0, 9, True)


def test_chat_joins_prompt_and_piped_input_and_finds_a_loaded_model(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.answers["GET", "/v1/models"] = MODELS
    gateway.answers["POST", "/v1/chat/completions"] = sse(delta(content="ok"))
    invoke("chat", "-", "Summarise:", stdin="a long text\n")
    sent = gateway.requests[-1][2]
    assert sent["model"] == "small"
    assert sent["messages"] == [{"role": "user", "content": "Summarise:\n\na long text"}]


def test_chat_without_a_question_is_a_usage_error(gateway: CannedGateway, invoke: Invoke) -> None:
    assert invoke("chat", "small", stdin="").code is ExitCode.USAGE


def test_an_error_inside_the_stream_ends_the_chat_with_it(gateway: CannedGateway, invoke: Invoke) -> None:
    failure = {"error": {"message": "the node went away", "code": "upstream_interrupted"}}
    gateway.answers["POST", "/v1/chat/completions"] = sse(delta(content="Hel"), failure)
    outcome = invoke("chat", "small", "Hi")
    assert outcome.code is ExitCode.FAILED
    assert "the node went away" in outcome.error


def test_doctor_reports_a_broken_config_as_a_problem(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("[gatewy]\n")
    outcome = invoke("doctor", "--json", "--config", str(config))
    assert outcome.code is ExitCode.FAILED
    problems = [finding for finding in json.loads(outcome.stdout) if finding["verdict"] == "problem"]
    assert any("gatewy" in finding["what"] and finding["remedy"] for finding in problems)


def test_doctor_reports_a_node_that_does_not_answer(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[[neurons]]\nname = "beast"\nendpoint = "http://127.0.0.1:9"\n')
    outcome = invoke("doctor", "--config", str(config))
    assert outcome.code is ExitCode.FAILED
    assert "beast: no answer" in outcome.stdout
    assert "neuron serve" in outcome.stdout


def test_every_command_explains_itself(invoke: Invoke) -> None:
    from cortex.cli.cortex import cortex

    for name, command in cortex.commands.items():
        assert command.help, f"{name} has no help"
        assert not command.get_short_help_str(60).endswith("..."), f"the first line of {name}'s help is too long"
