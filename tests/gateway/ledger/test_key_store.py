"""Keys and groups in the database, and how they and those of the file are put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from cortex.gateway.database import Database, Execute, Rows
from cortex.gateway.ledger import key_store
from cortex.gateway.ledger.groups import GroupSection
from cortex.gateway.ledger.key_store import KeyConflict, KeyStore, StoredKeys, merged
from cortex.gateway.ledger.keys import KeySection, generate

LAB = GroupSection(name="lab", window_tokens=1000, models=("small*",))


async def test_keys_and_groups_are_stored_with_all_their_limits(database: str) -> None:
    opened = Database(database)
    store = KeyStore(opened)
    key = generate(
        "änna", models=("a", "b*"), window_cost=1.5, group="lab", expires="2099-01-31", operator=True
    ).section

    def add(execute: Execute) -> None:
        key_store.put_group(execute, LAB)
        key_store.add_key(execute, key)

    await store.edit(add)
    stored = await store.read()
    assert (stored.keys, stored.groups) == ((key,), (LAB,))
    assert await store.revision() == stored.revision != ""
    with pytest.raises(KeyConflict, match="another key"):
        await store.edit(lambda execute: key_store.add_key(execute, generate("änna").section))
    with pytest.raises(KeyConflict, match="änna"):
        await store.edit(lambda execute: key_store.remove_group(execute, "lab"))
    assert await store.revision() == stored.revision, "a rejected edit changes nothing"
    changed = replace(key, group=None, balance_tokens=7)
    await KeyStore(Database(database)).edit(lambda execute: key_store.put_key(execute, changed))
    assert await store.revision() != stored.revision, "an edit of another program is noticed"
    assert (await store.read()).keys == (changed,)
    assert await store.edit(lambda execute: key_store.remove_group(execute, "lab"))
    assert await store.edit(lambda execute: key_store.remove_key(execute, key.id))
    assert not await store.edit(lambda execute: key_store.remove_key(execute, key.id))
    await opened.close()


async def test_edit_during_a_reading_is_noticed_afterwards(database: str) -> None:
    opened, other, key = Database(database), Database(database), generate("anna").section
    store = KeyStore(opened)
    await store.edit(lambda execute: key_store.add_key(execute, key))

    def read(execute: Execute) -> StoredKeys:
        def interrupted(statement: str, values: Sequence[Any]) -> Rows:
            rows = execute(statement, values)
            if "api_key" in statement:
                other.run(lambda there: key_store.edit(there, lambda _: key_store.remove_key(there, key.id)))
            return rows

        return key_store.read_keys(interrupted)

    stored = await opened.do(read)
    assert stored.keys == (key,), "read before it was revoked"
    assert stored.revision != await store.revision(), "the gateway must read again, or the key stays in force"
    other.close_connection()
    await opened.close()


async def test_entry_of_another_version_takes_no_other_with_it(database: str, caplog: pytest.LogCaptureFixture) -> None:
    opened = Database(database)
    store, key = KeyStore(opened), generate("anna").section

    def add(execute: Execute) -> None:
        key_store.put_key(execute, key)
        execute("INSERT INTO api_key (id, name, entry) VALUES ($1, $2, $3)", ("x", "newer", '{"name": "newer"}'))

    await store.edit(add)
    assert (await store.read()).keys == (key,)
    assert "newer in the database is not in force" in caplog.text
    await opened.close()


def test_file_wins_over_the_database() -> None:
    anna, bert = generate("anna").section, generate("bert", group="lab").section
    namesake, orphan = generate("anna").section, generate("carl", group="gone").section
    same_id = replace(anna, name="renamed", operator=True)
    stored = StoredKeys((namesake, same_id, bert, orphan), (replace(LAB, window_tokens=5), GroupSection(name="more")))
    found = merged((anna,), (LAB,), stored)
    assert found.keys == (anna, bert)
    assert found.groups == (LAB, GroupSection(name="more"))
    assert (found.file_ids, found.file_groups) == (frozenset({anna.id}), frozenset({"lab"}))
    assert [what.partition(":")[0] for what in found.ignored] == [
        "group `lab`",
        "key `anna`",
        "key `renamed`",
        "key `carl`",
    ]


def test_import_replaces_what_has_the_same_id_and_is_complete_or_does_not_happen(database: str) -> None:
    opened = Database(database).use(key_store.SCHEMA)
    anna, bert = generate("anna", group="lab").section, generate("bert", group="gone").section

    def run(*keys: KeySection) -> None:
        opened.run(lambda execute: key_store.edit(execute, lambda inner: key_store.import_keys(inner, keys, (LAB,))))

    with pytest.raises(KeyConflict, match="`gone`, which the database does not have"):
        run(anna, bert)
    assert opened.run(key_store.read_keys) == StoredKeys()
    run(anna)
    run(replace(anna, operator=True))
    assert opened.run(key_store.read_keys).keys == (replace(anna, operator=True),)
    with pytest.raises(KeyConflict, match="another key called `anna`"):
        run(generate("anna").section)
    opened.close_connection()
