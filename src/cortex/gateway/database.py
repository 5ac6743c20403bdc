"""A database of the gateway: SQLite or PostgreSQL, with the same statements, on one thread.

Several processes may share one database.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from cortex.system.exits import ExitCode
from cortex.wire.errors import CortexError, DatabaseUnavailable, InvalidValue
from cortex.wire.words import os_error_in_words

log = logging.getLogger(__name__)

T = TypeVar("T")

Rows = list[Sequence[Any]]
Execute = Callable[[str, Sequence[Any]], Rows]
"""Runs one statement and returns its rows. Parameters are written as `$1`, `$2`, …, which both databases read."""


WORK_S = 8.0
"""Longer than any transaction here takes. A frozen server must delay nothing else, and must delay shutdown by less than
the service manager allows after `gateway.drain_s`."""
CONNECT_S = 3
_JOURNAL_RETRY_S = 0.01


class StoreError(Exception):
    """The database cannot be used; the message says which and why."""

    exit_code = ExitCode.UNREACHABLE
    """The exit code of a program that ends because of it."""


class StoreSettingError(StoreError):
    """It cannot be used until the configuration or the installation is changed."""

    exit_code = ExitCode.CONFIG


class RejectedValue(StoreError):
    """The database is available but cannot store a value: PostgreSQL rejects text with a NUL character."""


def client_error(error: StoreError) -> CortexError:
    """The error for a client; the gateway's log has the reason."""
    if isinstance(error, RejectedValue):
        return InvalidValue("The database cannot store a text with a NUL character or a number that is too large.")
    return DatabaseUnavailable("The request needs the gateway's database, which is unavailable now; try again later.")


Schema = tuple[str, ...]
"""Statements that create the tables of one store where they do not exist yet."""


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
    """Errors caused by values, not by the database."""

    def parameters(self, values: Sequence[Any]) -> Any:
        """The values of `$1`, `$2`, … as the driver takes them."""

    def connect(self, work_s: float = WORK_S) -> DatabaseConnection:
        """Limits statements to `work_s`, if the kind of database can."""

    def lock_schema(self, execute: Execute) -> None:
        """Wait until no other process creates tables, until the end of the transaction."""

    def limited(self, connection: Any, work_s: float) -> AbstractContextManager[None]:
        """A context in which work on `connection` fails after `work_s`."""


class Sqlite:
    errors: tuple[type[Exception], ...] = (sqlite3.Error, OSError, OverflowError)
    rejections: tuple[type[Exception], ...] = (sqlite3.DataError, sqlite3.IntegrityError, OverflowError)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def parameters(self, values: Sequence[Any]) -> dict[str, Any]:
        return {str(number): value for number, value in enumerate(values, 1)}  # SQLite takes `$1` for a name

    def connect(self, work_s: float = WORK_S) -> DatabaseConnection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Its content is private. SQLite gives its journal files the mode of the database. A file that exists is not
        # opened here: closing it would drop the locks of this process's other connections to it, and the next program
        # that reads the database would take itself for the last and delete the journal that they write to.
        with contextlib.suppress(FileExistsError):
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            if os.geteuid() == 0:  # a command of root; the gateway owns the folder
                owner = self.path.parent.stat()
                os.fchown(file, owner.st_uid, owner.st_gid)
            os.close(file)
        connection = sqlite3.connect(self.path, timeout=work_s, check_same_thread=False)
        try:
            _use_journal(connection, work_s)
            connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    def lock_schema(self, execute: Execute) -> None:
        execute("BEGIN IMMEDIATE", ())

    def limited(self, connection: Any, work_s: float) -> AbstractContextManager[None]:
        del connection, work_s  # a file; waiting for a lock has a limit of its own
        return contextlib.nullcontext()


def _use_journal(connection: sqlite3.Connection, work_s: float) -> None:
    """For this, unlike for anything else, SQLite does not wait while another process writes to a file without one."""
    ends_s = time.monotonic() + work_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > ends_s:
                raise
        time.sleep(_JOURNAL_RETRY_S)


class Postgres:
    _SCHEMA_LOCK = 0x636F7274
    _DEFAULTS: ClassVar[dict[str, Any]] = {
        "connect_timeout": CONNECT_S,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
    }
    """Settings of a connection that its URL may replace."""

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
        self._options = self._DEFAULTS | given
        self.name = f"postgresql at {given.get('host') or 'the local socket'}"
        self.errors: tuple[type[Exception], ...] = (psycopg.Error,)
        self.rejections: tuple[type[Exception], ...] = (psycopg.DataError, psycopg.IntegrityError)

    def parameters(self, values: Sequence[Any]) -> Sequence[Any]:
        return values

    def connect(self, work_s: float = WORK_S) -> DatabaseConnection:
        connection = self._psycopg.connect(
            **{"tcp_user_timeout": int(work_s * 1000)} | self._options, cursor_factory=self._psycopg.RawCursor
        )
        with self.limited(connection, work_s):
            connection.execute(f"SET statement_timeout = {int(work_s * 1000)}")
            connection.commit()
        return connection

    def lock_schema(self, execute: Execute) -> None:
        execute("SELECT pg_advisory_xact_lock($1)", (self._SCHEMA_LOCK,))

    @contextlib.contextmanager
    def limited(self, connection: Any, work_s: float) -> Iterator[None]:
        # The server's own limit does not hold on a server that is frozen, and those of TCP not on a local socket.
        timer = threading.Timer(work_s, _disconnect, [connection])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _disconnect(connection: Any) -> None:
    """Unblock the thread that waits for the server."""
    with (
        contextlib.suppress(Exception),  # it is closed already, even if the driver raises
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
    """One database of a gateway: one connection, one thread that uses it, and one policy for failures. The stores share
    it, each with its tables.

    `run` and `run_each` block; a command may call them itself. A gateway calls `do`, `do_each` and `call`, which run
    them on the thread, in order. `report` is for readings that may take seconds: it has a connection and a thread of
    its own, so that it delays no write.

    If the database is slow, locked, full or gone, a transaction fails after `work_s` at the latest with `StoreError`,
    and nothing of it is written. Everything that was waiting for the thread fails with it, so that a frozen server
    delays nobody twice; what comes later connects again. The failure is logged once. A store keeps what it could not
    write in memory, within its bounds, and tries again at its next turn.
    """

    def __init__(self, location: str, schemas: list[Schema] | None = None) -> None:
        """`location`: a file path or `postgresql://` URL, which is opened by the first use. Raises `StoreError` for one
        that cannot be a database."""
        self.location = location
        self.work_s = WORK_S
        """How long one transaction may take."""
        self._driver = driver_of(location)
        self._connection: DatabaseConnection | None = None
        self._schemas: list[Schema] = [] if schemas is None else schemas
        self._num_created = 0
        """Those of `_schemas` that the connection has created."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="database")
        self._failure: StoreError | None = None
        self._num_failures = 0
        self._is_closed = False
        self._reports: Database | None = None

    @property
    def name(self) -> str:
        """For messages; contains no secrets."""
        return self._driver.name

    @property
    def is_shared(self) -> bool:
        """Whether other gateways may use it too."""
        return is_url(self.location)

    @property
    def exists(self) -> bool:
        """False for a file that does not exist yet."""
        return self.is_shared or Path(self.location).exists()

    @property
    def is_failing(self) -> bool:
        """Whether it could not be used the last time."""
        return self._failure is not None

    def use(self, schema: Schema) -> Database:
        """Have these tables created before the next work. Returns itself."""
        if schema not in self._schemas:
            self._schemas.append(schema)
        return self

    async def do(self, work: Callable[[Execute], T]) -> T:
        """`run` on the thread."""
        return await self.call(lambda: self.run(work))

    async def serve(self, work: Callable[[Execute], T]) -> T:
        """`do` for the request of a client. Raises the CortexError that the client gets."""
        try:
            return await self.do(work)
        except StoreError as error:
            raise client_error(error) from error

    async def do_each(self, works: Sequence[Callable[[Execute], object]]) -> dict[int, Exception]:
        """`run_each` on the thread."""
        try:
            return await self.call(lambda: self.run_each(works))
        except StoreError as error:
            return dict.fromkeys(range(len(works)), error)

    async def call(self, blocking: Callable[[], T]) -> T:
        """Call something that uses `run` on the thread. Raises `StoreError` without calling it if the database became
        unavailable while it waited for its turn."""
        return await self.submit(blocking)

    def submit(self, blocking: Callable[[], T]) -> asyncio.Future[T]:
        """`call` without waiting; it has its turn before everything that is submitted later."""
        num_failures = self._num_failures

        def guarded() -> T:
            if self._failure is not None and self._num_failures != num_failures:
                raise self._failure
            return blocking()

        if self._is_closed:
            raise StoreError(f"the database {self.name} is closed")
        return asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    async def report(self, work: Callable[[Execute], T]) -> T:
        """Do a reading that may take seconds. It sees what `do` has written."""
        if self._reports is None:
            self._reports = Database(self.location, self._schemas)
        self._reports.work_s = self.work_s
        return await self._reports.do(work)

    async def close(self) -> None:
        """Idempotent."""
        if self._reports is not None:
            await self._reports.close()
        if not self._is_closed:
            self._is_closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self.close_connection)
            self._thread.shutdown(wait=False)

    def close_connection(self) -> None:
        """What `close` does, for a command."""
        self._drop()

    def run(self, work: Callable[[Execute], T]) -> T:
        """Do `work` in one transaction. Raises `StoreError`, and then nothing was written."""
        try:
            connection = self._connection = self._connection or self._driver.connect(self.work_s)
            self._create_tables(connection)
            result = self._work(connection, work)
        except self._driver.errors as error:
            self._drop()
            reason = os_error_in_words(error) if isinstance(error, OSError) else " ".join(str(error).split())
            kind = StoreSettingError if _is_lasting(error) else StoreError
            if isinstance(error, self._driver.rejections):
                kind = RejectedValue
            problem = kind(f"cannot use the database {self.name}: {reason}")
            if is_unavailable(problem):
                self._failed(problem)
            raise problem from error
        except BaseException:
            self._drop()  # no later work may commit the writes of this one
            raise
        if self._failure is not None:
            log.info("the database %s is available again", self.name)
            self._failure = None
        return result

    def run_each(self, works: Sequence[Callable[[Execute], object]]) -> dict[int, Exception]:
        """Do all of `works` in one transaction or, if one of them fails, each in its own. Returns the errors of those
        that failed, by position; once the database is unavailable, all the rest fail."""
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

    def _failed(self, problem: StoreError) -> None:
        if self._failure is None:
            log.error("the database is unavailable; requests are served without it: %s", problem)
        self._failure = problem
        self._num_failures += 1

    def _work(self, connection: DatabaseConnection, work: Callable[[Execute], T]) -> T:
        def execute(statement: str, values: Sequence[Any]) -> Rows:
            cursor.execute(statement, self._driver.parameters(values))
            return cursor.fetchall() if cursor.description else []

        # An open cursor would keep the locks of a SQLite connection that is closed after a failure.
        with self._driver.limited(connection, self.work_s), contextlib.closing(connection.cursor()) as cursor:
            result = work(execute)
            connection.commit()
        return result

    def _create_tables(self, connection: DatabaseConnection) -> None:
        if missing := self._schemas[self._num_created :]:

            def create(execute: Execute) -> None:
                self._driver.lock_schema(execute)
                for schema in missing:
                    for statement in schema:
                        execute(statement, ())

            self._work(connection, create)
            self._num_created += len(missing)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        self._num_created = 0
        if connection is None:
            return
        try:
            connection.close()
        except self._driver.errors:
            pass  # the connection is broken already


class WaitingRows(Generic[T]):
    """Rows that are written in batches. While the database is unavailable they wait in memory, the newest up to a
    limit. Belongs to the loop."""

    def __init__(self, database: Database, add: Callable[[Execute, T], object], max_waiting: int) -> None:
        """`add` writes one row."""
        self._database = database
        self._add = add
        self._max_waiting = max_waiting
        self._rows: deque[T] = deque(maxlen=max_waiting)
        self._turn = asyncio.Lock()
        self.append = self._rows.append

    def __bool__(self) -> bool:
        """Whether rows wait, or are being written."""
        return bool(self._rows) or self._turn.locked()

    async def flush(self, then: Callable[[Execute], object] | None = None) -> bool:
        """Write the waiting rows and do `then`, after any flush under way; returns whether everything was written.
        Never raises. Continues if its caller is cancelled."""
        return await asyncio.shield(self._flush(then))

    async def _flush(self, then: Callable[[Execute], object] | None) -> bool:
        async with self._turn:
            return await self._write(then)

    async def _write(self, then: Callable[[Execute], object] | None) -> bool:
        batch = list(self._rows)
        self._rows.clear()
        works: list[Callable[[Execute], object]] = [partial(_add_row, add=self._add, row=row) for row in batch]
        failures = await self._database.do_each([*works, then] if then is not None else works)
        unwritten = [row for at, row in enumerate(batch) if at in failures and is_unavailable(failures[at])]
        room = self._max_waiting - len(self._rows)  # those that arrived meanwhile are newer
        self._rows.extendleft(reversed(unwritten[max(0, len(unwritten) - room) :]))
        for failure in failures.values():
            if not is_unavailable(failure):
                log.error("a row could not be written", exc_info=failure)
        return not failures


def _add_row(execute: Execute, add: Callable[[Execute, T], object], row: T) -> None:
    add(execute, row)


def placeholders(num_values: int, first: int = 1) -> str:
    """`$1, $2, …` for a list of values."""
    return ", ".join(f"${number}" for number in range(first, first + num_values))


def is_unavailable(error: Exception) -> bool:
    """Whether the database is at fault, not the value."""
    return isinstance(error, StoreError) and not isinstance(error, RejectedValue)


def _is_lasting(error: Exception) -> bool:
    """Whether it is a file or folder of the wrong kind, or one that may not be written: not a full disk, a locked file
    or a server."""
    if isinstance(error, sqlite3.Error):
        kinds = ("SQLITE_CANTOPEN", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_READONLY")
        return getattr(error, "sqlite_errorname", "").startswith(kinds)
    return isinstance(error, FileExistsError | NotADirectoryError | PermissionError)
