"""What all commands that use a gateway share, and `cortex chat`: requests, output and exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner

from cortex.cli.commands.keys import keys
from cortex.cli.cortex import cortex
from cortex.cli.failures import ExitCode
from cortex.cli.neuron import neuron
from cortex.gateway.config import COMMAND_VARIABLES

from ..canned_responses import MODELS, delta, sse

if TYPE_CHECKING:
    from ..conftest import CannedGateway, Invoke


def test_sends_the_key_as_bearer_token(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/v1/models"] = {"data": []}
    invoke("models", env={"CORTEX_API_KEY": "sk-secret"})
    assert gateway.requests[-1][3]["authorization"] == "Bearer sk-secret"


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (401, "invalid_api_key", ExitCode.DENIED),
        (403, "model_not_allowed", ExitCode.DENIED),
        (404, "model_not_found", ExitCode.NOT_FOUND),
        (404, "node_not_found", ExitCode.NOT_FOUND),
        (507, "insufficient_capacity", ExitCode.NO_ROOM),
        (502, "load_failed", ExitCode.FAILED),
    ],
)
def test_rejection_gives_its_exit_code_and_reason(
    gateway: CannedGateway, invoke: Invoke, status: int, code: str, expected: ExitCode
) -> None:
    gateway.responses["POST", "/fleet/models/small/load"] = (status, {"error": {"message": "because.", "code": code}})
    outcome = invoke("load", "small")
    assert outcome.code is expected
    assert outcome.error.startswith("because; ")


def test_operator_only_rejection_explains_which_key_is_needed(gateway: CannedGateway, invoke: Invoke) -> None:
    rejection = {"error": {"message": "The key `anna` may use models only.", "code": "operator_only"}}
    gateway.responses["POST", "/fleet/models/small/load"] = (403, rejection)
    outcome = invoke("load", "small", env={"CORTEX_API_KEY": "ck-anna"})
    assert outcome.code is ExitCode.DENIED
    assert "`anna`" in outcome.error
    assert "CORTEX_API_KEY" in outcome.error
    assert "cortex keys add NAME --operator" in outcome.error


def test_unreachable_gateway_is_an_error_with_a_remedy(invoke: Invoke) -> None:
    outcome = invoke("models", "--url", "http://127.0.0.1:9")
    assert outcome.code is ExitCode.UNREACHABLE
    assert "cortex up" in outcome.error


def test_response_that_is_not_json_is_an_error(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/v1/models"] = b"<html>hello</html>"
    outcome = invoke("models")
    assert outcome.code is ExitCode.UNREACHABLE
    assert "not a cortex gateway" in outcome.error


def test_chat_prints_the_response_to_a_prompt_without_reasoning(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["POST", "/v1/chat/completions"] = sse(
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


def test_chat_joins_prompt_and_piped_input_and_uses_a_loaded_model(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/v1/models"] = MODELS
    gateway.responses["POST", "/v1/chat/completions"] = sse(delta(content="ok"))
    invoke("chat", "-", "Summarise:", stdin="a long text\n")
    sent = gateway.requests[-1][2]
    assert sent["model"] == "small"
    assert sent["messages"] == [{"role": "user", "content": "Summarise:\n\na long text"}]


def test_chat_without_a_prompt_is_a_usage_error(gateway: CannedGateway, invoke: Invoke) -> None:
    assert invoke("chat", "small", stdin="").code is ExitCode.USAGE


def test_chat_ends_with_the_error_inside_a_stream(gateway: CannedGateway, invoke: Invoke) -> None:
    failure = {"error": {"message": "the node went away", "code": "upstream_interrupted"}}
    gateway.responses["POST", "/v1/chat/completions"] = sse(delta(content="Hel"), failure)
    outcome = invoke("chat", "small", "Hi")
    assert outcome.code is ExitCode.FAILED
    assert "the node went away" in outcome.error


@pytest.mark.parametrize("arguments", [("-h",), ("status", "-h"), ("keys", "-h"), ("keys", "add", "-h")])
def test_short_help_option_works_everywhere(invoke: Invoke, arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).stdout.startswith("Usage: ")


def test_serve_uses_the_configuration_in_the_working_directory(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cortex.toml").write_text("[gatway]\n")
    monkeypatch.chdir(tmp_path)
    outcome = invoke("serve")
    assert outcome.code is ExitCode.CONFIG
    assert "unknown key gatway in cortex.toml line 1" in outcome.error


def test_short_options_name_the_gateway_and_the_configuration(
    invoke: Invoke, gateway: CannedGateway, tmp_path: Path
) -> None:
    elsewhere = {"CORTEX_URL": "http://127.0.0.1:9"}
    gateway.responses["GET", "/v1/models"] = MODELS
    assert invoke("models", "-e", gateway.url, env=elsewhere).code is ExitCode.OK
    assert invoke("serve", "-c", str(tmp_path / "absent.toml")).code is ExitCode.CONFIG


def commands_of(group: click.Group) -> dict[str, click.Command]:
    """All of them, also those that are imported when they are needed."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


@pytest.mark.parametrize("group", [cortex, neuron], ids=["cortex", "neuron"])
def test_every_command_has_a_short_help(group: click.Group) -> None:
    assert len(commands_of(group)) > 5
    for name, command in commands_of(group).items():
        assert command.help, f"{name} has no help"
        assert not command.get_short_help_str(60).endswith("..."), f"the first line of {name}'s help is too long"


@pytest.mark.parametrize("group", [cortex, neuron], ids=["cortex", "neuron"])
def test_help_fits_80_columns(group: click.Group) -> None:
    for arguments in ([], *([name] for name in commands_of(group))):
        shown = CliRunner().invoke(group, [*arguments, "-h"], terminal_width=80).output
        assert max(map(len, shown.splitlines())) <= 80, shown


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://127.0.0.1:x", "http://[::1", "ftp://host", "http://"]
)
def test_address_that_is_none_is_a_usage_error(invoke: Invoke, url: str) -> None:
    outcome = invoke("status", "--url", url)
    assert outcome.code is ExitCode.USAGE
    assert f"{url} is not a gateway address" in outcome.error


def test_key_that_no_header_can_carry_is_an_error(invoke: Invoke) -> None:
    outcome = invoke("status", "--api-key", "ck-one\nck-two")
    assert outcome.code is ExitCode.USAGE
    assert "set CORTEX_API_KEY to one key" in outcome.error
    assert "ck-one" not in outcome.error


@pytest.mark.parametrize("suffix", ["/", "/v1", "/v1/"])
def test_gateway_may_be_behind_a_path(gateway: CannedGateway, invoke: Invoke, suffix: str) -> None:
    gateway.responses["GET", "/llm/v1/models"] = MODELS
    assert "fast → small" in invoke("models", "--url", f"{gateway.url}/llm{suffix}").stdout


def test_other_server_is_reported_as_such(gateway: CannedGateway, invoke: Invoke) -> None:
    outcome = invoke("status")
    assert outcome.code is ExitCode.UNREACHABLE
    assert "check --url" in outcome.error


def test_plain_http_under_https_names_the_cause(gateway: CannedGateway, invoke: Invoke) -> None:
    outcome = invoke("status", "--url", gateway.url.replace("http:", "https:"))
    assert outcome.code is ExitCode.UNREACHABLE
    assert "write http://" in outcome.error


@pytest.mark.parametrize(
    ("status", "code", "message", "shown"),
    [
        (
            404,
            "model_not_found",
            "There is no model `x`: GET /v1/models lists what there is.",
            "There is no model `x`; ",
        ),
        (404, "node_not_found", "There is no node x; the fleet has local.", "There is no node x; the fleet has local"),
        (429, "insufficient_quota", "The key has 2 tokens; wait.", "The key has 2 tokens; wait"),
    ],
)
def test_rejection_has_one_remedy(
    gateway: CannedGateway, invoke: Invoke, status: int, code: str, message: str, shown: str
) -> None:
    gateway.responses["POST", "/fleet/models/x/load"] = (status, {"error": {"message": message, "code": code}})
    error = invoke("load", "x").error
    assert error.startswith(shown)
    assert error.count(";") == 1


def test_piped_jobs_have_whole_lines_and_the_reasons_below(gateway: CannedGateway, invoke: Invoke) -> None:
    job = {"id": "job_1", "kind": "load", "model": "m", "nodes": ["n"], "by": "[x]", "started_at": 0, "state": "failed"}
    reason = f"the path {'x' * 300} is outside the model roots of this node [limits]"
    gateway.responses["GET", "/fleet/jobs"] = {"jobs": [{**job, "error": {"code": "load_failed", "message": reason}}]}
    header, row, below = invoke("jobs").stdout.splitlines()
    assert header.split() == ["ID", "KIND", "MODEL", "NODE", "STATE", "AGE", "BY"]
    assert row.startswith("job_1  load  m      n     failed")
    assert row.endswith(" [x]")
    assert below == f"job_1: {reason}"


def test_unknown_job_is_not_found(gateway: CannedGateway, invoke: Invoke) -> None:
    missing = {"error": {"message": "There is no job x; GET /fleet/jobs lists the latest.", "code": "route_not_found"}}
    gateway.responses["DELETE", "/fleet/jobs/x"] = (404, missing)
    outcome = invoke("jobs", "--cancel", "x")
    assert outcome.code is ExitCode.NOT_FOUND
    assert outcome.error == "There is no job x; list them with `cortex jobs`"


@pytest.mark.parametrize(
    ("variable", "command", "advice"),
    [
        ("CORTEX_ULR", "status", "did you mean CORTEX_URL?"),
        ("CORTEX_ULR", "usage", "did you mean CORTEX_URL?"),
        ("CORTEX_ULR", "keys add anna", "did you mean CORTEX_URL?"),
        ("CORTEX_API_KYE", "jobs", "did you mean CORTEX_API_KEY?"),
        ("CORTEX_GATEWAY_LISTEN", "ps", "did you mean CORTEX_GATEWAY__LISTEN?"),
        ("CORTEX_GATEWAY__LISTN", "models", "did you mean CORTEX_GATEWAY__LISTEN?"),
    ],
)
def test_unknown_variable_is_an_error(
    gateway: CannedGateway,
    invoke: Invoke,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    command: str,
    advice: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = invoke(*command.split(), env={variable: "x"})
    assert (outcome.code, outcome.error) == (ExitCode.CONFIG, f"unknown environment variable {variable}: {advice}")
    assert gateway.requests == []


@pytest.mark.parametrize(
    "known",
    [
        *sorted(COMMAND_VARIABLES - {"CORTEX_URL", "CORTEX_CA_FILE"}),
        "CORTEX_BEAST_KEY",
        "CORTEX_LEDGER",
    ],
)
def test_variables_of_commands_and_configurations_are_known(gateway: CannedGateway, invoke: Invoke, known: str) -> None:
    gateway.responses["GET", "/v1/models"] = {"data": []}
    assert invoke("models", env={known: "x"}).code is ExitCode.OK


@pytest.mark.parametrize(("program", "command"), [(cortex, ("status",)), (neuron, ("key",))])
def test_help_and_version_ignore_unknown_variables(program: click.Group, command: tuple[str, ...]) -> None:
    typo = {f"{str(program.name).upper()}_TYPO": "x"}
    for arguments in (("--help",), ("--version",), (*command, "-h")):
        assert CliRunner().invoke(program, arguments, env=typo).exit_code == 0
    error = CliRunner().invoke(program, command, env=typo).exception
    assert "unknown environment variable" in str(error)


def test_variables_of_all_options_are_known() -> None:
    commands = [*commands_of(cortex).values(), *keys.commands.values()]
    options = [option for command in commands for option in command.params]
    names = {name for option in options if isinstance(name := option.envvar, str)}
    assert "CORTEX_URL" in names
    assert names <= COMMAND_VARIABLES
