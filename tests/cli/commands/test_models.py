"""Commands that load, unload, move and delete models."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from cortex.cli.client import GatewayClient
from cortex.cli.failures import ExitCode

from ..canned_responses import FAILED, READY, delta, fleet, job, sse

if TYPE_CHECKING:
    from ..conftest import CannedGateway, Invoke


@pytest.mark.parametrize(
    ("arguments", "path", "body"),
    [
        (("load", "small"), "/fleet/models/small/load", {"wait": False}),
        (("load", "small", "--node", "beast"), "/fleet/models/small/load", {"node": "beast", "wait": False}),
        (("unload", "small", "--no-wait", "--force"), "/fleet/models/small/unload", {"force": True, "wait": False}),
        (("unload", "small", "--sleep"), "/fleet/models/small/unload", {"sleep": True, "wait": False}),
        (("unload", "small", "--yes"), "/fleet/models/small/unload", {"unpin": True, "wait": False}),
        (("pin", "owner/name"), "/fleet/models/owner%2Fname/pin", {"wait": False}),
        (("unpin", "small"), "/fleet/models/small/unpin", {}),
        (("drain", "beast"), "/fleet/nodes/beast/drain", {}),
        (("undrain", "beast"), "/fleet/nodes/beast/undrain", {}),
        (("pull", "org/m:Q4_K_M"), "/fleet/pull", {"model": "org/m", "quant": "Q4_K_M"}),
        (("pull", "org/m", "--node", "beast"), "/fleet/pull", {"model": "org/m", "nodes": ["beast"]}),
        (("pull", "org/m", "--to", "a", "--to", "b"), "/fleet/pull", {"model": "org/m", "nodes": ["a", "b"]}),
        (("copy", "org/m", "a", "b"), "/fleet/pull", {"model": "org/m", "nodes": ["a", "b"], "copy": True}),
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


def test_forget_size_says_what_the_model_counts_as_on_each_node(gateway: CannedGateway, invoke: Invoke) -> None:
    nodes = [
        {"node": "beast", "estimate_bytes": 3 << 30, "error": None},
        {"node": "attic", "estimate_bytes": 0, "error": None},
        {"node": "old", "estimate_bytes": None, "error": "no such route"},
    ]
    gateway.responses["DELETE", "/fleet/models/org%2Fm/size?node=b%20x"] = {"model": "org/m", "nodes": nodes}
    shown = invoke("forget-size", "org/m", "--node", "b x")
    assert shown.code is ExitCode.OK
    assert shown.stdout.splitlines() == [
        "org/m on beast counts as 3.0 GiB from now on",
        "org/m on attic has no size from now on",
        "old: no such route",
    ]


def test_forget_says_what_is_gone_from_each_node_and_which_failed(gateway: CannedGateway, invoke: Invoke) -> None:
    assert invoke("forget").code is ExitCode.USAGE
    assert invoke("forget", "--node", "beast").code is ExitCode.USAGE
    assert not gateway.requests
    done = {"node": "beast", "files": 2, "bytes": 3 << 30, "error": None}
    gateway.responses["POST", "/fleet/forget"] = {"nodes": [done]}
    shown = invoke("forget", "--key", "ada", "--unused-days", "1", "--node", "beast")
    assert (shown.code, gateway.requests[-1][2]) == (ExitCode.OK, {"key": "ada", "unused_s": 86400.0, "node": "beast"})
    assert shown.stdout.splitlines() == ["beast: deleted 2 files, 3.0 GiB"]
    failed = {"node": "attic", "files": 0, "bytes": 0, "error": "the node did not respond: refused"}
    gateway.responses["POST", "/fleet/forget"] = {"nodes": [done, failed]}
    shown = invoke("forget", "--all")
    assert (shown.code, gateway.requests[-1][2]) == (ExitCode.UNREACHABLE, {"everything": True})
    assert shown.stdout.splitlines() == [
        "beast: deleted 2 files, 3.0 GiB on disk, and all in memory",
        "attic: the node did not respond: refused",
    ]


def test_drain_waits_until_the_running_requests_have_ended(
    gateway: CannedGateway, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.responses["POST", "/fleet/nodes/beast/drain"] = {"node": "beast", "drained": True}
    gateway.responses["GET", "/fleet/status"] = fleet({**READY, "in_flight": 2})

    def end_requests(_seconds: float) -> None:
        gateway.responses["GET", "/fleet/status"] = fleet({**READY, "in_flight": 0, "load": {}})

    monkeypatch.setattr("cortex.cli.commands.nodes.time.sleep", end_requests)
    shown = invoke("drain", "beast", "--wait").stdout
    assert shown == "beast gets no new requests\n2 requests still running\nbeast is idle\n"


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
    gateway.responses["GET", "/fleet/status"] = fleet({"id": "small", "state": "ready"})
    outcome = invoke("load", "small")
    assert (outcome.stderr, outcome.stdout) == ("small: read\n", "small is ready on beast\n")
    sizes = [{"tokens": 256, "num_bytes": 1 << 20}]
    contexts = {
        "limit_tokens": 131072,
        "full_tokens": 131072,
        "wanted_tokens": 32768,
        "empty_tokens": 131072,
        "full_bytes": 1 << 30,
        "sizes": sizes,
    }
    short = {"id": "small", "state": "ready", "context_tokens": 4480, "contexts": contexts}
    gateway.responses["GET", "/fleet/status"] = fleet(short)
    elsewhere = {**fleet(short)["nodes"][0], "name": "attic", "models": [{**short, "context_tokens": 131072}]}
    gateway.responses["GET", "/fleet/status"]["nodes"].append(elsewhere)
    assert invoke("load", "small").stdout == "small is ready on beast: context 4,480 of 131,072 tokens\n"
    shown = invoke("status").stdout
    assert "4,480 of 131,072" in shown
    assert "small: context limited to 4,480 of 131,072 tokens by memory" in shown
    assert json.loads(invoke("load", "small", "--json").stdout)["model"] == "small", "progress is not in the way"
    assert "job_1" in invoke("load", "small", "--no-wait").stdout


def test_interrupt_cancels_the_job(gateway: CannedGateway, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cortex.cli.views.time.sleep", interrupt)
    running = job("running", can_cancel=True)
    gateway.responses["POST", "/fleet/models/small/load"] = {"model": "small", "nodes": ["beast"], "job": running}
    gateway.responses["DELETE", "/fleet/jobs/job_1"] = job("cancelled")
    assert invoke("load", "small").code is ExitCode.INTERRUPTED
    assert gateway.requests[-1][:2] == ("DELETE", "/fleet/jobs/job_1")


def test_second_interrupt_does_not_keep_the_job_from_being_cancelled(
    gateway: CannedGateway, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    def interrupted(client: GatewayClient, path: str) -> Any:
        signal.raise_signal(signal.SIGINT)
        return delete(client, path)

    delete = GatewayClient.delete
    monkeypatch.setattr(GatewayClient, "delete", interrupted)
    monkeypatch.setattr("cortex.cli.views.time.sleep", interrupt)
    running = job("running", can_cancel=True)
    gateway.responses["POST", "/fleet/models/small/load"] = {"model": "small", "nodes": ["beast"], "job": running}
    gateway.responses["DELETE", "/fleet/jobs/job_1"] = job("cancelled")
    outcome = invoke("load", "small")
    assert outcome.code is ExitCode.INTERRUPTED
    assert "is cancelled" in outcome.stderr
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


def test_rm_asks_and_deletes_on_every_node_with_files(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/created"] = {"models": []}
    gateway.responses["GET", "/fleet/status"] = fleet(files={"org/m": 3 << 30})
    gateway.responses["DELETE", "/fleet/nodes/beast/files/org/m?quant=Q4_K_M"] = {
        "node": "beast",
        "freed_bytes": 1 << 30,
    }
    assert invoke("rm", "org/m:Q4_K_M", stdin="n\n").code is ExitCode.INTERRUPTED
    assert all(request[0] == "GET" for request in gateway.requests)
    assert "1.0 GiB are free again" in invoke("rm", "org/m:Q4_K_M", "--yes").stdout
    assert invoke("rm", "org/other", "--yes").code is ExitCode.NOT_FOUND


def test_rm_deletes_a_created_model_and_no_files_of_its_source(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/created"] = {"models": ["pirate"]}
    gateway.responses["GET", "/fleet/status"] = fleet(files={"pirate": 3 << 30})
    gateway.responses["DELETE", "/fleet/created/pirate"] = {"model": "pirate"}
    assert invoke("rm", "pirate", stdin="n\n").code is ExitCode.INTERRUPTED
    assert invoke("rm", "pirate", "--yes").stdout == "pirate deleted\n"
    assert [path for method, path, _, _ in gateway.requests if method == "DELETE"] == ["/fleet/created/pirate"]


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


@pytest.mark.parametrize("command", ["pull", "run"])
def test_name_that_is_not_of_the_hub_says_what_to_name(gateway: CannedGateway, invoke: Invoke, command: str) -> None:
    rejection = {"error": {"message": "qwen is no model of this gateway", "code": "model_not_found"}}
    gateway.responses["POST", "/fleet/pull"] = gateway.responses["GET", "/v1/models/qwen"] = (404, rejection)
    outcome = invoke(command, "qwen")
    assert outcome.code is ExitCode.NOT_FOUND
    assert outcome.error.startswith("qwen is no model of this gateway; name a repository of the hub")


def test_run_pulls_loads_and_chats(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["POST", "/fleet/pull"] = {"job": job(kind="pull")}
    gateway.responses["POST", "/fleet/models/org%2Fm/load"] = {"model": "org/m", "nodes": ["beast"], "job": job()}
    gateway.responses["POST", "/v1/chat/completions"] = sse(delta(content="ok"))
    gateway.responses["GET", "/v1/models/org/m"] = (404, {"error": {"message": "none", "code": "model_not_found"}})
    assert invoke("run", "org/m", "Hi").stdout == "ok\n"
    paths = [path for method, path, _, _ in gateway.requests if method == "POST"]
    assert paths == ["/fleet/pull", "/fleet/models/org%2Fm/load", "/v1/chat/completions"]
    q4_k_m = {"requested_quant": "Q4_K_M", "quant": "q4_k"}
    for held in (q4_k_m, {"requested_quant": "q4", "quant": "q4_k"}, {"quant": "q4_k"}, {"state": "failed"}):
        gateway.responses["GET", "/fleet/status"] = fleet({**READY, "id": "org/m", **held})
        assert invoke("run", "org/m:Q4", "Hi").stdout == "ok\n"


def test_run_does_not_chat_with_another_quantisation_than_the_requested_one(
    gateway: CannedGateway, invoke: Invoke
) -> None:
    gateway.responses["GET", "/fleet/status"] = fleet({**READY, "id": "org/m", "quant": "q4_k"})
    outcome = invoke("run", "org/m:q8", "Hi")
    assert outcome.code is ExitCode.FAILED
    assert "org/m is in memory on beast as q4_k, not as q8; unload it first with `cortex unload org/m`" in outcome.error
    assert all(request[0] == "GET" for request in gateway.requests)


def test_models_shows_where_the_model_is_in_another_state(gateway: CannedGateway, invoke: Invoke) -> None:
    down, loading, ready = (
        {"node": node, "status": status}
        for node, status in (("attic", "unreachable"), ("barn", "loading"), ("cellar", "ready"))
    )
    gateway.responses["GET", "/v1/models"] = {
        "data": [
            {"id": "served", "loaded": True, "locations": [down, loading, ready]},
            {"id": "soon", "loaded": False, "locations": [down, loading]},
            {"id": "lost", "loaded": False, "locations": [down]},
            {"id": "sleeping", "loaded": False, "locations": [down, down | {"node": "den", "status": "suspended"}]},
            {"id": "group", "loaded": True, "locations": [ready | {"nodes": ["cellar", "barn"]}]},
        ]
    }
    lines = [" ".join(line.split()) for line in invoke("models").stdout.splitlines()]
    assert "served ready attic (unreachable), barn (loading), cellar" in lines
    assert "soon loading attic (unreachable), barn" in lines
    assert "lost unreachable attic" in lines
    assert "sleeping suspended attic (unreachable), den" in lines
    assert "group ready cellar + barn" in lines


def test_models_say_where_files_were_looked_for(gateway: CannedGateway, invoke: Invoke) -> None:
    reason = "m: there is no complete model at /srv/m.gguf"
    missing = {"id": "m", "feasible_on": [], "problems": {"attic": reason}}
    elsewhere = {"id": "other", "feasible_on": ["beast"], "problems": {"attic": reason}}
    gateway.responses["GET", "/v1/models"] = {"data": [missing, elsewhere, missing | {"id": "alias", "alias_of": "m"}]}
    shown = invoke("models").stdout
    assert shown.count("there is no complete model") == 1
    assert "m on attic: there is no complete model at /srv/m.gguf" in shown


def test_models_say_why_the_last_load_failed_and_name_only_known_quantisations(
    gateway: CannedGateway, invoke: Invoke
) -> None:
    failed = {"id": "m", "feasible_on": ["beast"], "failures": {"beast": "m: broken disk"}}
    sizes = [{"quant": None, "dtype": None, "bytes": 3 << 30, "nodes": ["beast"]}]
    foreign = {"id": "phi", "loaded": True, "failures": {"attic": "no driver"}, "sizes": sizes}
    dense = {"id": "own", "loaded": True, "sizes": [sizes[0] | {"dtype": "BF16"}]}
    gateway.responses["GET", "/v1/models"] = {"data": [failed, foreign, dense, failed | {"id": "x", "alias_of": "m"}]}
    shown = invoke("models").stdout
    assert shown.count("m on beast: broken disk\n") == 1
    assert "no driver" not in shown, "another node serves it"
    assert [line.split()[0] for line in shown.splitlines() if "dense" in line] == ["own"]
