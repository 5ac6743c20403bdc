"""A database of the gateway: SQLite or PostgreSQL, with the same statements.

Calls block; use them from one thread at a time, never the event loop's. Several processes may share one database.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cortex.system.exits import ExitCode
from cortex.wire.words import os_error_in_words

T = TypeVar("T")

Rows = list[Sequence[Any]]
Execute = Callable[[str, Sequence[Any]], Rows]
"""Runs one statement and returns its rows. Parameters are written as `?`."""


WORK_S = 8.0
"""How long one transaction may take. Longer than any here; a server that is frozen must delay nothing else, and the
gateway's end by less than its service manager allows after `gateway.drain_s`."""
CONNECT_S = 3.0


class StoreError(Exception):
    """The database cannot be used; the message says which and why."""

    exit_code = ExitCode.UNREACHABLE
    """The exit code of a program that ends because of it."""


class StoreSettingError(StoreError):
    """It cannot be used until the configuration or the installation is changed."""

    exit_code = ExitCode.CONFIG


class RejectedValue(StoreError):
    """The database is available, and cannot hold a value: PostgreSQL no text with a NUL character."""


class DatabaseConnection(Protocol):
    """What the drivers of SQLite and PostgreSQL have in common."""

    def cursor(self) -> Any: ...
    def commit(self) -> None: ...
    def close(self) -> None: ...


class Driver(Protocol):
    """Connects to one kind of database."""

    name: str
    """For messages; contains no secrets."""
    errors: tuple[type[Exception], ...]
    rejections: tuple[type[Exception], ...]
    """Those of the values, not of the database."""
    placeholder: str

    def connect(self) -> DatabaseConnection:
        """Open a connection that holds the schema lock, so that processes may start at the same time."""

    def limited(self, connection: Any) -> AbstractContextManager[None]:
        """Work on `connection` fails inside of it once it has taken `WORK_S`."""


class Sqlite:
    placeholder = "?"
    errors: tuple[type[Exception], ...] = (sqlite3.Error, OSError, OverflowError)
    rejections: tuple[type[Exception], ...] = (sqlite3.DataError, sqlite3.IntegrityError, OverflowError)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def connect(self) -> DatabaseConnection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # What it holds is private. SQLite gives its journal files the mode of the database. A file that exists is not
        # opened here: closing it would drop the locks of this process's other connections to it, and the next program
        # that reads the database would take itself for the last and delete the journal that they write to.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self.path, timeout=30.0, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        return connection

    def limited(self, connection: Any) -> AbstractContextManager[None]:
        del connection  # a file; waiting for a lock has a limit of its own
        return contextlib.nullcontext()


class Postgres:
    placeholder = "%s"
    _SCHEMA_LOCK = 0x636F7274

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            what = "a postgresql:// database needs the driver: run `pip install '.[postgres]'` in a checkout of cortex"
            raise StoreSettingError(what) from error
        try:
            given = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:  # without the URL, which may hold a password
            raise StoreSettingError("ledger.database is not a valid postgresql:// URL: correct it") from error
        self._psycopg = psycopg
        self._options = self._limits() | given
        self.name = f"postgresql at {given.get('host') or 'the local socket'}"
        self.errors: tuple[type[Exception], ...] = (psycopg.Error,)
        self.rejections: tuple[type[Exception], ...] = (psycopg.DataError, psycopg.IntegrityError)

    def connect(self) -> DatabaseConnection:
        connection = self._psycopg.connect(**self._options)
        with self.limited(connection):
            connection.execute(f"SET statement_timeout = {int(WORK_S * 1000)}")
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (self._SCHEMA_LOCK,))
        return connection

    @contextlib.contextmanager
    def limited(self, connection: Any) -> Iterator[None]:
        # The server's own limit does not hold on a server that is frozen, and those of TCP not on a local socket.
        timer = threading.Timer(WORK_S, _disconnect, [connection])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @staticmethod
    def _limits() -> dict[str, Any]:
        """Settings of a connection that its URL may replace."""
        return {
            "connect_timeout": max(2, int(CONNECT_S)),
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": int(WORK_S * 1000),
        }


def _disconnect(connection: Any) -> None:
    """Have the thread that waits for the server fail."""
    with (
        contextlib.suppress(Exception),  # it is closed already, whatever the driver raises then
        socket.socket(fileno=os.dup(connection.fileno())) as duplicate,
    ):
        duplicate.shutdown(socket.SHUT_RDWR)


def driver_of(database: str) -> Driver:
    """The driver for a file path or `postgresql://` URL. Raises `StoreError`."""
    return Postgres(database) if is_url(database) else Sqlite(Path(database).expanduser())


def is_url(database: str) -> bool:
    """Whether `database` names a server rather than a file."""
    return database.startswith(("postgresql://", "postgres://"))


def check_location(database: str | None) -> None:
    """Raises ValueError for the URL of anything but PostgreSQL. The rest of a URL may be a secret and is not shown."""
    if database is not None and "://" in database and not is_url(database):
        scheme = database.partition("://")[0]
        raise ValueError(f"database must be a file or look like `postgresql://user@host/name`, got `{scheme}://…`")


class Database:
    """One connection, opened by the first `run`. After a failed `run` the next one connects again."""

    def __init__(self, driver: Driver, schema: Sequence[str], what: str) -> None:
        """`schema` creates what does not exist yet. `what` names the database in errors, such as "usage database"."""
        self._driver = driver
        self._schema = schema
        self._what = what
        self._connection: DatabaseConnection | None = None

    @property
    def name(self) -> str:
        return self._driver.name

    def run(self, work: Callable[[Execute], T]) -> T:
        """Do `work` in one transaction. Raises `StoreError`, and then nothing was written."""
        try:
            connection = self._connection = self._connection or self._open()
            return self._work(connection, work)
        except self._driver.errors as error:
            self._drop()
            reason = os_error_in_words(error) if isinstance(error, OSError) else " ".join(str(error).split())
            kind = StoreSettingError if _is_lasting(error) else StoreError
            if isinstance(error, self._driver.rejections):
                kind = RejectedValue
            raise kind(f"cannot use the {self._what} {self.name}: {reason}") from error
        except BaseException:
            self._drop()  # no later work may commit what this one has begun
            raise

    def run_each(self, works: Sequence[Callable[[Execute], object]]) -> dict[int, Exception]:
        """Do all of `works` in one transaction, or, if one of them cannot be done, each in its own, so that it takes
        no other with it. Returns why some were not done, by position: once the database is unavailable, none is."""
        try:
            self.run(lambda execute: [work(execute) for work in works])
            return {}
        except Exception as error:  # noqa: BLE001 - found again below, and returned
            if is_unavailable(error):
                return dict.fromkeys(range(len(works)), error)
        failures: dict[int, Exception] = {}
        for position, work in enumerate(works):
            try:
                self.run(work)
            except Exception as error:  # noqa: BLE001 - returned
                if is_unavailable(error):
                    return failures | dict.fromkeys(range(position, len(works)), error)
                failures[position] = error
        return failures

    def _work(self, connection: DatabaseConnection, work: Callable[[Execute], T]) -> T:
        cursor = connection.cursor()

        def execute(statement: str, values: Sequence[Any]) -> Rows:
            cursor.execute(statement.replace("?", self._driver.placeholder), values)
            return cursor.fetchall() if cursor.description else []

        with self._driver.limited(connection):
            result = work(execute)
            connection.commit()
        return result

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> DatabaseConnection:
        connection = self._driver.connect()
        cursor = connection.cursor()
        with self._driver.limited(connection):
            for statement in self._schema:
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


def is_unavailable(error: Exception) -> bool:
    """Whether it is of the database, and not of what was to be written."""
    return isinstance(error, StoreError) and not isinstance(error, RejectedValue)


def _is_lasting(error: Exception) -> bool:
    """Whether it is a file or folder of the wrong kind, or one that may not be written: not a full disk, a locked file
    or a server."""
    if isinstance(error, sqlite3.Error):
        kinds = ("SQLITE_CANTOPEN", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_READONLY")
        return getattr(error, "sqlite_errorname", "").startswith(kinds)
    return isinstance(error, FileExistsError | NotADirectoryError | PermissionError)
