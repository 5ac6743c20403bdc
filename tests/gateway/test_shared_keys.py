"""Keys of the database: in force on every gateway that shares it, and after a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cortex.gateway.database import WORK_S, Database, StoreError
from cortex.gateway.ledger import key_store
from cortex.gateway.ledger.groups import GroupSection
from cortex.gateway.ledger.keys import NewKey, generate
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.ledger.store import LedgerSection
from cortex.wire.node.protocol import ModelState

from ..waiting import until_response
from .fake_neuron import GB
from .postgres_server import frozen

if TYPE_CHECKING:
    from .fake_neuron import StartNeuron
    from .started_gateway import Client, StartGateway

CHAT = {"model": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ADMIN = generate("admin", operator=True)


async def call(client: Client, method: str, path: str, body: Any = None, key: NewKey | str = ADMIN) -> tuple[int, Any]:
    text = key if isinstance(key, str) else key.text
    data = None if body is None else msgspec.json.encode(body)
    headers = {"authorization": f"Bearer {text}"}
    async with client.session.request(method, client.url + path, data=data, headers=headers) as response:
        return response.status, await response.json()


async def until_chat(client: Client, key: str, status: int) -> None:
    """Wait until a request with this key has this status."""
    await until_response(
        lambda: call(client, "POST", "/v1/chat/completions", CHAT, key), lambda response: response[0] == status
    )


@pytest.fixture
async def shared(
    postgres_url: str, neurons: StartNeuron, start_gateway: StartGateway
) -> AsyncIterator[tuple[Client, Client]]:
    """Two gateways on one PostgreSQL database, with the same operator's key in their files."""
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS api_key, key_group, key_revision")
    node = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    ledger = LedgerSection(database=postgres_url, flush_s=0.1)
    first, second = [await start_gateway(node, keys=(ADMIN.section,), ledger=ledger) for _ in range(2)]
    yield first, second
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DELETE FROM api_key")
        connection.execute("DELETE FROM key_group")


async def test_key_made_limited_and_revoked_at_one_gateway_is_so_at_the_other(shared: tuple[Client, Client]) -> None:
    first, second = shared
    assert (await call(first, "POST", "/groups", {"name": "lab", "balance_tokens": 10_000}))[0] == 201
    status, made = await call(first, "POST", "/keys", {"name": "anna", "group": "lab"})
    assert (status, made["in_force"]) == (201, True)
    await until_chat(second, made["key"], 200)
    assert (await call(second, "POST", "/keys", {"name": "anna"}))[0] == 400, "its name is taken"
    assert (await call(second, "PATCH", "/keys/anna", {"models": ["b"]}))[0] == 200
    await until_chat(first, made["key"], 403)
    assert (await call(first, "PATCH", "/keys/anna", {"models": []}))[0] == 200
    await until_chat(second, made["key"], 200)
    assert (await call(second, "DELETE", "/keys/anna"))[0] == 200
    await until_chat(first, made["key"], 401)
    assert (await call(first, "DELETE", "/keys/anna"))[0] == 404
    assert (await call(first, "DELETE", "/groups/lab"))[0] == 200


async def test_counters_of_keys_and_groups_are_equal_at_all_gateways(shared: tuple[Client, Client]) -> None:
    first, second = shared
    await call(first, "POST", "/groups", {"name": "team"})
    _, made = await call(first, "POST", "/keys", {"name": "bert", "group": "team"})
    await until_chat(second, made["key"], 200)
    for client in (first, first, second):
        assert (await call(client, "POST", "/v1/chat/completions", CHAT, made["key"]))[0] == 200

    async def counters(client: Client) -> list[tuple[str, int, int]]:
        _, listed = await call(client, "GET", "/keys")
        rows = [*listed["keys"], *listed["groups"]]
        return [
            (row["name"], row["spent_tokens"], row["window_spent_tokens"]) for row in rows if row["name"] != "admin"
        ]

    for client in (first, second):  # the other gateway writes within flush_s
        await until_response(partial(counters, client), [("bert", 40, 40), ("team", 40, 40)].__eq__)


async def test_keys_stay_in_force_while_the_database_is_frozen(
    shared: tuple[Client, Client], postgres_url: str
) -> None:
    first, _ = shared
    _, made = await call(first, "POST", "/keys", {"name": "carl"})
    with frozen(postgres_url):
        first.gateway.database.work_s = 0.5
        assert (await call(first, "POST", "/v1/chat/completions", CHAT, made["key"]))[0] == 200
        status, body = await call(first, "POST", "/keys", {"name": "dora"})
        assert (status, body["error"]["code"]) == (503, "database_unavailable")
        _, listed = await call(first, "GET", "/keys")
        assert [key["name"] for key in listed["keys"]] == ["admin", "carl"], "with what this gateway knows"
    first.gateway.database.work_s = WORK_S
    await until_response(lambda: call(first, "POST", "/keys", {"name": "dora"}), lambda response: response[0] == 201)


async def test_keys_need_no_configuration_file_and_outlive_a_restart(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    node = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    client = await start_gateway(node, keys=(ADMIN.section,))
    _, made = await call(client, "POST", "/keys", {"name": "anna", "operator": True})
    await client.gateway.close()
    again = await start_gateway(node)
    assert (await again.chat("a"))[0] == 401
    assert (await call(again, "POST", "/v1/chat/completions", CHAT, made["key"]))[0] == 200
    assert (await call(again, "GET", "/v1/models", key=ADMIN))[0] == 401, "it is in the file no longer"
    assert (await call(again, "DELETE", "/keys/anna", key=made["key"]))[0] == 403, "its own"
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".toml"] == []


async def test_open_gateway_closes_when_a_command_writes_its_first_key(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    node = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    client = await start_gateway(node)
    assert (await client.chat("a"))[0] == 200
    key, lab = generate("anna", group="lab"), GroupSection(name="lab", models=("b",))
    database = Database(str(tmp_path / "cortex-spend.db")).use(key_store.SCHEMA)
    database.run(
        lambda execute: key_store.edit(execute, lambda _: key_store.import_keys(execute, [key.section], [lab]))
    )
    database.close_connection()
    await until_response(lambda: client.chat("a"), lambda response: response[0] == 401)
    assert (await call(client, "POST", "/v1/chat/completions", CHAT, key))[0] == 403, "its group has other models"


async def test_a_key_that_is_in_the_database_is_shown_although_it_is_not_in_force_yet(
    neurons: StartNeuron, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text is shown only once, so an error would lose it."""
    node = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    client = await start_gateway(node, keys=(ADMIN.section,))

    async def fail(*_: object) -> None:
        raise StoreError("the database is away")

    with monkeypatch.context() as patch:
        patch.setattr(Metering, "use", fail)
        status, made = await call(client, "POST", "/keys", {"name": "anna"})
        assert (status, made["in_force"]) == (201, False)
        assert (await call(client, "POST", "/v1/chat/completions", CHAT, made["key"]))[0] == 401
    await until_chat(client, made["key"], 200)
    with monkeypatch.context() as patch:
        patch.setattr(Metering, "use", fail)
        status, revoked = await call(client, "DELETE", "/keys/anna")
        assert (status, revoked["in_force"]) == (200, False)
    await until_chat(client, made["key"], 401)
    assert (await call(client, "DELETE", "/keys/anna"))[0] == 404
