"""The books on disk: spend by minute, key, model and node, in SQLite or PostgreSQL through the same statements.

Blocking; used from one thread at a time, never the event loop's. Several processes may share one database: every
write adds to what is there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import msgspec

from cortex.settings import Section
from cortex.wire.events import Usage

from .limits import MINUTE_S, Spent

GroupBy = Literal["key", "model", "node", "day"]

_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS spend (
        minute BIGINT NOT NULL,
        key_id TEXT NOT NULL,
        key_name TEXT NOT NULL,
        model TEXT NOT NULL,
        node TEXT NOT NULL,
        requests BIGINT NOT NULL,
        prompt_tokens BIGINT NOT NULL,
        cached_tokens BIGINT NOT NULL,
        completion_tokens BIGINT NOT NULL,
        reasoning_tokens BIGINT NOT NULL,
        PRIMARY KEY (key_id, minute, model, node)
    )""",
    """CREATE TABLE IF NOT EXISTS total (
        key_id TEXT PRIMARY KEY,
        tokens BIGINT NOT NULL
    )""",
)
_ADD_SPEND = """
    INSERT INTO spend (minute, key_id, key_name, model, node,
                       requests, prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (key_id, minute, model, node) DO UPDATE SET
        key_name = excluded.key_name,
        requests = spend.requests + excluded.requests,
        prompt_tokens = spend.prompt_tokens + excluded.prompt_tokens,
        cached_tokens = spend.cached_tokens + excluded.cached_tokens,
        completion_tokens = spend.completion_tokens + excluded.completion_tokens,
        reasoning_tokens = spend.reasoning_tokens + excluded.reasoning_tokens
"""
_ADD_TOTAL = """
    INSERT INTO total (key_id, tokens) VALUES (?, ?)
    ON CONFLICT (key_id) DO UPDATE SET tokens = total.tokens + excluded.tokens
"""
_BY_MINUTE = """
    SELECT minute, SUM(prompt_tokens + completion_tokens) FROM spend
    WHERE key_id = ? AND minute >= ? GROUP BY minute
"""
_TOTAL = "SELECT tokens FROM total WHERE key_id = ?"
_GROUPS: dict[GroupBy, str] = {
    "key": "key_id, MAX(key_name)",
    "model": "model, model",
    "node": "node, node",
    "day": "minute / 1440, minute / 1440",
}
_USAGE = """
    SELECT {group}, SUM(requests), SUM(prompt_tokens), SUM(cached_tokens),
           SUM(completion_tokens), SUM(reasoning_tokens)
    FROM spend WHERE minute >= ? AND minute < ? GROUP BY 1 ORDER BY 1
"""


class LedgerSection(Section, frozen=True):
    """Where spend is recorded."""

    database: str = "cortex-spend.db"
    """A SQLite file in `gateway.state`, or `postgresql://user@host/name` for several gateways with one set of books."""
    flush_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """How often spend is written; at most this much is lost when the gateway is killed."""


class Slot(msgspec.Struct, frozen=True, order=True):
    """What one row of the books is about."""

    key_id: str
    minute: int
    model: str
    node: str
    key_name: str

    @classmethod
    def at(cls, now: float, *, key_id: str, key_name: str, model: str, node: str) -> Slot:
        return cls(key_id, int(now // MINUTE_S), model, node, key_name)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and tokens."""

    requests: int = 0
    usage: Usage = Usage()

    @property
    def tokens(self) -> int:
        """What budgets are charged: prompt and completion."""
        return self.usage.prompt_tokens + self.usage.completion_tokens

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = self.usage, other.usage
        return Counts(
            requests=self.requests + other.requests,
            usage=Usage(
                prompt_tokens=mine.prompt_tokens + theirs.prompt_tokens,
                cached_tokens=mine.cached_tokens + theirs.cached_tokens,
                completion_tokens=mine.completion_tokens + theirs.completion_tokens,
                reasoning_tokens=mine.reasoning_tokens + theirs.reasoning_tokens,
            ),
        )


class StoreError(Exception):
    """The database cannot be used; the message says which and why."""


class Connection(Protocol):
    """What SQLite's and PostgreSQL's drivers have in common."""

    def cursor(self) -> Any: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


class Driver(Protocol):
    """How to reach one kind of database."""

    name: str
    """For messages; without secrets."""
    errors: tuple[type[Exception], ...]
    placeholder: str

    def connect(self) -> Connection:
        """Open a connection with the schema lock taken, so that processes may start together."""


class Sqlite:
    placeholder = "?"
    errors: tuple[type[Exception], ...] = (sqlite3.Error, OSError)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def connect(self) -> Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
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
        self._psycopg = psycopg
        self._url = url
        self.name = f"postgresql at {psycopg.conninfo.conninfo_to_dict(url).get('host') or 'the local socket'}"
        self.errors: tuple[type[Exception], ...] = (psycopg.Error,)

    def connect(self) -> Connection:
        connection = self._psycopg.connect(self._url, connect_timeout=10)
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (self._SCHEMA_LOCK,))
        return connection


def open_store(database: str) -> Store:
    """The store at a file path or `postgresql://` URL, made if it is not there. Raises `StoreError`."""
    is_url = database.startswith(("postgresql://", "postgres://"))
    return Store(Postgres(database) if is_url else Sqlite(Path(database).expanduser()))


class Store:
    """The books. After a failed call the next one connects anew. Raises `StoreError` from every method."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._connection: Connection | None = None
        self._run([])

    @property
    def name(self) -> str:
        return self._driver.name

    def exchange(self, batch: Mapping[Slot, Counts], since_minute: Mapping[str, int]) -> dict[str, Spent]:
        """Add `batch` and read what keys have spent by then, in one transaction: all of it or nothing.

        `since_minute` names the keys to read and how far back their minutes go; totals are of all time.
        """
        # Sorted, so that processes that write the same rows take their locks in the same order.
        statements: list[tuple[str, Sequence[Any]]] = [
            (_ADD_SPEND, _row(slot, counts)) for slot, counts in sorted(batch.items(), key=lambda entry: entry[0])
        ]
        totals: dict[str, int] = {}
        for slot, counts in batch.items():
            totals[slot.key_id] = totals.get(slot.key_id, 0) + counts.tokens
        statements += [(_ADD_TOTAL, row) for row in sorted(totals.items())]
        num_writes = len(statements)
        for key_id, first in since_minute.items():
            statements += [(_BY_MINUTE, (key_id, first)), (_TOTAL, (key_id,))]
        read = self._run(statements)[num_writes:]
        return {
            key_id: _spent(minutes, total)
            for key_id, minutes, total in zip(since_minute, read[::2], read[1::2], strict=True)
        }

    def usage(self, group: GroupBy, *, since: float, until: float) -> list[tuple[str, str, Counts]]:
        """(id, name, counts) of every key, model, node or day (as days since 1970) with spend in [since, until)."""
        bounds = (int(since // MINUTE_S), -int(-until // MINUTE_S))
        (rows,) = self._run([(_USAGE.format(group=_GROUPS[group]), bounds)])
        return [(str(row[0]), str(row[1]), _counts(row[2:])) for row in rows]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> list[list[Sequence[Any]]]:
        """Run all statements in one transaction; the rows of each."""
        try:
            connection = self._connection = self._connection or self._open()
            cursor = connection.cursor()
            results = []
            for statement, values in statements:
                cursor.execute(statement.replace("?", self._driver.placeholder), values)
                results.append(cursor.fetchall() if cursor.description else [])
            connection.commit()
            return results
        except self._driver.errors as error:
            self._drop()
            raise StoreError(f"cannot use the spend database {self.name}: {str(error).strip()}") from error

    def _open(self) -> Connection:
        connection = self._driver.connect()
        cursor = connection.cursor()
        for statement in _SCHEMA:
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
            pass  # it is broken, which is why it is dropped


def _row(slot: Slot, counts: Counts) -> tuple[str | int, ...]:
    usage = counts.usage
    return (
        slot.minute,
        slot.key_id,
        slot.key_name,
        slot.model,
        slot.node,
        counts.requests,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        usage.reasoning_tokens,
    )


def _spent(minutes: list[Sequence[Any]], total: list[Sequence[Any]]) -> Spent:
    by_minute = {int(minute): int(tokens) for minute, tokens in minutes}
    return Spent(by_minute=by_minute, total=int(total[0][0]) if total else 0)


def _counts(row: Sequence[Any]) -> Counts:
    requests, prompt, cached, completion, reasoning = map(int, row)
    usage = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion, reasoning_tokens=reasoning)
    return Counts(requests=requests, usage=usage)
