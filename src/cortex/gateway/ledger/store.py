"""The ledger's database: SQLite or PostgreSQL, with the same statements.

Calls block; use them from one thread at a time, never the event loop's. Several processes may share one database:
writes add to the rows that are there, and each gateway writes only its own reservations.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from cortex.gateway.ledger import tables
from cortex.gateway.ledger.limits import MINUTE_S, Spent
from cortex.gateway.ledger.tables import Claim, Counts, Execute, GroupBy, Rows, Slot
from cortex.settings import Section

T = TypeVar("T")

NO_CLAIM = Claim(owner="")
"""The claim of a process that reserves nothing."""


class LedgerSection(Section, frozen=True):
    """Where usage is recorded."""

    database: str = "cortex-spend.db"
    """A SQLite file in `gateway.state`, or `postgresql://user@host/name` for gateways with shared usage records."""
    flush_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """How often usage and reservations are written. A gateway that is killed loses at most what it admitted or finished
    within this time; requests that had been running for longer stay charged."""


class StoreError(Exception):
    """The database cannot be used; the message says which and why."""


class DatabaseConnection(Protocol):
    """What the drivers of SQLite and PostgreSQL have in common."""

    def cursor(self) -> Any: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


class Driver(Protocol):
    """Connects to one kind of database."""

    name: str
    """For messages; contains no secrets."""
    errors: tuple[type[Exception], ...]
    placeholder: str

    def connect(self) -> DatabaseConnection:
        """Open a connection that holds the schema lock, so that processes may start at the same time."""


class Sqlite:
    placeholder = "?"
    errors: tuple[type[Exception], ...] = (sqlite3.Error, OSError, OverflowError)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def connect(self) -> DatabaseConnection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Usage is private. SQLite gives its journal files the mode of the database.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self.path, timeout=10.0, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        return connection


class Postgres:
    placeholder = "%s"
    _SCHEMA_LOCK = 0x636F7274

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise StoreError("a postgresql:// database needs the driver: pip install 'cortex[postgres]'") from error
        try:
            host = psycopg.conninfo.conninfo_to_dict(url).get("host")
        except psycopg.Error as error:  # without the URL, which may hold a password
            raise StoreError("ledger.database is not a valid postgresql:// URL: correct it") from error
        self._psycopg = psycopg
        self._url = url
        self.name = f"postgresql at {host or 'the local socket'}"
        self.errors: tuple[type[Exception], ...] = (psycopg.Error,)

    def connect(self) -> DatabaseConnection:
        connection = self._psycopg.connect(self._url, connect_timeout=10)
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (self._SCHEMA_LOCK,))
        return connection


def open_store(database: str) -> Store:
    """The store at a file path or `postgresql://` URL, created if it does not exist. Raises `StoreError`."""
    return Store(Postgres(database) if is_url(database) else Sqlite(Path(database).expanduser()))


def is_url(database: str) -> bool:
    """Whether `database` names a server rather than a file."""
    return database.startswith(("postgresql://", "postgres://"))


class Store:
    """The ledger's database. After a failed call the next one connects again. Raises `StoreError` from every method."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._connection: DatabaseConnection | None = None
        self._run(lambda _: None)

    @property
    def name(self) -> str:
        return self._driver.name

    def exchange(
        self,
        batch: Mapping[Slot, Counts],
        since_minute: Mapping[str, int],
        *,
        before: Claim = NO_CLAIM,
        after: Claim = NO_CLAIM,
    ) -> dict[str, Spent]:
        """Add `batch`, replace the reservations `before` by `after`, and read what keys have spent.

        One transaction does all of it or nothing. `since_minute` has the keys to read and the first minute of each;
        totals are of all time.
        """

        def work(execute: Execute) -> dict[str, Spent]:
            # Reservations first, as in `settle_dead`, so that locks are always taken in the same order.
            returned = tables.replace_claim(execute, before, after) if before is not after else {}
            tables.add_spend(execute, {**batch, **returned})
            return tables.read_spent(execute, after.owner, since_minute)

        return self._run(work)

    def open_accounts(self, since_minute: Mapping[str, int], claim: Claim) -> dict[str, Spent]:
        """Record that the keys of `since_minute` exist, and read what they have spent, as `exchange` does."""

        def work(execute: Execute) -> dict[str, Spent]:
            tables.add_keys(execute, since_minute)
            return tables.read_spent(execute, claim.owner, since_minute)

        return self._run(work)

    def has_keys(self) -> bool:
        """Whether any key was ever configured on this database."""
        return self._run(tables.has_keys)

    def other_claims(self, owner: str) -> dict[str, int]:
        """The other gateways with reservations, and when each last renewed them, in milliseconds."""
        return self._run(lambda execute: tables.other_claims(execute, owner))

    def settle_dead(self, owner: str, renewed_ms: int) -> int:
        """Record the reservations of a dead gateway as spent; returns their tokens.

        Does nothing if they have been renewed since `renewed_ms`.
        """

        def work(execute: Execute) -> int:
            spend = tables.take_claim(execute, owner, renewed_ms)
            tables.add_spend(execute, spend)
            return sum(counts.tokens for counts in spend.values())

        return self._run(work)

    def usage(self, group: GroupBy, *, since: float, until: float) -> list[tuple[str, str, Counts]]:
        """(id, name, counts) of every key, model, node or day (as days since 1970) with spend in [since, until)."""
        bounds = (int(since // MINUTE_S), -int(-until // MINUTE_S))
        return self._run(lambda execute: tables.read_usage(execute, group, bounds))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, work: Callable[[Execute], T]) -> T:
        """Do `work` in one transaction."""
        try:
            connection = self._connection = self._connection or self._open()
            cursor = connection.cursor()

            def execute(statement: str, values: Sequence[Any]) -> Rows:
                cursor.execute(statement.replace("?", self._driver.placeholder), values)
                return cursor.fetchall() if cursor.description else []

            result = work(execute)
            connection.commit()
            return result
        except self._driver.errors as error:
            self._drop()
            raise StoreError(f"cannot use the usage database {self.name}: {str(error).strip()}") from error

    def _open(self) -> DatabaseConnection:
        connection = self._driver.connect()
        cursor = connection.cursor()
        for statement in tables.SCHEMA:
            cursor.execute(statement)
        connection.commit()
        return connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            connection.close()
        except self._driver.errors:
            pass  # the connection is broken already
