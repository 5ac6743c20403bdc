"""What an operator reads: usage and keys from a gateway, previews, messages about files."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from cortex.cli.failures import ExitCode
from cortex.cli.up.command import print_ready
from cortex.cli.up.plan import UpPlan
from cortex.cli.up.run_files import Ports
from cortex.cli.up.sources import ModelSource

if TYPE_CHECKING:
    from pathlib import Path

    from ..conftest import CannedGateway, Invoke

USAGE = {
    "by": "key",
    "is_recorded": True,
    "rows": [{"id": "abcdefgh", "name": "anna", "requests": 2, "prompt_tokens": 1000, "completion_tokens": 234}],
}
KEY = {"name": "anna", "id": "abcdefgh", "operator": True, "balance_tokens": 1000, "balance_left_tokens": 866}


class AnyQuery(dict[tuple[str, str], Any]):
    """Canned responses whose paths match whatever the query is."""

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        method, path = key
        return super().get((method, path.partition("?")[0]), default)


def test_usage_without_a_configuration_asks_the_gateway(
    gateway: CannedGateway, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gateway.responses = AnyQuery({("GET", "/fleet/usage"): USAGE})
    shown = invoke("usage", "--days", "1").stdout
    assert re.search(r"anna +2 +1,000 +0 +234 +0 +1,234", shown)
    path = gateway.requests[-1][1]
    assert re.fullmatch(r"/fleet/usage\?by=key&since=\d+&until=\d+", path)
    (row,) = json.loads(invoke("usage", "--json").stdout)
    assert (row["id"], row["requests"]) == ("abcdefgh", 2)


@pytest.mark.parametrize(("days", "words"), [("1", "last 1 day\n"), ("2", "last 2 days\n"), ("0.5", "last 0.5 days\n")])
def test_no_usage_is_said_in_whole_words(gateway: CannedGateway, invoke: Invoke, days: str, words: str) -> None:
    gateway.responses = AnyQuery({("GET", "/fleet/usage"): USAGE | {"rows": []}})
    assert invoke("usage", "--days", days).stdout.endswith(words)


def test_usage_of_a_gateway_that_records_nothing_says_why(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses = AnyQuery({("GET", "/fleet/usage"): USAGE | {"is_recorded": False, "rows": []}})
    outcome = invoke("usage")
    assert outcome.code is ExitCode.NOT_FOUND
    assert "once it has keys" in outcome.error


def test_keys_without_a_configuration_are_those_of_the_gateway(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/keys"] = {"keys": [KEY], "is_open": False}
    shown = invoke("keys", "list").stdout
    assert re.search(r"anna +abcdefgh +all +yes", shown)
    assert "866 of 1,000" in shown


@pytest.mark.parametrize("command", [("usage",), ("keys", "list")])
def test_configuration_in_the_working_directory_is_used_unless_a_gateway_is_named(
    gateway: CannedGateway, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CORTEX_URL", raising=False)
    (tmp_path / "cortex.toml").write_text("")
    invoke(*command, env={"CORTEX_URL": ""})
    assert gateway.requests == []
    invoke(*command, "--url", gateway.url)
    assert len(gateway.requests) == 1


def test_unreachable_gateway_names_both_ways_to_the_ledger(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = invoke("usage", "--url", "http://127.0.0.1:1")
    assert outcome.code is ExitCode.UNREACHABLE
    assert "--config" in outcome.error


def test_dry_run_of_an_unload_shows_requests_and_pins(gateway: CannedGateway, invoke: Invoke) -> None:
    preview = {"model": "small", "nodes": ["a", "b"], "in_flight": {"a": 1, "b": 0}, "pinned_on": ["b"]}
    gateway.responses["POST", "/fleet/models/small/unload"] = {"dry_run": True} | preview
    assert invoke("unload", "small", "--dry-run").stdout.splitlines() == [
        "unload small from a: 1 request in progress",
        "unload small from b: idle, pinned, so it asks first",
    ]
    assert gateway.requests[-1][2] == {"dry_run": True}


def test_files_outside_the_hub_cache_are_named_and_not_deleted(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses["GET", "/fleet/created"] = {"models": []}
    demo = {"id": "demo", "state": "ready", "source": "/home/anna/.cache/cortex/models/demo.gguf"}
    node = {"name": "local", "kind": "neuron", "up": True, "models": [demo]}
    gateway.responses["GET", "/fleet/status"] = {"version": "1", "nodes": [node]}
    outcome = invoke("rm", "demo", "--yes")
    assert "at /home/anna/.cache/cortex/models/demo.gguf, outside the nodes' hub caches" in outcome.error
    assert all(request[0] == "GET" for request in gateway.requests)


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("hub_unavailable", 502, ExitCode.UNREACHABLE),
        ("upstream_unavailable", 502, ExitCode.UNREACHABLE),
        ("draining", 503, ExitCode.UNREACHABLE),
        ("source_not_found", 502, ExitCode.NOT_FOUND),
        ("disk_full", 507, ExitCode.NO_ROOM),
        ("load_failed", 502, ExitCode.FAILED),
    ],
)
def test_failed_download_has_the_exit_code_of_its_cause(
    gateway: CannedGateway, invoke: Invoke, code: str, status: int, exit_code: ExitCode
) -> None:
    error = {"message": "it failed", "code": code, "status": status}
    job = {"id": "job_1", "kind": "pull", "model": "org/m", "nodes": ["a"], "state": "failed", "error": error}
    gateway.responses["POST", "/fleet/pull"] = {"job": job}
    gateway.responses["GET", "/fleet/jobs/job_1"] = job
    assert invoke("pull", "org/m").code is exit_code


def test_columns_of_logs_are_aligned(gateway: CannedGateway, invoke: Invoke) -> None:
    request = {
        "time": 1.7e9,
        "status": 200,
        "outcome": "complete",
        "ttft_s": 0.25,
        "duration_s": 1.5,
        "tokens_per_s": 42.0,
        "prompt_tokens": 123456,
        "cached_tokens": 120000,
        "completion_tokens": 3000,
        "error": None,
    }
    requests = [
        request | {"node": "a-node-with-a-long-name", "key": "anna", "model": "small"},
        request | {"node": "n", "key": "a-key-with-a-long-name", "model": "large", "prompt_tokens": 5},
    ]
    gateway.responses = AnyQuery({("GET", "/fleet/activity"): {"requests": requests, "next": 2}})
    shown = invoke("logs").stdout.splitlines()
    for title, cells in (("NODE", ("n ", "a-node")), ("KEY", ("a-key", "anna")), ("MODEL", ("large", "small"))):
        start = shown[0].index(title)
        assert [line[start:].startswith(cell) for line, cell in zip(shown[1:], cells, strict=True)] == [True, True]


def test_logs_since_reads_the_request_log(gateway: CannedGateway, invoke: Invoke) -> None:
    gateway.responses = AnyQuery({("GET", "/fleet/activity"): {"requests": [], "next": 0}})
    for since, expected in (("2026-11-01T00:00:00+00:00", "since=1793491200"), ("7d", "since=1")):
        assert invoke("logs", "--since", since).stdout == "no requests yet\n"
        assert expected in gateway.requests[-1][1]
    assert invoke("logs", "--since", "soon").code is ExitCode.USAGE
    assert invoke("logs", "--since", "7d", "--follow").code is ExitCode.USAGE


def test_printed_curl_carries_a_key_only_where_the_gateway_has_keys(tmp_path: Path) -> None:
    def printed(*, has_keys: bool) -> str:
        plan = UpPlan(
            host="127.0.0.1",
            ports=Ports(gateway=31313, metrics=31314, neuron=13131),
            models=(ModelSource("m", "org/m"),),
            config=tmp_path / "cortex.toml",
            folder=tmp_path,
            tls_cert=None,
            has_keys=has_keys,
            environment={},
        )
        console = Console(width=80)
        with console.capture() as captured:
            print_ready(console, plan, ["m"], 1.0)
        return captured.get()

    assert '-H "authorization: Bearer $CORTEX_API_KEY"' in printed(has_keys=True)
    assert "authorization" not in printed(has_keys=False)


def test_filter_that_the_gateway_rejects_is_a_mistake_in_the_command_line(
    gateway: CannedGateway, invoke: Invoke
) -> None:
    error = {"message": "Invalid value for 'status': use a status such as 200.", "code": "invalid_value"}
    gateway.responses["GET", "/fleet/activity?status=banana&limit=20&after=0"] = (400, {"error": error})
    assert invoke("logs", "--status", "banana").code is ExitCode.USAGE


def test_audit_shows_who_did_what_oldest_first(gateway: CannedGateway, invoke: Invoke) -> None:
    entry = {"at": 1.8e9, "key_id": "abcdefgh", "key_name": "anna", "client": "10.0.0.1", "status": 201}
    entries = [entry | {"action": "DELETE /keys/b", "detail": ""}, entry | {"action": "POST /keys", "detail": "{}"}]
    gateway.responses = AnyQuery({("GET", "/fleet/audit"): {"entries": entries}})
    shown = invoke("audit", "--since", "7d", "--key", "anna").stdout
    assert re.search(r"anna +10\.0\.0\.1 +201 +POST /keys +\{\}\n.*DELETE /keys/b", shown)
    assert re.fullmatch(r"/fleet/audit\?limit=20&key=anna&since=\d+", gateway.requests[-1][1])
    assert invoke("audit", "--since", "7d").stderr == ""
    cut = invoke("audit", "--since", "7d", "-n", "2")
    assert cut.stderr == "only the latest 2 are shown: -n shows up to 1000\n", "the period may have more"
    assert [each["action"] for each in json.loads(invoke("audit", "--json").stdout)] == ["POST /keys", "DELETE /keys/b"]
    gateway.responses = AnyQuery({("GET", "/fleet/audit"): {"entries": []}})
    assert invoke("audit").stdout == "no changes and no sign-ins\n"


def test_load_of_a_profile_goes_on_after_a_failure_and_names_each(gateway: CannedGateway, invoke: Invoke) -> None:
    jobs = {
        model: {"id": f"job_{model}", "kind": "load", "model": model, "nodes": ["n"], "state": state}
        | ({"error": {"code": "load_failed", "message": f"{reason}; repair it."}} if reason else {})
        for model, state, reason in (("a", "failed", "is damaged"), ("b", "done", ""), ("c", "failed", "is new"))
    }
    orders = [{"model": model, "nodes": ["n"], "job": job} for model, job in jobs.items()]
    gateway.responses["POST", "/fleet/profiles/coding/load"] = {"profile": "coding", "models": orders}
    for job in jobs.values():
        gateway.responses["GET", f"/fleet/jobs/{job['id']}"] = job
    outcome = invoke("load", "coding", "--profile")
    assert outcome.stdout.splitlines() == ["b is ready on n"]
    assert "a: is damaged; c: is new" in outcome.error
    assert outcome.code is ExitCode.FAILED
