"""Usage with its cost, and keys made, limited, expired and revoked over HTTP."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import ClientSession

from cortex.gateway.configuration_files import ConfigurationFiles
from cortex.gateway.database import Database, Execute
from cortex.gateway.ledger import key_store
from cortex.gateway.ledger.keys import NewKey, as_toml, generate
from cortex.gateway.server import Gateway
from cortex.wire.node.protocol import ModelState

from ...waiting import until_response
from ..fake_neuron import GB, JSON, FakeNeuron
from ..started_gateway import Client

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


PRICES = '[[models]]\nid = "a"\ncost = { input = 10.0, cached_input = 1.0, output = 100.0 }\n[[models]]\nid = "=b"\n'
COST_OF_ONE = (3 * 10.0 + 4 * 1.0 + 3 * 100.0) / 1e6
"""The fake node's response has 7 prompt tokens, of which 4 are cached, and 3 completion tokens."""
CHAT = {"model": "a", "messages": [], "max_tokens": 1}


def bearer(key: NewKey | str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key if isinstance(key, str) else key.text}"}


class Keyed:
    """A gateway on a real configuration file, with the key of an operator and that of another client."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "cortex.toml"
        self.olga, self.anna = generate("olga", operator=True), generate("anna", balance_tokens=1000)
        self.client: Client

    async def call(self, method: str, path: str, body: Any = None, key: NewKey | str | None = None) -> tuple[int, Any]:
        headers = bearer(key or self.olga)
        data = None if body is None else msgspec.json.encode(body)
        async with self.client.session.request(method, self.client.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()


@pytest.fixture
async def keyed(tmp_path: Path, neurons: StartNeuron) -> AsyncIterator[Keyed]:
    node: FakeNeuron = await neurons("beast", sizes={"a": GB, "=b": GB}, states={"a": ModelState.READY})
    node.states["=b"] = ModelState.READY
    stack = Keyed(tmp_path)
    (tmp_path / "models.toml").write_text(PRICES)
    stack.file.write_text(
        f'# kept\n[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\npoll_interval_s = 0.05\n'
        f'[[neurons]]\nname = "beast"\nendpoint = "{node.endpoint}"\n\n'
        f'{as_toml(stack.olga.section)}\n{as_toml(stack.anna.section)}\n[[groups]]\nname = "lab"\n'
    )
    files = ConfigurationFiles(stack.file, os.environ)
    config, catalogue = files.read()
    gateway = Gateway(config, catalogue, tmp_path)
    _, port = await gateway.start()
    async with ClientSession(headers=JSON) as session:
        stack.client = Client(gateway, port, session)
        yield stack
    await gateway.close()


async def test_usage_has_the_cost_and_only_operators_see_other_keys(keyed: Keyed) -> None:
    for key in (keyed.olga, keyed.anna):
        assert (await keyed.call("POST", "/v1/chat/completions", CHAT, key))[0] == 200
    assert (await keyed.call("POST", "/v1/chat/completions", CHAT | {"model": "=b"}))[0] == 200
    status, report = await keyed.call("GET", "/fleet/usage?by=key")
    assert (status, report["by"]) == (200, "key")
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["anna"]["cost"] == pytest.approx(COST_OF_ONE)
    assert (rows["olga"]["requests"], rows["olga"]["total_tokens"]) == (2, 20)
    assert rows["olga"]["cost"] == pytest.approx(COST_OF_ONE), "a model without a price is free"
    _, report = await keyed.call("GET", "/fleet/usage?by=model&key=anna")
    assert [(row["id"], row["requests"]) for row in report["rows"]] == [("a", 1)]
    _, report = await keyed.call("GET", "/fleet/usage?by=day", key=keyed.anna)
    assert [row["requests"] for row in report["rows"]] == [1]
    _, report = await keyed.call("GET", "/fleet/usage?by=key&key=olga", key=keyed.anna)
    assert [row["name"] for row in report["rows"]] == ["anna"], "of others nothing, whatever is asked for"
    status, body = await keyed.call("GET", "/fleet/usage?by=node", key=keyed.anna)
    assert (status, body["error"]["code"]) == (403, "operator_only"), "nodes are for operators"
    _, report = await keyed.call("GET", "/fleet/usage?until=2020-01-01")
    assert report["rows"] == []


@pytest.mark.parametrize(("path", "accept"), [("/fleet/usage.csv", "*/*"), ("/fleet/usage", "text/csv")])
async def test_usage_as_csv_holds_no_formulas(keyed: Keyed, path: str, accept: str) -> None:
    await keyed.call("POST", "/v1/chat/completions", CHAT | {"model": "=b"})
    url = f"{keyed.client.url}{path}?by=model"
    async with keyed.client.session.get(url, headers=bearer(keyed.olga) | {"accept": accept}) as response:
        assert response.headers["content-type"].startswith("text/csv")
        (row,) = csv.DictReader(io.StringIO(await response.text()))
    assert (row["model"], row["id"], row["requests"], row["total_tokens"]) == ("'=b", "'=b", "1", "10")


@pytest.mark.parametrize("query", ["by=week", "since=yesterday", "until=1e300", "since=nan"])
async def test_invalid_usage_query_is_rejected_by_name(keyed: Keyed, query: str) -> None:
    status, body = await keyed.call("GET", f"/fleet/usage?{query}")
    assert (status, body["error"]["param"]) == (400, query.partition("=")[0])


async def test_key_is_made_limited_and_revoked_over_http(keyed: Keyed) -> None:
    before = keyed.file.read_text()
    status, made = await keyed.call("POST", "/keys", {"name": "bert", "models": ["a"], "balance_tokens": 100})
    assert (status, made["in_force"], made["balance_left_tokens"]) == (201, True, 100)
    assert "sha256" not in made
    assert (await keyed.call("POST", "/v1/chat/completions", CHAT, made["key"]))[0] == 200, "in force at once"
    _, listed = await keyed.call("GET", "/keys")
    bert = next(key for key in listed["keys"] if key["name"] == "bert")
    assert (bert["spent_tokens"], bert["balance_left_tokens"], bert["models"]) == (10, 90, ["a"])
    status, changed = await keyed.call("PATCH", "/keys/bert", {"balance_tokens": 5, "models": []})
    assert (status, changed["balance_left_tokens"], changed["models"]) == (200, 0, [])
    status, body = await keyed.call("POST", "/v1/chat/completions", CHAT, made["key"])
    assert (status, body["error"]["code"]) == (429, "insufficient_quota")
    assert (await keyed.call("PATCH", "/keys/bert", {"balance_tokens": None}))[1]["balance_left_tokens"] is None
    assert (await keyed.call("DELETE", f"/keys/{bert['id']}"))[1]["revoked"]["name"] == "bert"
    assert (await keyed.call("POST", "/v1/chat/completions", CHAT, made["key"]))[0] == 401
    assert keyed.file.read_text() == before


async def test_name_of_several_keys_is_rejected_and_an_id_goes_before_a_name(keyed: Keyed) -> None:
    _, made = await keyed.call("POST", "/keys", {"name": "bert"})
    namesake, named = generate("bert").section, generate(made["id"]).section

    def add(execute: Execute) -> None:  # as an import does
        key_store.put_key(execute, namesake)
        key_store.put_key(execute, named)

    database = Database(str(keyed.file.parent / "cortex-spend.db")).use(key_store.SCHEMA)
    database.run(lambda execute: key_store.edit(execute, add))
    database.close_connection()
    await until_response(lambda: keyed.call("GET", "/keys"), lambda response: len(response[1]["keys"]) >= 5)
    status, body = await keyed.call("DELETE", "/keys/bert")
    assert (status, made["id"] in body["error"]["message"]) == (400, True)
    assert (await keyed.call("DELETE", f"/keys/{made['id']}"))[1]["revoked"]["name"] == "bert"
    assert (await keyed.call("POST", "/v1/chat/completions", CHAT, made["key"]))[0] == 401


async def test_key_and_group_of_the_file_are_not_changed_over_http(keyed: Keyed) -> None:
    before = keyed.file.read_text()
    for method, path, body in (
        ("PATCH", "/keys/anna", {"balance_tokens": 5}),
        ("DELETE", "/keys/anna", None),
        ("PATCH", "/groups/lab", {"balance_tokens": 5}),
        ("DELETE", "/groups/lab", None),
    ):
        status, response = await keyed.call(method, path, body)
        assert (status, response["error"]["code"]) == (409, "managed_by_file"), path
        assert "configuration file" in response["error"]["message"]
    assert keyed.file.read_text() == before
    assert (await keyed.call("POST", "/v1/chat/completions", CHAT, keyed.anna))[0] == 200
    _, listed = await keyed.call("GET", "/keys")
    assert {key["name"]: key["source"] for key in listed["keys"]} == {"olga": "file", "anna": "file"}


async def test_group_is_made_shared_by_keys_changed_and_removed_over_http(keyed: Keyed) -> None:
    status, made = await keyed.call("POST", "/groups", {"name": "team", "balance_tokens": 15})
    assert (status, made["balance_left_tokens"], made["source"]) == (201, 15, "database")
    keys = [(await keyed.call("POST", "/keys", {"name": name, "group": "team"}))[1]["key"] for name in ("bo", "cy")]
    assert (await keyed.call("POST", "/v1/chat/completions", CHAT, keys[0]))[0] == 200
    status, body = await keyed.call("POST", "/v1/chat/completions", CHAT | {"max_tokens": 5}, keys[1])
    assert status == 200, "as many tokens as are left"
    status, body = await keyed.call("POST", "/v1/chat/completions", CHAT, keys[1])
    assert (status, body["error"]["code"]) == (429, "insufficient_quota")
    assert "group `team`" in body["error"]["message"]
    _, listed = await keyed.call("GET", "/groups", key=keys[0])
    ((name, spent, left, members),) = [
        (each["name"], each["spent_tokens"], each["balance_left_tokens"], each["keys"]) for each in listed["groups"]
    ]
    assert (name, spent, left, members) == ("team", 20, 0, ["bo"]), "members see their own group and name only"
    assert [each["keys"] for each in (await keyed.call("GET", "/groups"))[1]["groups"]][-1] == ["bo", "cy"]
    assert [each["name"] for each in (await keyed.call("GET", "/keys"))[1]["groups"]] == ["lab", "team"]
    status, changed = await keyed.call("PATCH", "/groups/team", {"balance_tokens": 100})
    assert (status, changed["balance_left_tokens"]) == (200, 80)
    assert (await keyed.call("POST", "/v1/chat/completions", CHAT, keys[1]))[0] == 200
    assert (await keyed.call("DELETE", "/groups/team"))[0] == 400, "keys are in it"
    for name in ("bo", "cy"):
        assert (await keyed.call("DELETE", f"/keys/{name}"))[0] == 200
    assert (await keyed.call("DELETE", "/groups/team"))[0] == 200
    assert (await keyed.call("DELETE", "/groups/team"))[0] == 404


async def test_expired_key_is_rejected_until_its_expiry_is_moved(keyed: Keyed) -> None:
    _, made = await keyed.call("POST", "/keys", {"name": "dana"})
    status, body = await keyed.call("PATCH", "/keys/dana", {"expires": "2020-01-01"})
    assert (status, body["is_expired"]) == (200, True)
    status, body = await keyed.call("POST", "/v1/chat/completions", CHAT, made["key"])
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert "2020-01-01" in body["error"]["message"]
    tomorrow = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 86400))
    assert (await keyed.call("PATCH", "/keys/dana", {"expires": tomorrow}))[0] == 200
    assert (await keyed.call("POST", "/v1/chat/completions", CHAT, made["key"]))[0] == 200


async def test_only_operators_manage_keys_and_others_see_their_own(keyed: Keyed) -> None:
    for method, path, body in (
        ("POST", "/keys", {"name": "x"}),
        ("PATCH", "/keys/anna", {"balance_tokens": None}),
        ("DELETE", "/keys/olga", None),
    ):
        before = keyed.file.read_text()
        status, response = await keyed.call(method, path, body, keyed.anna)
        assert (status, response["error"]["code"]) == (403, "operator_only")
        assert keyed.file.read_text() == before
    _, listed = await keyed.call("GET", "/keys", key=keyed.anna)
    assert [key["name"] for key in listed["keys"]] == ["anna"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/keys", {"name": "anna"}, 400),
        ("POST", "/keys", {"name": " "}, 400),
        ("POST", "/keys", {"name": "a/b"}, 400),
        ("POST", "/keys", {"name": "a\0b"}, 400),
        ("POST", "/groups", {"name": "a\x1b[2Jb"}, 400),
        ("POST", "/keys", {"name": "x", "expires": "soon"}, 400),
        ("POST", "/keys", {"name": "x", "balance": 5}, 400),
        ("POST", "/keys", {"name": "x", "requests_per_min": 0}, 400),
        ("POST", "/keys", [], 400),
        ("POST", "/keys", {"name": "x", "group": "nobody"}, 400),
        ("POST", "/groups", {"name": "lab"}, 400),
        ("PATCH", "/groups/nobody", {}, 404),
        ("PATCH", "/keys/stored", {"expires": "soon"}, 400),
        ("PATCH", "/keys/stored", {"group": "nobody"}, 400),
        ("PATCH", "/keys/nobody", {"balance_tokens": 1}, 404),
        ("DELETE", "/keys/nobody", None, 404),
        ("DELETE", "/keys/olga", None, 403),
        ("PATCH", "/keys/olga", {"operator": False}, 403),
        ("PUT", "/keys/anna", {}, 405),
    ],
)
async def test_invalid_change_of_keys_changes_nothing(
    keyed: Keyed, method: str, path: str, body: dict[str, Any], status: int
) -> None:
    await keyed.call("POST", "/keys", {"name": "stored"})
    before = await keyed.call("GET", "/keys")
    assert (await keyed.call(method, path, body))[0] == status
    assert await keyed.call("GET", "/keys") == before


async def test_cost_and_what_is_left_of_budgets_are_metrics(keyed: Keyed) -> None:
    await keyed.call("POST", "/groups", {"name": "team", "window_cost": 1.0})
    _, made = await keyed.call("POST", "/keys", {"name": "bo", "group": "team", "balance_tokens": 100})
    assert (await keyed.call("POST", "/v1/chat/completions", CHAT, made["key"]))[0] == 200
    found = dict(line.rsplit(" ", 1) for line in keyed.client.metrics().splitlines() if not line.startswith("#"))
    assert float(found['cortex_cost_total{key="bo",model="a"}']) == pytest.approx(COST_OF_ONE)
    balance = '{kind="key",owner="bo",period="balance",unit="tokens"}'
    assert (found[f"cortex_budget_limit{balance}"], found[f"cortex_budget_left{balance}"]) == ("100.0", "90.0")
    window = '{kind="group",owner="team",period="window",unit="cost"}'
    assert float(found[f"cortex_budget_left{window}"]) == pytest.approx(1 - COST_OF_ONE)


async def test_first_key_is_not_made_over_http(start_gateway: StartGateway) -> None:
    client = await start_gateway()
    status, body = await client.post("/keys", {"name": "mallory", "operator": True})
    assert (status, body["error"]["code"]) == (403, "operator_only")
    assert "cortex keys add" in body["error"]["message"]
