"""Commands that use a gateway: their requests, output and exit codes."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

from cortex.cli.client import DEFAULT_URL
from cortex.cli.cortex import cortex
from cortex.cli.failures import ExitCode
from cortex.cli.neuron import neuron
from cortex.gateway.ledger.store import open_store
from cortex.gateway.ledger.tables import Counts, Slot
from cortex.wire.events import Usage

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


def test_models_shows_nodes_that_hold_or_could_hold_each_model(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/v1/models"] = MODELS
    shown = invoke("models").stdout
    assert "fast → small" in shown
    assert "8,192" in shown
    assert "(beast, attic)" in shown
    assert "fits nowhere" in shown


def test_models_as_json_is_the_response_of_the_gateway(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/v1/models"] = MODELS
    assert json.loads(invoke("models", "--json").stdout) == MODELS["data"]


def fleet(*models: dict[str, Any], **node: Any) -> dict[str, Any]:
    device = {"index": 0, "kind": "cuda", "name": "RTX 5090", "total_bytes": 32 << 30, "free_bytes": 8 << 30}
    beast = {"name": "beast", "kind": "neuron", "up": True, "devices": [device], "models": list(models), **node}
    return {"version": "0", "nodes": [beast], "waiting": {"large": 2}}


READY = {"id": "small", "state": "ready", "measured_bytes": 900 << 20, "context_tokens": 8192, "idle_s": 700}
FAILED = {"id": "small", "state": "failed", "reason": "small: the file is truncated."}
LOADING = {
    "id": "small",
    "state": "loading",
    "estimate_bytes": 5 << 30,
    "progress": {"stage": "read", "done_bytes": 50, "total_bytes": 100, "eta_s": 4.0},
}


def job(state: str = "done", **fields: Any) -> dict[str, Any]:
    return {"id": "job_1", "kind": "load", "model": "small", "nodes": ["beast"], "state": state} | fields


@pytest.mark.parametrize(
    ("arguments", "path", "body"),
    [
        (("load", "small"), "/fleet/models/small/load", {"wait": False}),
        (("load", "small", "--node", "beast"), "/fleet/models/small/load", {"node": "beast", "wait": False}),
        (("unload", "small", "--no-wait", "--force"), "/fleet/models/small/unload", {"force": True, "wait": False}),
        (("unload", "small", "--sleep"), "/fleet/models/small/unload", {"sleep": True, "wait": False}),
        (("unload", "small", "--park"), "/fleet/models/small/unload", {"sleep": True, "wait": False}),
        (("unload", "small", "--yes"), "/fleet/models/small/unload", {"unpin": True, "wait": False}),
        (("pin", "owner/name"), "/fleet/models/owner%2Fname/pin", {"wait": False}),
        (("unpin", "small"), "/fleet/models/small/unpin", {}),
        (("drain", "beast"), "/fleet/nodes/beast/drain", {}),
        (("undrain", "beast"), "/fleet/nodes/beast/undrain", {}),
        (("pull", "org/m:Q4_K_M"), "/fleet/pull", {"model": "org/m", "quant": "Q4_K_M"}),
        (("pull", "org/m", "--node", "beast"), "/fleet/pull", {"model": "org/m", "node": "beast"}),
    ],
)
def test_lifecycle_commands_send_their_request(
    gateway: CannedGateway, invoke: Invoke, arguments: tuple[str, ...], path: str, body: dict[str, Any]
) -> None:
    gateway.responses["POST", path] = {"model": "small", "node": "beast", "nodes": ["beast"], "job": job()}
    gateway.responses["GET", "/fleet/jobs/job_1"] = job()
    gateway.responses["GET", "/fleet/status"] = fleet(READY)
    assert invoke(*arguments).code is ExitCode.OK
    sent = [request for request in gateway.requests if request[0] == "POST"]
    assert [(path, body) for _method, path, body, _headers in sent] == [(path, body)]


def test_failed_load_and_status_show_the_reason_once(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["POST", "/fleet/models/small/load"] = (202, {"model": "small", "job": job("running")})
    error = {"code": "insufficient_capacity", "message": "small does not fit."}
    gateway.responses["GET", "/fleet/jobs/job_1"] = job("failed", error=error)
    outcome = invoke("load", "small")
    assert outcome.code is ExitCode.NO_ROOM
    assert outcome.error.startswith("small does not fit; ")
    gateway.responses["GET", "/fleet/status"] = fleet(FAILED)
    shown = invoke("status").stdout
    assert "small: the file is truncated." in shown
    assert "small: small" not in shown


def test_load_reports_its_stages_and_where_it_is_ready(gateway: CannedGateway, invoke: Invoke) -> None:
    running = job("running", stage="read", done_bytes=50, total_bytes=100)
    gateway.responses["POST", "/fleet/models/small/load"] = {"model": "small", "nodes": ["beast"], "job": running}
    gateway.responses["GET", "/fleet/jobs/job_1"] = job()
    assert invoke("load", "small").stdout == "small: read\nsmall is ready on beast\n"
    assert "job_1" in invoke("load", "small", "--no-wait").stdout


def test_interrupt_cancels_the_job(gateway: CannedGateway, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cortex.cli.job_view.time.sleep", interrupt)
    running = job("running", can_cancel=True)
    gateway.responses["POST", "/fleet/models/small/load"] = {"model": "small", "nodes": ["beast"], "job": running}
    gateway.responses["DELETE", "/fleet/jobs/job_1"] = job("cancelled")
    assert invoke("load", "small").code is ExitCode.INTERRUPTED
    assert gateway.requests[-1][:2] == ("DELETE", "/fleet/jobs/job_1")


def test_dry_run_shows_the_victims(gateway: CannedGateway, invoke: Invoke) -> None:
    outcome = "load small on beast after unloading large."
    decision = {"dry_run": True, "outcome": outcome, "text": outcome, "node": "beast", "nodes": []}
    gateway.responses["POST", "/fleet/models/small/load"] = decision
    assert invoke("load", "small", "--dry-run").stdout == f"{outcome}\n", "the outcome is printed once"
    assert gateway.requests[-1][2] == {"dry_run": True}


def test_pinned_model_is_not_unloaded_by_a_script_without_yes(gateway: CannedGateway, invoke: Invoke) -> None:
    rejection = {"error": {"message": "small is pinned on beast; unpin it first.", "code": "model_in_use"}}
    gateway.responses["POST", "/fleet/models/small/unload"] = (409, rejection)
    outcome = invoke("unload", "small")
    assert outcome.code is ExitCode.FAILED
    assert "--yes" in outcome.error
    assert len(gateway.requests) == 1


def test_ps_lists_models_in_memory(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet({**READY, "pinned": True}, LOADING | {"id": "other"})
    shown = invoke("ps").stdout
    for part in ("small", "beast", "ready", "900 MiB", "12 min", "yes", "loading: read 50%, 4 s left"):
        assert part in shown
    assert [entry["model"]["id"] for entry in json.loads(invoke("ps", "--json").stdout)] == ["small", "other"]


def test_rm_asks_and_deletes_on_every_node_with_files(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet(files={"org/m": 3 << 30})
    gateway.responses["DELETE", "/fleet/nodes/beast/files/org/m?quant=Q4_K_M"] = {
        "node": "beast",
        "freed_bytes": 1 << 30,
    }
    assert invoke("rm", "org/m:Q4_K_M", stdin="n\n").code is ExitCode.INTERRUPTED
    assert all(request[0] == "GET" for request in gateway.requests)
    assert "1.0 GiB are free again" in invoke("rm", "org/m:Q4_K_M", "--yes").stdout
    assert invoke("rm", "org/other", "--yes").code is ExitCode.NOT_FOUND


REQUEST = {
    "id": "req_1",
    "number": 1,
    "time": 1.7e9,
    "key": "anna",
    "model": "small",
    "node": "beast",
    "status": 200,
    "outcome": "complete",
    "ttft_s": 0.25,
    "duration_s": 1.5,
    "tokens_per_s": 42.0,
    "prompt_tokens": 900,
    "cached_tokens": 800,
    "completion_tokens": 30,
    "error": None,
}


def test_logs_shows_requests_oldest_first(gateway: CannedGateway, invoke: Invoke) -> None:
    failed = REQUEST | {"number": 2, "status": 429, "error": "rate_limit_exceeded", "tokens_per_s": None}
    page = {"requests": [failed, REQUEST], "next": 2}
    gateway.responses["GET", "/fleet/activity?model=small&limit=5&after=0"] = page
    shown = invoke("logs", "--model", "small", "-n", "5").stdout.splitlines()
    for part in ("200", "0.25 s", "1.50 s", "42.0", "900 (800) 30", "beast", "anna", "small"):
        assert part in shown[1]
    assert shown[2].endswith("small  rate_limit_exceeded")
    listed = json.loads(invoke("logs", "--model", "small", "-n", "5", "--json").stdout)
    assert [request["number"] for request in listed] == [1, 2]


def test_followed_logs_show_each_request_once_also_after_a_restart(
    gateway: CannedGateway, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"requests": [REQUEST], "next": 7}
    gateway.responses["GET", "/fleet/activity?limit=20&after=0"] = first
    gateway.responses["GET", "/fleet/activity?limit=1000&after=7"] = {"requests": [], "next": 0}  # it has restarted
    after_restart = {"requests": [REQUEST | {"model": "later"}], "next": 1}
    gateway.responses["GET", "/fleet/activity?limit=1000&after=0"] = after_restart
    gateway.responses["GET", "/fleet/activity?limit=1000&after=1"] = {"requests": [], "next": 1}
    num_sleeps = iter(range(3))

    def sleep(_seconds: float) -> None:
        if next(num_sleeps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("cortex.cli.commands.logs.time.sleep", sleep)
    outcome = invoke("logs", "-f", "--json")
    assert outcome.code is ExitCode.INTERRUPTED
    assert [json.loads(line)["model"] for line in outcome.stdout.splitlines()] == ["small", "later"]


def test_move_loads_on_the_node_and_unloads_elsewhere(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet({**READY, "pinned": True, "pinned_by": "operator"})
    for order in ("load", "pin", "unload"):
        response = {"model": "small", "nodes": ["attic"], "job": job()}
        gateway.responses["POST", f"/fleet/models/small/{order}"] = response
    gateway.responses["GET", "/fleet/jobs/job_1"] = job()
    assert invoke("move", "small", "attic").stdout == "small is ready on attic; unloaded from beast\n"
    sent = [(path.rpartition("/")[2], body) for method, path, body, _ in gateway.requests if method == "POST"]
    assert sent == [
        ("load", {"node": "attic", "wait": False}),
        ("pin", {"node": "attic", "wait": False}),
        ("unload", {"node": "beast", "unpin": True, "wait": False}),
    ]


def test_run_pulls_loads_and_chats(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["POST", "/fleet/pull"] = {"job": job(kind="pull")}
    gateway.responses["POST", "/fleet/models/org%2Fm/load"] = {"model": "org/m", "nodes": ["beast"], "job": job()}
    gateway.responses["POST", "/v1/chat/completions"] = sse(delta(content="ok"))
    gateway.responses["GET", "/v1/models/org/m"] = (404, {"error": {"message": "none", "code": "model_not_found"}})
    assert invoke("run", "org/m", "Hi").stdout == "ok\n"
    paths = [path for method, path, _, _ in gateway.requests if method == "POST"]
    assert paths == ["/fleet/pull", "/fleet/models/org%2Fm/load", "/v1/chat/completions"]


def test_status_shows_devices_models_and_waiting_requests(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet(READY, {**LOADING, "id": "other"}, cold_models=["third"])
    outcome = invoke("status")
    assert outcome.code is ExitCode.OK
    for part in ("RTX 5090", "24.0 GiB of 32.0 GiB", "900 MiB", "8,192", "idle 12 min", "~5.0 GiB", "50% read, 4 s"):
        assert part in outcome.stdout
    assert "can load: third" in outcome.stdout
    assert "2 waiting for large" in outcome.stdout


def test_status_shows_the_part_that_a_node_has_of_a_model(gateway: CannedGateway, invoke: Invoke) -> None:
    share = {"model_id": "wide", "lead": "beast", "state": "ready", "devices": [0], "num_bytes": 3 << 30}
    gateway.responses["GET", "/fleet/status"] = fleet(shares=[share], cold_models=["other", "wide"])
    shown = invoke("status").stdout
    assert "part of wide, which beast serves: ready, 3.0 GiB" in shown
    assert "can load: other\n" in shown


def test_status_shows_why_a_node_is_down_and_exits_with_1(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet(up=False, problem="connection refused")
    outcome = invoke("status")
    assert outcome.code is ExitCode.FAILED
    assert "connection refused" in outcome.stdout


def test_status_as_json_is_the_response_of_the_gateway(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet(READY)
    assert json.loads(invoke("status", "--json").stdout) == fleet(READY)


def test_explain_keeps_devices_on_one_line_at_80_columns(
    gateway: CannedGateway, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = {"index": 0, "name": "NVIDIA RTX 6000 Ada", "chosen": True, "total_bytes": 48 << 30}
    memory = {"kept_free_bytes": 3 << 30, "have_bytes": 40 << 30, "need_bytes": 5 << 30}
    node = {
        "node": "attic",
        "verdict": "fits_after_eviction",
        "reason": "fits on device 0 after unloading a-model-with-a-long-name, which was unused for 40 minutes",
        "need_bytes": 5 << 30,
        "devices": [{**device, **memory}],
        "occupants": [{"model": "a-model-with-a-long-name", "bytes": 1 << 30, "may_leave": True, "reason": None}],
    }
    gateway.responses["GET", "/fleet/explain/m"] = {"at": 0, "node": "attic", "outcome": "loads", "nodes": [node]}
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    (line,) = [line for line in invoke("explain", "m").stdout.splitlines() if "RTX 6000" in line]
    assert all(part in line for part in ("0* NVIDIA RTX 6000 Ada", "48.0 GiB", "3.0 GiB", "40.0 GiB", "5.0 GiB"))


def test_explain_shows_needed_and_available_memory(gateway: CannedGateway, invoke: Invoke) -> None:
    device = {"index": 0, "name": "RTX 3060", "total_bytes": 12 << 30, "have_bytes": 1 << 30, "need_bytes": 5 << 30}
    node = {
        "node": "attic",
        "verdict": "too_small",
        "reason": "every device is too small",
        "need_bytes": 5 << 30,
        "devices": [{**device, "chosen": False, "kept_free_bytes": 3 << 30}],
        "occupants": [{"model": "small", "bytes": 1 << 30, "may_leave": False, "reason": "pinned"}],
    }
    decision = {"model": "large", "at": 0, "node": None, "outcome": "large fits nowhere", "nodes": [node]}
    gateway.responses["GET", "/fleet/explain/large"] = decision
    gateway.responses["GET", "/fleet/decisions?model=large"] = {"decisions": [decision]}
    for arguments in (("explain", "large"), ("explain", "large", "--history")):
        shown = invoke(*arguments).stdout
        for part in (
            "large fits nowhere",
            "attic",
            "0 RTX 3060",
            "5.0 GiB",
            "KEPT FREE",
            "3.0 GiB",
            "too small",
            "small holds 1.0 GiB: pinned",
        ):
            assert part in shown


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


def test_doctor_reports_an_invalid_config_as_a_problem(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("[gatewy]\n")
    outcome = invoke("doctor", "--json", "--config", str(config))
    assert outcome.code is ExitCode.FAILED
    problems = [finding for finding in json.loads(outcome.stdout) if finding["verdict"] == "problem"]
    assert any("gatewy" in finding["what"] and finding["remedy"] for finding in problems)


def test_doctor_reports_a_node_that_does_not_respond(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[[neurons]]\nname = "beast"\nendpoint = "http://127.0.0.1:9"\n')
    outcome = invoke("doctor", "--config", str(config))
    assert outcome.code is ExitCode.FAILED
    assert "beast: no response" in outcome.stdout
    assert "neuron serve" in outcome.stdout


def test_doctor_checks_names_and_addresses_against_each_other(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text(
        '[gateway]\nlisten = "127.0.0.1:9"\nmetrics_listen = "127.0.0.1:9"\n'
        '[[neurons]]\nname = "beast"\nendpoint = "http://localhost:8"\n'
        '[[neurons]]\nname = "twin"\nendpoint = "http://127.0.0.1:8/"\n'
    )
    (tmp_path / "models.toml").write_text(
        '[[models]]\nid = "big"\npinned_on = ["beast", "baest"]\n'
        '[[models]]\nid = "wide"\nnodes = ["beast", "benjy"]\nmin_devices = 2\n'
        '[aliases]\ngood = "big"\nlost = "bgi"\ntwice = "good"\n'
    )
    findings = json.loads(invoke("doctor", "--json", "--config", str(config)).stdout)
    found = {finding["what"]: finding["verdict"] for finding in findings if finding["topic"] == "config"}
    assert all(finding["remedy"] for finding in findings if finding["verdict"] != "fine")
    assert {what: verdict for what, verdict in found.items() if verdict != "fine"} == {
        "pinned_on of big names baest, and there is no such node": "problem",
        "nodes of wide names benjy, and there is no such node": "problem",
        "alias lost stands for bgi, which is not in the catalogue": "note",
        "alias twice stands for good, which is an alias itself": "problem",
        "127.0.0.1:9 is the address of gateway.listen and gateway.metrics_listen": "problem",
        "127.0.0.1:8 is the address of node beast and node twin": "problem",
    }


def test_doctor_reports_a_database_that_does_not_respond(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[ledger]\ndatabase = "postgresql://cortex:secret@127.0.0.1:9/usage"\n')
    outcome = invoke("doctor", "--json", "--config", str(config))
    (finding,) = [finding for finding in json.loads(outcome.stdout) if finding["topic"] == "database"]
    assert (outcome.code, finding["verdict"]) == (ExitCode.FAILED, "problem")
    assert finding["what"].startswith("postgresql at 127.0.0.1 cannot be used: ")
    assert "secret" not in outcome.stdout


def test_doctor_uses_the_gateway_address_of_the_config(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[gateway]\nlisten = "0.0.0.0:9"\nmetrics_listen = "127.0.0.1:7"\n')
    outcome = invoke("doctor", "--config", str(config), env={"CORTEX_URL": DEFAULT_URL})
    assert "no gateway at http://127.0.0.1:9" in outcome.stdout
    assert "127.0.0.1:7" in outcome.stdout
    assert "31313" not in outcome.stdout


def findings(outcome: Any, topic: str) -> dict[str, str]:
    """What `doctor --json` found about `topic`: text → verdict."""
    return {each["what"]: each["verdict"] for each in json.loads(outcome.stdout) if each["topic"] == topic}


def test_doctor_checks_nodes_that_are_found_by_dns(gateway: CannedGateway, invoke: Invoke, tmp_path: Any) -> None:
    gateway.responses["GET", "/discovery"] = {"host": "h", "os": "Linux", "version": "0", "devices": []}
    port = gateway.url.rpartition(":")[2]
    (tmp_path / "cortex.toml").write_text(f'[discovery]\ndns = "localhost"\nport = {port}\n')
    (tmp_path / "models.toml").write_text('[[models]]\nid = "m"\nonly_on = ["127.0.0.1"]\n')
    outcome = invoke("doctor", "--json", "--config", str(tmp_path / "cortex.toml"))
    assert "127.0.0.1: " in findings(outcome, "nodes")
    assert any("localhost resolves to" in what and "127.0.0.1" in what for what in findings(outcome, "config"))
    assert "problem" not in findings(outcome, "config").values()


def test_doctor_reports_a_name_without_nodes(invoke: Invoke, tmp_path: Any) -> None:
    (tmp_path / "cortex.toml").write_text('[discovery]\ndns = "no-such-name.invalid"\n')
    outcome = invoke("doctor", "--json", "--config", str(tmp_path / "cortex.toml"))
    assert outcome.code is ExitCode.FAILED
    assert any("no-such-name.invalid resolves to no node" in what for what in findings(outcome, "config"))


def test_doctor_recognises_a_port_that_cortex_uses(gateway: CannedGateway, invoke: Invoke, tmp_path: Any) -> None:
    gateway.responses["GET", "/health"] = {"status": "ok"}
    address = gateway.url.removeprefix("http://")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        (tmp_path / "cortex.toml").write_text(f'[gateway]\nlisten = "{address}"\nmetrics_listen = "{taken}"\n')
        found = findings(invoke("doctor", "--json", "--config", str(tmp_path / "cortex.toml")), "ports")
    assert found[f"{address} is in use by cortex"] == "fine"
    assert found[f"{taken}: Address already in use"] == "note"


def test_doctor_does_not_send_to_neuron_for_a_foreign_server(invoke: Invoke, tmp_path: Any) -> None:
    (tmp_path / "cortex.toml").write_text('[[neurons]]\nname = "x"\nendpoint = "http://127.0.0.1:9"\nkind = "openai"\n')
    shown = invoke("doctor", "--config", str(tmp_path / "cortex.toml")).stdout
    assert "start it, or correct its endpoint" in shown


def test_neuron_doctor_reports_what_would_keep_the_node_from_starting(tmp_path: Any) -> None:
    config = tmp_path / "neuron.toml"
    config.write_text(f'key_file = "neuron.key"\n[harness.torch]\nhf_cache = "{tmp_path}/models"\n')
    result = CliRunner().invoke(neuron, ["doctor", "--json", "--config", str(config)], standalone_mode=False)
    assert result.return_value == ExitCode.FAILED
    assert any("cannot read key_file" in what for what in findings(result, "config"))
    assert any(f"model cache {tmp_path}/models" in what for what in findings(result, "disk"))


def test_neuron_doctor_notes_a_node_that_needs_a_key(tmp_path: Any) -> None:
    config = tmp_path / "neuron.toml"
    config.write_text("")
    result = CliRunner().invoke(neuron, ["doctor", "--json", "--config", str(config)], standalone_mode=False)
    assert result.return_value == ExitCode.OK
    assert any("without a key" in what and verdict == "note" for what, verdict in findings(result, "config").items())


def test_discover_divides_the_cpu_as_configured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "neuron.toml").write_text("cpu_devices = 2\n")
    result = CliRunner().invoke(neuron, ["discover", "--json", "--config", str(tmp_path / "neuron.toml")])
    assert [device["index"] for device in json.loads(result.stdout)["devices"]] == [0, 1]


def test_key_that_has_expired_already_is_not_made(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("")
    outcome = invoke("keys", "add", "anna", "--expires", "2020-01-31", "--config", str(config))
    assert (outcome.code, config.read_text()) == (ExitCode.USAGE, "")
    assert "in the future" in outcome.error


def test_operator_key_is_added_and_listed(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("")
    assert json.loads(invoke("keys", "add", "olga", "--operator", "--config", str(config), "--json").stdout)["operator"]
    assert "operator = true" in config.read_text()
    assert "yes" in invoke("keys", "list", "--config", str(config)).stdout


@pytest.mark.parametrize("arguments", [("-h",), ("status", "-h"), ("keys", "-h"), ("keys", "add", "-h")])
def test_short_help_option_works_everywhere(invoke: Invoke, arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).stdout.startswith("Usage: ")


def test_serve_uses_the_configuration_in_the_working_directory(
    invoke: Invoke, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cortex.toml").write_text("[gatway]\n")
    monkeypatch.chdir(tmp_path)
    outcome = invoke("serve")
    assert outcome.code is ExitCode.CONFIG
    assert "unknown key gatway in cortex.toml line 1" in outcome.error


def test_short_options_name_the_gateway_and_the_configuration(
    invoke: Invoke, gateway: CannedGateway, tmp_path: Any
) -> None:
    elsewhere = {"CORTEX_URL": "http://127.0.0.1:9"}
    gateway.responses["GET", "/v1/models"] = MODELS
    assert invoke("models", "-e", gateway.url, env=elsewhere).code is ExitCode.OK
    assert invoke("serve", "-c", str(tmp_path / "absent.toml")).code is ExitCode.CONFIG


def test_doctor_counts_one_node_in_the_singular(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[[neurons]]\nname = "beast"\nendpoint = "http://127.0.0.1:9"\n')
    shown = invoke("doctor", "--config", str(config)).stdout
    assert "cortex.toml: 1 node\n" in shown
    assert "1 problem to fix" in shown


def test_doctor_names_the_address_of_an_unreachable_node_once(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[[neurons]]\nname = "beast"\nendpoint = "http://127.0.0.1:9"\n')
    findings = json.loads(invoke("doctor", "--json", "--config", str(config)).stdout)
    (finding,) = [finding for finding in findings if finding["topic"] == "nodes"]
    assert finding["what"] == "beast: no response from http://127.0.0.1:9 (Connection refused)"


@pytest.mark.parametrize("group", [cortex, neuron], ids=["cortex", "neuron"])
def test_every_command_has_a_short_help(group: click.Group) -> None:
    for name, command in group.commands.items():
        assert command.help, f"{name} has no help"
        assert not command.get_short_help_str(60).endswith("..."), f"the first line of {name}'s help is too long"


@pytest.mark.parametrize("group", [cortex, neuron], ids=["cortex", "neuron"])
def test_help_fits_80_columns(group: click.Group) -> None:
    for arguments in ([], *([name] for name in group.commands)):
        shown = CliRunner().invoke(group, [*arguments, "-h"], terminal_width=80).output
        assert max(map(len, shown.splitlines())) <= 80, shown


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999", "http://127.0.0.1:x", "http://[::1", "ftp://host", "http://"]
)
def test_address_that_is_none_is_a_usage_error(invoke: Invoke, url: str) -> None:
    outcome = invoke("status", "--url", url)
    assert outcome.code is ExitCode.USAGE
    assert f"{url} is not a gateway address" in outcome.error


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
        (400, "invalid_value", "There is no node x; the fleet has local.", "There is no node x; the fleet has local"),
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


def test_unknown_job_is_not_found(gateway: CannedGateway, invoke: Invoke) -> None:
    missing = {"error": {"message": "There is no job x; GET /fleet/jobs lists the latest.", "code": "route_not_found"}}
    gateway.responses["DELETE", "/fleet/jobs/x"] = (404, missing)
    outcome = invoke("jobs", "--cancel", "x")
    assert outcome.code is ExitCode.NOT_FOUND
    assert outcome.error == "There is no job x; list them with `cortex jobs`"


def test_added_key_leaves_a_valid_config(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('# mine\n[gateway]\nlisten = "127.0.0.1:1"\n')
    made = json.loads(invoke("keys", "add", 'an"na', "--model", "small*", "--config", str(config), "--json").stdout)
    assert made["key"].startswith("ck-")
    assert made["key"] not in config.read_text()
    assert config.read_text().startswith("# mine\n")
    (listed,) = json.loads(invoke("keys", "list", "--config", str(config), "--json").stdout)
    assert (listed["name"], listed["id"], listed["models"]) == ('an"na', made["id"], ["small*"])
    assert not listed["operator"]
    assert 'an"na' in invoke("keys", "list", "--config", str(config)).stdout


def test_key_without_a_config_is_printed_as_toml(invoke: Invoke) -> None:
    shown = invoke("keys", "add", "anna").stdout
    assert "ck-" in shown
    assert "[[keys]]" in shown


def test_key_is_not_added_to_an_invalid_config(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("[gatewy]\n")
    assert invoke("keys", "add", "anna", "--config", str(config)).code is ExitCode.CONFIG
    assert config.read_text() == "[gatewy]\n"


KEYED = """# mine
[gateway]
listen = "127.0.0.1:1"

[[keys]]
name = "anna"
id = "aaaaaaaa"
sha256 = "{0}"

# bert is on leave
[[keys]]
name = "bert"
id = 'bbbbbbbb'
sha256 = "{0}"
models = [
  "small*",
]

[[keys]]
name = "bert"
id = "cccccccc"
sha256 = "{0}"

[eviction]
strategy = "priority"
""".format("0" * 64)


def test_removing_a_key_keeps_the_rest_of_the_file(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text(KEYED)
    assert "anna" in invoke("keys", "remove", "anna", "--config", str(config)).stdout
    assert config.read_text() == KEYED.replace(KEYED[KEYED.index("[[keys]]") : KEYED.index("\n# bert")], "")
    removed = json.loads(invoke("keys", "remove", "bbbbbbbb", "--config", str(config), "--json").stdout)
    assert removed == {"removed": {"name": "bert", "id": "bbbbbbbb"}}
    assert [key["id"] for key in json.loads(invoke("keys", "list", "--config", str(config), "--json").stdout)] == [
        "cccccccc"
    ]
    assert "rejects every request" in invoke("keys", "remove", "bert", "--config", str(config)).stdout
    assert config.read_text().endswith('[eviction]\nstrategy = "priority"\n')


def test_unknown_or_ambiguous_key_is_not_removed(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text(KEYED)
    assert invoke("keys", "remove", "carl", "--config", str(config)).code is ExitCode.NOT_FOUND
    twice = invoke("keys", "remove", "bert", "--config", str(config))
    assert twice.code is ExitCode.USAGE
    assert "bbbbbbbb, cccccccc" in twice.error
    config.write_text(f'keys = [{{ name = "anna", id = "aaaaaaaa", sha256 = "{"0" * 64}" }}]\n')
    assert "by hand" in invoke("keys", "remove", "anna", "--config", str(config)).error


def test_usage_shows_the_contents_of_the_ledger(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[ledger]\ndatabase = "books.db"\n')
    assert invoke("usage", "--config", str(config)).code is ExitCode.NOT_FOUND
    store = open_store(str(tmp_path / "books.db"))
    slot = Slot.at(time.time(), key_id="abcdefgh", key_name="anna", model="small", node="beast")
    store.exchange({slot: Counts(requests=2, usage=Usage(prompt_tokens=1000, completion_tokens=234))}, {})
    store.close()
    shown = invoke("usage", "--config", str(config)).stdout
    assert "anna" in shown
    assert "1,234" in shown
    (row,) = json.loads(invoke("usage", "--config", str(config), "--by", "model", "--json").stdout)
    assert (row["id"], row["requests"], row["cost"]) == ("small", 2, 0.0)
    (tmp_path / "models.toml").write_text('[[models]]\nid = "small"\ncost = { input = 5.0, output = 1000.0 }\n')
    assert "0.2390" in invoke("usage", "--config", str(config)).stdout


def test_keys_list_shows_expiry_and_what_is_left(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("")
    options = ("--balance-tokens", "1000", "--window-tokens", "500", "--expires", "2099-01-31")
    made = json.loads(invoke("keys", "add", "anna", *options, "--config", str(config), "--json").stdout)
    store = open_store(str(tmp_path / "cortex-spend.db"))
    slot = Slot.at(time.time(), key_id=made["id"], key_name="anna", model="small", node="beast")
    store.exchange({slot: Counts(requests=2, usage=Usage(prompt_tokens=100, completion_tokens=34))}, {})
    store.close()
    assert invoke("keys", "change", "anna", "--expires", "2020-01-31", "--config", str(config)).code is ExitCode.OK
    (listed,) = json.loads(invoke("keys", "list", "--config", str(config), "--json").stdout)
    assert (listed["balance_left_tokens"], listed["window_left_tokens"], listed["is_expired"]) == (866, 366, True)
    shown = invoke("keys", "list", "--config", str(config)).stdout
    assert "2020-01-31 (expired)" in shown
    assert "866 of 1,000" in shown
    assert "366 of 500 in 24 h" in shown
    assert invoke("keys", "add", "bert", "--expires", "soon").code is ExitCode.USAGE


def test_key_is_changed_in_place(invoke: Invoke, tmp_path: Any) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text(KEYED)
    limits = ("--balance-tokens", "5", "--expires", "2030-01-31")
    assert invoke("keys", "change", "anna", *limits, "--config", str(config)).code is ExitCode.OK
    (anna, *others) = json.loads(invoke("keys", "list", "--config", str(config), "--json").stdout)
    assert (anna["balance_tokens"], anna["expires"], len(others)) == (5, "2030-01-31", 2)
    assert "# bert is on leave\n" in config.read_text()
    changed = invoke("keys", "change", "bbbbbbbb", "--without", "model", "--config", str(config), "--json")
    assert json.loads(changed.stdout)["models"] == []
    before = config.read_text()
    assert invoke("keys", "change", "anna", "--expires", "soon", "--config", str(config)).code is ExitCode.USAGE
    assert invoke("keys", "change", "anna", "--config", str(config)).code is ExitCode.USAGE
    assert invoke("keys", "change", "carl", *limits, "--config", str(config)).code is ExitCode.NOT_FOUND
    assert config.read_text() == before
