"""`cortex doctor`: what it finds in a configuration and on the network."""

from __future__ import annotations

import json
import socket
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from cortex.cli.client import DEFAULT_URL
from cortex.cli.commands.doctor.checks import Finding, Severity, cache, disk
from cortex.cli.commands.doctor.command import show
from cortex.cli.failures import ExitCode
from cortex.cli.neuron import neuron
from cortex.neuron.kernels.native.library import native_library_or_none
from cortex.neuron.private_api.entries import PrivateEntry
from cortex.neuron.private_api.report import ENTRIES

from ...neuron.failed_probes import REASON, fail_probe

if TYPE_CHECKING:
    from ..conftest import CannedGateway, Invoke, Outcome


def test_doctor_reports_an_invalid_config_as_a_problem(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("[gatewy]\n")
    outcome = invoke("doctor", "--json", "--config", str(config))
    assert outcome.code is ExitCode.FAILED
    problems = [finding for finding in json.loads(outcome.stdout) if finding["verdict"] == "problem"]
    assert any("gatewy" in finding["what"] and finding["remedy"] for finding in problems)


def test_doctor_reports_a_node_that_does_not_respond(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[[neurons]]\nname = "beast"\nendpoint = "http://127.0.0.1:9"\n')
    outcome = invoke("doctor", "--config", str(config))
    assert outcome.code is ExitCode.FAILED
    assert "beast: no response" in outcome.stdout
    assert "neuron serve" in outcome.stdout


def test_doctor_uses_the_environment_file_of_the_unit(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text(
        '[gateway]\nnode_key_env = "CORTEX_NODE_KEY"\n[[neurons]]\nname = "n"\nendpoint = "http://127.0.0.1:9"\n'
    )
    monkeypatch.delenv("CORTEX_NODE_KEY", raising=False)
    assert "CORTEX_NODE_KEY" in invoke("doctor", "--config", str(config)).stdout, "it is missing"
    (tmp_path / "cortex.env").write_text('# secrets\nCORTEX_NODE_KEY="nk-some-key"\nnot an assignment\n')
    outcome = invoke("doctor", "--config", str(config))
    monkeypatch.delenv("CORTEX_NODE_KEY", raising=False)
    assert "CORTEX_NODE_KEY" not in outcome.stdout
    assert "cortex.env: variables of the service" in outcome.stdout


def test_doctor_checks_names_and_addresses_against_each_other(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text(
        '[gateway]\nlisten = "127.0.0.1:9"\nmetrics_listen = "127.0.0.1:9"\n'
        '[[neurons]]\nname = "beast"\nendpoint = "http://localhost:8"\n'
        '[[neurons]]\nname = "twin"\nendpoint = "http://127.0.0.1:8/"\n'
    )
    (tmp_path / "models.toml").write_text(
        '[[models]]\nid = "big"\npinned_on = ["beast", "baest"]\n'
        '[[models]]\nid = "wide"\nharness = "vllm"\nnodes = ["beast", "benjy"]\ntensor_parallel = 2\n'
        '[aliases]\ngood = "big"\nlost = "bgi"\ntwice = "good"\n'
    )
    findings = json.loads(invoke("doctor", "--json", "--config", str(config)).stdout)
    found = {finding["what"]: finding["verdict"] for finding in findings if finding["topic"] == "config"}
    assert all(finding["remedy"] for finding in findings if finding["verdict"] != "fine")
    assert {what: verdict for what, verdict in found.items() if verdict != "fine"} == {
        "pinned_on of big names baest, and there is no such node": "problem",
        "nodes of wide names benjy, and there is no such node": "problem",
        "alias lost points to bgi, which is not in the catalogue": "note",
        "alias twice points to good, which is itself an alias": "problem",
        "127.0.0.1:9 is the address of gateway.listen and gateway.metrics_listen": "problem",
        "127.0.0.1:8 is the address of node beast and node twin": "problem",
    }


def test_doctor_reports_a_database_that_does_not_respond(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[ledger]\ndatabase = "postgresql://cortex:secret@127.0.0.1:9/usage"\n')
    outcome = invoke("doctor", "--json", "--config", str(config))
    (finding,) = [finding for finding in json.loads(outcome.stdout) if finding["topic"] == "database"]
    assert (outcome.code, finding["verdict"]) == (ExitCode.FAILED, "problem")
    assert finding["what"].startswith("postgresql at 127.0.0.1 cannot be used: ")
    assert "secret" not in outcome.stdout


def test_doctor_uses_the_gateway_address_of_the_config(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[gateway]\nlisten = "0.0.0.0:9"\nmetrics_listen = "127.0.0.1:7"\n')
    outcome = invoke("doctor", "--config", str(config), env={"CORTEX_URL": DEFAULT_URL})
    assert "no gateway at http://127.0.0.1:9" in outcome.stdout
    assert f"start it with `cortex serve --config {config}`" in outcome.stdout
    assert "127.0.0.1:7" in outcome.stdout
    assert "31313" not in outcome.stdout
    other = invoke("doctor", "--config", str(config), "--url", "http://127.0.0.1:8").stdout
    assert "no gateway at http://127.0.0.1:8" in other
    assert "cortex serve --config" not in other, "which starts another one"


def test_doctor_counts_one_node_in_the_singular(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[[neurons]]\nname = "beast"\nendpoint = "http://127.0.0.1:9"\n')
    shown = invoke("doctor", "--config", str(config)).stdout
    assert "cortex.toml: 1 node\n" in shown
    assert "1 problem to fix" in shown


def test_doctor_names_the_address_of_an_unreachable_node_once(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[[neurons]]\nname = "beast"\nendpoint = "http://127.0.0.1:9"\n')
    findings = json.loads(invoke("doctor", "--json", "--config", str(config)).stdout)
    (finding,) = [finding for finding in findings if finding["topic"] == "nodes"]
    assert finding["what"] == "beast: no response from http://127.0.0.1:9 (Connection refused)"


def findings(outcome: Outcome | Result, topic: str) -> dict[str, str]:
    """What `doctor --json` found about `topic`: text → verdict."""
    return {each["what"]: each["verdict"] for each in json.loads(outcome.stdout) if each["topic"] == topic}


def test_doctor_checks_nodes_that_are_found_by_dns(gateway: CannedGateway, invoke: Invoke, tmp_path: Path) -> None:
    gateway.responses["GET", "/discovery"] = {"host": "h", "os": "Linux", "version": "0", "devices": []}
    port = gateway.url.rpartition(":")[2]
    (tmp_path / "cortex.toml").write_text(f'[discovery]\ndns = "localhost"\nport = {port}\n')
    (tmp_path / "models.toml").write_text('[[models]]\nid = "m"\nonly_on = ["127.0.0.1"]\n')
    outcome = invoke("doctor", "--json", "--config", str(tmp_path / "cortex.toml"))
    assert "127.0.0.1: " in findings(outcome, "nodes")
    assert any("localhost resolves to" in what and "127.0.0.1" in what for what in findings(outcome, "config"))
    assert "problem" not in findings(outcome, "config").values()


def test_doctor_reports_paths_that_no_node_can_read(gateway: CannedGateway, invoke: Invoke) -> None:
    problems = {"attic": "m: there is no complete model at /srv/m"}
    found = {"id": "m", "feasible_on": [], "problems": problems}
    gateway.responses["GET", "/v1/models"] = {"data": [found, found | {"id": "other", "feasible_on": ["beast"]}]}
    outcome = invoke("doctor", "--json")
    assert findings(outcome, "models") == {"m on attic: there is no complete model at /srv/m": "problem"}


def test_doctor_reports_a_name_without_nodes(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "cortex.toml").write_text('[discovery]\ndns = "no-such-name.invalid"\n')
    outcome = invoke("doctor", "--json", "--config", str(tmp_path / "cortex.toml"))
    assert outcome.code is ExitCode.FAILED
    assert any("no-such-name.invalid resolves to no node" in what for what in findings(outcome, "config"))


def test_doctor_recognises_a_port_that_cortex_uses(gateway: CannedGateway, invoke: Invoke, tmp_path: Path) -> None:
    gateway.responses["GET", "/health"] = {"status": "ok"}
    address = gateway.url.removeprefix("http://")
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        (tmp_path / "cortex.toml").write_text(f'[gateway]\nlisten = "{address}"\nmetrics_listen = "{taken}"\n')
        found = findings(invoke("doctor", "--json", "--config", str(tmp_path / "cortex.toml")), "ports")
    assert found[f"{address} is in use by cortex"] == "fine"
    assert found[f"{taken}: Address already in use"] == "note"


def test_doctor_does_not_send_to_neuron_for_a_foreign_server(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "cortex.toml").write_text('[[neurons]]\nname = "x"\nendpoint = "http://127.0.0.1:9"\nkind = "openai"\n')
    shown = invoke("doctor", "--config", str(tmp_path / "cortex.toml")).stdout
    assert "start it, or correct its endpoint" in shown


def test_neuron_doctor_reports_what_would_keep_the_node_from_starting(tmp_path: Path) -> None:
    config = tmp_path / "neuron.toml"
    config.write_text(f'key_file = "neuron.key"\n[harness.torch]\nhf_cache = "{tmp_path}/models"\n')
    result = CliRunner().invoke(neuron, ["doctor", "--json", "--config", str(config)], standalone_mode=False)
    assert result.return_value == ExitCode.FAILED
    assert any("cannot read key_file" in what for what in findings(result, "config"))
    assert any(f"model cache {tmp_path}/models" in what for what in findings(result, "disk"))


def test_doctor_finds_what_neurons_have_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models--org--small").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert any(f"model cache {tmp_path}:" in finding.what for finding in disk())
    assert any(finding.what == "1 model from the hub: org/small" for finding in cache())


def test_neuron_doctor_notes_a_node_that_needs_a_key(tmp_path: Path) -> None:
    config = tmp_path / "neuron.toml"
    config.write_text("")
    result = CliRunner().invoke(neuron, ["doctor", "--json", "--config", str(config)], standalone_mode=False)
    assert result.return_value == ExitCode.OK
    assert any("without a key" in what and verdict == "note" for what, verdict in findings(result, "config").items())


def test_discover_divides_the_cpu_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "neuron.toml").write_text("cpu_devices = 2\n")
    result = CliRunner().invoke(neuron, ["discover", "--json", "--config", str(tmp_path / "neuron.toml")])
    assert [device["index"] for device in json.loads(result.stdout)["devices"]] == [0, 1]


def test_doctor_reports_a_certificate_that_keeps_the_gateway_from_starting(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "cortex.toml").write_text('[gateway]\ntls_cert = "cert.pem"\ntls_key = "key.pem"\n')
    outcome = invoke("doctor", "--json", "--config", str(tmp_path / "cortex.toml"))
    assert outcome.code is ExitCode.FAILED
    assert any("cannot read tls_cert" in what for what in findings(outcome, "config"))


@pytest.mark.parametrize(
    ("has_compiler", "has_failed", "expected"),
    [
        (False, False, ("no C compiler", "note")),
        (True, False, ("C compiler /", "fine")),
        (True, True, ("C compiler /", "note")),
    ],
    ids=["without", "with", "failed"],
)
def test_doctor_says_whether_there_is_a_c_compiler(
    invoke: Invoke,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_compiler: bool,
    has_failed: bool,
    expected: tuple[str, str],
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path) if has_compiler else "")
    monkeypatch.setenv("CORTEX_CACHE", str(tmp_path / "cache"))
    if has_failed:
        native_library_or_none.__wrapped__()
    found = findings(invoke("doctor", "--json"), "engine")
    assert any(what.startswith(expected[0]) and verdict == expected[1] for what, verdict in found.items()), found


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if "cpu" in entry.kinds], ids=lambda entry: entry.name)
def test_doctor_reports_what_the_libraries_do_not_have(
    entry: PrivateEntry, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "applies", lambda: True)
    fail_probe(monkeypatch, entry)
    found = findings(invoke("doctor", "--json"), "libraries")
    assert found == {f"{entry.name} cannot be used: {REASON}; instead: {entry.fallback}": "note"}


def test_doctor_finds_everything_in_the_tested_libraries() -> None:
    outcome = CliRunner().invoke(neuron, ["doctor", "--json"], standalone_mode=False)
    (found,) = findings(outcome, "libraries").items()
    assert found[1] == "fine"
    assert "torch 2." in found[0]


def test_doctor_reports_what_nodes_do_without(gateway: CannedGateway, invoke: Invoke, tmp_path: Path) -> None:
    without = {"name": "torch._thing", "reason": "it is gone; instead: the slow way"}
    device = {"index": 1, "total_bytes": 1, "free_bytes": 1, "fallbacks": [without]}
    gateway.responses["GET", "/discovery"] = {"host": "h", "os": "Linux", "version": "0", "devices": []}
    gateway.responses["GET", "/health"] = {"status": "ok", "uptime_s": 1, "devices": [device], "models": []}
    (tmp_path / "cortex.toml").write_text(f'[[neurons]]\nname = "beast"\nendpoint = "{gateway.url}"\n')
    found = findings(invoke("doctor", "--json", "--config", str(tmp_path / "cortex.toml")), "nodes")
    what = "beast: device 1 runs without torch._thing: it is gone; instead: the slow way"
    assert found[what] == "note"


@pytest.mark.parametrize(
    ("verdicts", "summary"),
    [
        ([], "no problems found"),
        ([Severity.NOTE], "no problems found, 1 note"),
        ([Severity.PROBLEM, Severity.NOTE, Severity.NOTE], "1 problem to fix, 2 notes"),
    ],
)
def test_summary_counts_problems_and_notes(verdicts: list[Severity], summary: str) -> None:
    out = Console(file=StringIO())
    show([Finding("topic", Severity.FINE, "fine"), *(Finding("topic", verdict, "what") for verdict in verdicts)], out)
    assert out.file.getvalue().splitlines()[-1] == summary  # type: ignore[attr-defined]
