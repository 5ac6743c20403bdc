"""`cortex keys` and `cortex usage`: keys in the configuration, and what they have used."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.cli.failures import ExitCode
from cortex.gateway.ledger.store import Counts, Slot, open_store
from cortex.wire.events import Usage

from ...gateway.ledger.exchanges import exchanged

if TYPE_CHECKING:
    from ..conftest import CannedGateway, Invoke


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
    shown = invoke("keys", "add", "anna", "--print").stdout
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
    exchanged(store, {slot: Counts(requests=2, usage=Usage(prompt_tokens=1000, completion_tokens=234))}, {})
    store.close_connection()
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
    exchanged(store, {slot: Counts(requests=2, usage=Usage(prompt_tokens=100, completion_tokens=34))}, {})
    store.close_connection()
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


GROUPED = """
[[groups]]
name = "lab"
balance_tokens = 1000
"""


def test_keys_move_from_the_file_into_the_database_and_back(invoke: Invoke, tmp_path: Path) -> None:
    config, copy = tmp_path / "cortex.toml", tmp_path / "keys.toml"
    config.write_text(KEYED + GROUPED)
    invoke("keys", "change", "anna", "--group", "lab", "--config", str(config))
    in_file = config.read_text()
    assert "take precedence" in invoke("keys", "import", str(config), "--config", str(config)).stdout
    assert config.read_text() == in_file
    moved = invoke("keys", "import", str(config), "--move", "--config", str(config))
    assert "Moved 3 keys and 1 group" in moved.stdout
    assert "[[keys]]" not in config.read_text()
    assert "[[groups]]" not in config.read_text()
    assert "# bert is on leave\n" in config.read_text()
    listed = json.loads(invoke("keys", "list", "--config", str(config), "--json").stdout)
    assert [(key["name"], key["id"], key["source"]) for key in listed] == [
        ("anna", "aaaaaaaa", "database"),
        ("bert", "bbbbbbbb", "database"),
        ("bert", "cccccccc", "database"),
    ]
    assert invoke("keys", "remove", "anna", "--config", str(config)).code is ExitCode.NOT_FOUND, "not in the file"
    assert invoke("keys", "export", "--config", str(config), "--output", str(copy)).code is ExitCode.OK
    assert copy.stat().st_mode & 0o777 == 0o600
    assert invoke("keys", "export", "--config", str(config)).stdout == copy.read_text()
    other = tmp_path / "other" / "cortex.toml"
    other.parent.mkdir()
    other.write_text("")
    assert "Imported 3 keys and 1 group" in invoke("keys", "import", str(copy), "--config", str(other)).stdout
    assert invoke("keys", "export", "--config", str(other)).stdout == copy.read_text()
    with contextlib.closing(sqlite3.connect(other.parent / "cortex-spend.db")) as database:
        recorded = database.execute("SELECT action, detail FROM audit").fetchall()
    assert recorded == [("cortex keys import", "3 keys and 1 group: anna, bert, bert, lab")]


def test_import_of_a_key_whose_group_is_unknown_changes_nothing(invoke: Invoke, tmp_path: Path) -> None:
    config, copy = tmp_path / "cortex.toml", tmp_path / "keys.toml"
    config.write_text(KEYED + GROUPED)
    invoke("keys", "import", str(config), "--move", "--config", str(config))
    clash = '[[keys]]\nname = "anna"\nid = "dddddddd"\nsha256 = "{}"\n'.format("1" * 64)
    copy.write_text(clash)
    outcome = invoke("keys", "import", str(copy), "--config", str(config))
    assert outcome.code is ExitCode.FAILED
    assert "another key called `anna`" in outcome.error
    assert "dddddddd" not in invoke("keys", "export", "--config", str(config)).stdout


def test_groups_are_listed_with_what_is_left(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text(KEYED + GROUPED)
    invoke("keys", "change", "anna", "--group", "lab", "--config", str(config))
    store = open_store(str(tmp_path / "cortex-spend.db"))
    slots = [Slot.at(time.time(), key_id=id, key_name="x", model="m", node="n") for id in ("aaaaaaaa", "group:lab")]
    exchanged(store, {slot: Counts(requests=1, usage=Usage(completion_tokens=134)) for slot in slots}, {})
    store.close_connection()
    (lab,) = json.loads(invoke("keys", "groups", "--config", str(config), "--json").stdout)
    assert (lab["name"], lab["keys"], lab["spent_tokens"], lab["balance_left_tokens"]) == ("lab", ["anna"], 134, 866)
    for command in ("groups", "list"):
        assert "866 of 1,000" in invoke("keys", command, "--config", str(config)).stdout


def test_keys_and_groups_of_the_database_are_managed_at_the_gateway(invoke: Invoke, gateway: CannedGateway) -> None:
    described = {"name": "anna", "id": "aaaaaaaa", "source": "database"}
    gateway.responses = {
        ("POST", "/keys"): (201, {"key": "ck-x", **described}),
        ("PATCH", "/keys/an%2Fna"): described,
        ("DELETE", "/keys/anna"): {"revoked": {"name": "anna", "id": "aaaaaaaa"}},
        ("GET", "/groups"): {"groups": [{"name": "lab"}]},
        ("PATCH", "/groups/lab"): {"name": "lab", "balance_tokens": 5, "balance_left_tokens": 5},
        ("POST", "/groups"): (201, {"name": "new"}),
        ("DELETE", "/groups/lab"): {"removed": "lab"},
        ("PATCH", "/keys/olga"): (409, {"error": {"message": "It is in the file.", "code": "managed_by_file"}}),
    }
    at = ("--url", gateway.url)
    added = invoke("keys", "add", "anna", "--group", "lab", "--window-tokens", "9", "--operator", *at)
    assert "ck-x" in added.stdout
    assert invoke("keys", "change", "an/na", "--without", "group", *at).code is ExitCode.OK
    assert "Removed anna" in invoke("keys", "remove", "anna", *at).stdout
    assert "5 of 5" in invoke("keys", "set-group", "lab", "--balance-tokens", "5", *at).stdout
    assert invoke("keys", "set-group", "new", "--model", "a", *at).code is ExitCode.OK
    assert invoke("keys", "remove-group", "lab", *at).code is ExitCode.OK
    assert [(method, sent) for method, _, sent, _ in gateway.requests if method != "GET"] == [
        ("POST", {"name": "anna", "group": "lab", "window_tokens": 9, "operator": True}),
        ("PATCH", {"group": None}),
        ("DELETE", None),
        ("PATCH", {"balance_tokens": 5}),
        ("POST", {"name": "new", "models": ["a"]}),
        ("DELETE", None),
    ]
    rejected = invoke("keys", "change", "olga", "--expires", "2099-01-01", *at)
    assert "--config" in rejected.error


def test_usage_has_bounds_groups_every_model_of_a_key_and_csv(invoke: Invoke, tmp_path: Path) -> None:
    config = tmp_path / "cortex.toml"
    config.write_text("")
    store, day = open_store(str(tmp_path / "cortex-spend.db")), 1_700_000_000 // 86400 * 86400
    exchanged(
        store,
        {
            Slot.at(at, key_id=key * 8, key_name=key, model=model, node="n", key_group=group): Counts(
                requests=1, usage=Usage(prompt_tokens=tokens)
            )
            for at, key, model, group, tokens in (
                (day, "a", "m", "lab", 1),
                (day, "a", "=x", "lab", 20),
                (day, "b", "m", "", 300),
                (day + 5 * 86400, "b", "m", "lab", 4000),
            )
        },
        {},
    )
    store.close_connection()

    def rows(*options: str) -> list[tuple[str, str, int]]:
        found = json.loads(invoke("usage", "--config", str(config), "--json", *options).stdout)
        return [(row["name"], row["model"], row["prompt_tokens"]) for row in found]

    since = ("--since", "2023-11-10")
    assert rows("--by", "group", *since) == [("lab", "", 4021), ("(none)", "", 300)]
    assert rows("--by", "key-model", *since) == [("a", "=x", 20), ("a", "m", 1), ("b", "m", 4300)]
    assert rows("--by", "key", *since, "--until", "2023-11-17") == [("b", "", 300), ("a", "", 21)]
    assert rows("--by", "key", "--since", "2023-11-17", "--until", "2023-12-01") == [("b", "", 4000)]
    text = invoke("usage", "--config", str(config), "--by", "key-model", "--csv", *since).stdout
    assert text.splitlines()[:2] == [
        "key,id,model,requests,prompt_tokens,cached_tokens,completion_tokens,reasoning_tokens,total_tokens,cost,energy_wh",
        "a,aaaaaaaa,'=x,1,20,0,0,0,20,0.000000,0.000000",
    ]
    shown = invoke("usage", "--config", str(config), "--by", "key-model", *since).stdout
    assert "MODEL" in shown
    for options in (("--days", "1", *since), ("--since", "2023-11-10", "--until", "2023-11-09"), ("--until", "soon")):
        assert invoke("usage", "--config", str(config), *options).code is ExitCode.USAGE
