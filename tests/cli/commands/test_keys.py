"""`cortex keys` and `cortex usage`: keys in the configuration, and what they have used."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.cli.failures import ExitCode
from cortex.gateway.ledger.store import Counts, Slot, open_store
from cortex.wire.events import Usage

if TYPE_CHECKING:
    from ..conftest import Invoke


def test_operator_key_is_added_and_listed(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("")
    assert json.loads(invoke("keys", "add", "olga", "--operator", "--config", str(config), "--json").stdout)["operator"]
    assert "operator = true" in config.read_text()
    assert "yes" in invoke("keys", "list", "--config", str(config)).stdout


def test_added_key_leaves_a_valid_config(invoke: Invoke, tmp_path: Path) -> None:
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


def test_key_is_not_added_to_an_invalid_config(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("[gatewy]\n")
    assert invoke("keys", "add", "anna", "--config", str(config)).code is ExitCode.CONFIG
    assert config.read_text() == "[gatewy]\n"


def test_name_that_a_key_has_is_replaced_only_on_request(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("")
    add_anna = ("keys", "add", "anna", "--json", "--config", str(config))
    first = json.loads(invoke(*add_anna, "--window-tokens", "1000").stdout)
    text = config.read_text()
    again = invoke(*add_anna)
    assert (again.code, config.read_text()) == (ExitCode.USAGE, text)
    assert "has a key for anna already" in again.error
    second = json.loads(invoke(*add_anna, "--replace").stdout)
    assert first["id"] not in config.read_text()
    (listed,) = json.loads(invoke("keys", "list", "--config", str(config), "--json").stdout)
    assert (listed["id"], listed["window_tokens"]) == (second["id"], None)


@pytest.mark.parametrize("command", ["add", "remove"])
def test_keys_of_a_file_in_a_missing_directory_are_an_invalid_configuration(
    invoke: Invoke, tmp_path: Path, command: str
) -> None:
    result = invoke("keys", command, "anna", "--config", str(tmp_path / "missing" / "cortex.toml"))
    assert result.code is ExitCode.CONFIG
    assert "no config file at" in result.error


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


def test_removing_a_key_keeps_the_rest_of_the_file(invoke: Invoke, tmp_path: Path) -> None:
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


def test_unknown_or_ambiguous_key_is_not_removed(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text(KEYED)
    assert invoke("keys", "remove", "carl", "--config", str(config)).code is ExitCode.NOT_FOUND
    twice = invoke("keys", "remove", "bert", "--config", str(config))
    assert twice.code is ExitCode.USAGE
    assert "bbbbbbbb, cccccccc" in twice.error
    config.write_text(f'keys = [{{ name = "anna", id = "aaaaaaaa", sha256 = "{"0" * 64}" }}]\n')
    assert "by hand" in invoke("keys", "remove", "anna", "--config", str(config)).error


def test_usage_shows_the_contents_of_the_ledger(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text('[ledger]\ndatabase = "ledger.db"\n')
    assert invoke("usage", "--config", str(config)).code is ExitCode.NOT_FOUND
    store = open_store(str(tmp_path / "ledger.db"))
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


def test_keys_list_shows_expiry_and_what_is_left(invoke: Invoke, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("command", [("keys", "list"), ("usage",)])
@pytest.mark.parametrize(
    ("url", "code"), [("postgresql://[half", ExitCode.CONFIG), ("postgresql://127.0.0.1:1/x", ExitCode.UNREACHABLE)]
)
def test_invalid_database_is_distinguished_from_one_that_does_not_respond(
    invoke: Invoke, tmp_path: Path, command: tuple[str, ...], url: str, code: ExitCode
) -> None:
    pytest.importorskip("psycopg")
    config = tmp_path / "cortex.toml"
    config.write_text(f'[ledger]\ndatabase = "{url}"\n')
    assert invoke(*command, "--config", str(config)).code is code


def test_key_is_changed_in_place(invoke: Invoke, tmp_path: Path) -> None:
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


def test_key_that_has_expired_already_is_not_made(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("")
    outcome = invoke("keys", "add", "anna", "--expires", "2020-01-31", "--config", str(config))
    assert (outcome.code, config.read_text()) == (ExitCode.USAGE, "")
    assert "in the future" in outcome.error
