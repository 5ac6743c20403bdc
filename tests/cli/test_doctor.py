"""`cortex doctor`: what it finds in a configuration and on the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from cortex.cli.client import DEFAULT_URL
from cortex.cli.failures import ExitCode
from cortex.cli.neuron import neuron

if TYPE_CHECKING:
    from .conftest import Invoke


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


def test_doctor_checks_names_and_addresses_against_each_other(invoke: Invoke, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("", ("config", "names second, which is no peer of this node (peers: none); add it under [[peers]]")),
        (
            '[[peers]]\nname = "second"\nendpoint = "http://127.0.0.1:1"\nkey_env = "NOT_SET"',
            ("peers", "second: NOT_SET is not set", "second: no response from http://127.0.0.1:1"),
        ),
    ],
)
def test_doctor_of_a_neuron_checks_the_peers_of_its_models(
    tmp_path: Path, peer: str, expected: tuple[str, ...]
) -> None:
    config = tmp_path / "neuron.toml"
    config.write_text(f'[[models]]\nid = "a"\nnodes = ["first", "second"]\n{peer}')
    outcome = CliRunner().invoke(neuron, ["doctor", "--json", "--config", str(config)], standalone_mode=False)
    findings = json.loads(outcome.stdout)
    topic, *reasons = expected
    problems = [each["what"] for each in findings if (each["topic"], each["verdict"]) == (topic, "problem")]
    assert all(reason in what for reason, what in zip(reasons, problems, strict=True))


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
    assert "127.0.0.1:7" in outcome.stdout
    assert "31313" not in outcome.stdout


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
