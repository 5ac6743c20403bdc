"""Keys and groups in the database: made on the page, over the API or by `cortex keys import`, and in force on every
gateway that shares the database.

The configuration file takes precedence: a key in the database is ignored while the file has one with its id or name,
and so is a group with the name of one in the file. Entries of the file can be changed there only.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from cortex.gateway.database import Database, Execute, Schema, StoreError
from cortex.gateway.ledger.groups import GroupSection
from cortex.gateway.ledger.keys import KeySection

log = logging.getLogger(__name__)

T = TypeVar("T")
Stored = TypeVar("Stored", KeySection, GroupSection)

SCHEMA: Schema = (
    "CREATE TABLE IF NOT EXISTS api_key (id TEXT PRIMARY KEY, name TEXT NOT NULL, entry TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS key_group (name TEXT PRIMARY KEY, entry TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS key_revision (id BIGINT PRIMARY KEY, revision TEXT NOT NULL)",
)
_REVISION = "SELECT revision FROM key_revision WHERE id = 1"
_NEW_REVISION = """
    INSERT INTO key_revision (id, revision) VALUES (1, $1)
    ON CONFLICT (id) DO UPDATE SET revision = excluded.revision
"""
_PUT_KEY = """
    INSERT INTO api_key (id, name, entry) VALUES ($1, $2, $3)
    ON CONFLICT (id) DO UPDATE SET name = excluded.name, entry = excluded.entry
"""
_PUT_GROUP = """
    INSERT INTO key_group (name, entry) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET entry = excluded.entry
"""


class KeyConflict(Exception):
    """A change that the other keys and groups do not allow; the message says why."""


class StoredKeys(NamedTuple):
    """What the database has."""

    keys: tuple[KeySection, ...] = ()
    groups: tuple[GroupSection, ...] = ()
    revision: str = ""
    """Changes with every edit."""

    def find(self, name_or_id: str) -> KeySection | None:
        """The key with this id, or else with this name."""
        found = [key for key in self.keys if key.id == name_or_id]
        found += [key for key in self.keys if key.name == name_or_id]
        return found[0] if found else None


class KeysInForce(NamedTuple):
    """The keys and groups of the file and of the database together."""

    keys: tuple[KeySection, ...] = ()
    groups: tuple[GroupSection, ...] = ()
    file_ids: frozenset[str] = frozenset()
    """The ids of keys that the file has."""
    file_groups: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    """Entries of the database that are not in force, and why."""
    revision: str = ""
    """That of `StoredKeys`."""

    @property
    def owners(self) -> list[KeySection | GroupSection]:
        """All keys and groups, which have limits."""
        return [*self.keys, *self.groups]


def merged(keys: Sequence[KeySection], groups: Sequence[GroupSection], stored: StoredKeys) -> KeysInForce:
    """`keys` and `groups` are those of the file, which take precedence. A key whose group does not exist is not in
    force, because its limits are unknown."""
    ignored: list[str] = []
    file_groups = {group.name for group in groups}
    more_groups = [group for group in stored.groups if group.name not in file_groups]
    ignored += [f"group `{group.name}`: the file has one" for group in stored.groups if group.name in file_groups]
    names = file_groups | {group.name for group in more_groups}
    file_ids, file_names = {key.id for key in keys}, {key.name for key in keys}
    more_keys = []
    for key in stored.keys:
        if key.id in file_ids or key.name in file_names:
            ignored.append(f"key `{key.name}`: the file has one")
        elif key.group is not None and key.group not in names:
            ignored.append(f"key `{key.name}`: its group `{key.group}` does not exist")
        else:
            more_keys.append(key)
    return KeysInForce(
        (*keys, *more_keys),
        (*groups, *more_groups),
        frozenset(file_ids),
        frozenset(file_groups),
        tuple(ignored),
        stored.revision,
    )


class KeyStore:
    """The keys and groups of the database, as this gateway knows them. Belongs to the loop."""

    def __init__(self, database: Database) -> None:
        self._database = database.use(SCHEMA)
        self._stored: StoredKeys | None = None

    @property
    def stored(self) -> StoredKeys:
        """As read last."""
        return self._stored or StoredKeys()

    async def read(self) -> StoredKeys:
        """Read them. While the database is unavailable, the last ones read stay in force; raises `StoreError` if there
        are none."""
        if self._database.exists:
            try:
                self._stored = await self._database.do(read_keys)
            except StoreError:
                if self._stored is None:
                    raise
        return self.stored

    async def revision(self) -> str:
        """That of `StoredKeys`, as it is now. Raises `StoreError`."""
        return await self._database.do(_revision) if self._database.exists else ""

    async def edit(self, work: Callable[[Execute], T]) -> T:
        """Do `work` as an edit. Raises `StoreError` or what `work` raises, and then nothing has changed."""
        return await self._database.do(lambda execute: edit(execute, work))


def edit(execute: Execute, work: Callable[[Execute], T]) -> T:
    """Do `work` and make every gateway notice it. Edits are serialised: the first statement locks."""
    execute(_NEW_REVISION, (secrets.token_hex(8),))
    return work(execute)


def read_keys(execute: Execute) -> StoredKeys:
    # The revision first: statements of one transaction may see different states, and an edit between them must differ.
    revision = _revision(execute)
    keys = _decoded(execute("SELECT name, entry FROM api_key ORDER BY name, id", ()), KeySection)
    groups = _decoded(execute("SELECT name, entry FROM key_group ORDER BY name", ()), GroupSection)
    return StoredKeys(keys, groups, revision)


def add_key(execute: Execute, section: KeySection) -> None:
    """Raises KeyConflict if another key has its name."""
    if execute("SELECT 1 FROM api_key WHERE name = $1", (section.name,)):
        raise KeyConflict(f"another key is called `{section.name}`")
    put_key(execute, section)


def put_key(execute: Execute, section: KeySection) -> None:
    """Add a key, or replace the one with its id."""
    execute(_PUT_KEY, (section.id, section.name, _encoded(section)))


def remove_key(execute: Execute, key_id: str) -> bool:
    """False if there is none."""
    return bool(execute("DELETE FROM api_key WHERE id = $1 RETURNING id", (key_id,)))


def put_group(execute: Execute, section: GroupSection) -> None:
    """Add a group, or replace the one with its name."""
    execute(_PUT_GROUP, (section.name, _encoded(section)))


def remove_group(execute: Execute, name: str) -> bool:
    """False if there is none. Raises KeyConflict while keys are in it."""
    members = [key.name for key in read_keys(execute).keys if key.group == name]
    if members:
        raise KeyConflict(f"keys are in the group `{name}`: {', '.join(members[:5])}; move or revoke them first")
    return bool(execute("DELETE FROM key_group WHERE name = $1 RETURNING name", (name,)))


def import_keys(
    execute: Execute,
    keys: Iterable[KeySection],
    groups: Iterable[GroupSection],
    file_groups: Iterable[str] = (),
) -> None:
    """Add these keys and groups, replacing those with the same id or name. Keys may also be in `file_groups`, the
    groups of the file. Raises KeyConflict, also for a key whose name another key has."""
    for group in groups:
        put_group(execute, group)
    before = read_keys(execute)
    known = {*file_groups, *(group.name for group in before.groups)}
    keys = tuple(keys)
    taken = {key.name for key in before.keys if key.id not in {each.id for each in keys}}
    for key in keys:
        if key.group is not None and key.group not in known:
            raise KeyConflict(f"the key `{key.name}` is in the group `{key.group}`, which the database does not have")
        if key.name in taken:
            raise KeyConflict(f"the database has another key called `{key.name}`")
        put_key(execute, key)


def _revision(execute: Execute) -> str:
    return "".join(str(row[0]) for row in execute(_REVISION, ()))


def _encoded(section: KeySection | GroupSection) -> str:
    values = {
        field.name: getattr(section, field.name)
        for field in msgspec.structs.fields(section)
        if getattr(section, field.name) != field.default
    }
    return msgspec.json.encode(values).decode()


def _decoded(rows: Iterable[Sequence[object]], kind: type[Stored]) -> tuple[Stored, ...]:
    found = []
    for name, entry in rows:
        try:
            found.append(msgspec.json.decode(str(entry), type=kind))
        except msgspec.DecodeError as problem:  # of another version
            log.error("%s in the database is not in force: %s", name, problem)
    return tuple(found)
