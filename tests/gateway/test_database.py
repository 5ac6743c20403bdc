"""The database that the stores of a gateway share."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from cortex.gateway.database import (
    WORK_S,
    Database,
    DatabaseConnection,
    Sqlite,
    StoreError,
    StoreSettingError,
    WaitingRows,
    placeholders,
)
from cortex.gateway.ledger.store import open_store

from ..waiting import WAIT_S

READER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
connection.close()
"""


def test_journal_survives_a_reader_while_this_process_has_the_database_open_twice(tmp_path: Path) -> None:
    path = tmp_path / "spend.db"
    first, second = open_store(str(path)), open_store(str(path))
    subprocess.run([sys.executable, "-c", READER, str(path)], check=True, capture_output=True)
    assert path.with_name("spend.db-wal").exists()
    first.close_connection()
    second.close_connection()


def test_a_file_that_another_process_creates_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("CREATE TABLE t (a)")
    other.execute("BEGIN IMMEDIATE")
    writes = threading.Timer(0.05, lambda: other.execute("COMMIT"))
    writes.start()
    Sqlite(path).connect().close()
    writes.join()
    other.close()


def test_database_is_private(tmp_path: Path) -> None:
    path = tmp_path / "spend.db"
    open_store(str(path)).close_connection()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_both_databases_read_the_same_statements(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    location = str(tmp_path / "x.db") if kind == "sqlite" else request.getfixturevalue("postgres_url")
    database = Database(location)
    values = [*range(11), None, "it's $1 and 50%"]
    statement = f"""SELECT '$1 ?', 7 % 4, $13, $2, $11
        WHERE 'a%' LIKE '%' AND $2 IN ({placeholders(11)}) AND CAST($12 AS TEXT) IS NULL"""
    try:
        assert [tuple(row) for row in database.run(lambda execute: execute(statement, values))] == [
            ("$1 ?", 3, "it's $1 and 50%", 1, 10)
        ]
    finally:
        database.close_connection()


async def test_what_waits_for_the_thread_fails_with_the_work_before_it_and_later_work_connects_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").write_text("in the way")
    database = Database(str(tmp_path / "folder" / "x.db"))
    is_free, num_calls = threading.Event(), 0

    def blocked() -> None:
        is_free.wait(WAIT_S)
        database.run(lambda _: None)

    def counted() -> None:
        nonlocal num_calls
        num_calls += 1
        database.run(lambda _: None)

    works = [database.submit(blocked), *(database.submit(counted) for _ in range(3))]
    is_free.set()
    assert [type(result) for result in await asyncio.gather(*works, return_exceptions=True)] == [StoreSettingError] * 4
    assert (num_calls, database.is_failing) == (0, True)
    (tmp_path / "folder").unlink()
    await database.do(lambda _: None)
    assert not database.is_failing
    assert [record.levelname for record in caplog.records if record.levelname == "ERROR"] == ["ERROR"]
    await database.close()
    with pytest.raises(StoreError, match="closed"):
        await database.do(lambda _: None)


async def test_a_long_report_delays_no_write(tmp_path: Path) -> None:
    database, is_free = Database(str(tmp_path / "x.db")), threading.Event()
    reading = asyncio.create_task(database.report(lambda _: is_free.wait(WAIT_S)))
    await asyncio.wait_for(database.do(lambda execute: execute("CREATE TABLE t (a BIGINT)", ())), WAIT_S)
    assert not reading.done()
    is_free.set()
    await reading
    await database.close()


@pytest.mark.parametrize("fault", ["full", "locked", "gone"])
async def test_work_fails_whole_while_the_database_is_unusable_and_goes_on_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path = tmp_path / "x.db"
    database = Database(str(path)).use(("CREATE TABLE IF NOT EXISTS t (a TEXT NOT NULL)",))
    add = "INSERT INTO t VALUES ($1)"
    rows: WaitingRows[str] = WaitingRows(database, lambda execute, row: execute(add, (row,)), 10)
    rows.append("first")
    assert await rows.flush()
    other = sqlite3.connect(path)
    connect = Sqlite.connect

    def connect_to_unusable(driver: Sqlite, work_s: float) -> DatabaseConnection:
        if fault == "gone":
            raise sqlite3.OperationalError("disk I/O error")
        connection: Any = connect(driver, work_s)
        connection.execute("PRAGMA max_page_count = 1")  # at least what it has
        return cast("DatabaseConnection", connection)

    with monkeypatch.context() as unusable:
        database.work_s = 0.05
        database.close_connection()
        if fault == "locked":
            other.execute("BEGIN IMMEDIATE")
        else:
            unusable.setattr(Sqlite, "connect", connect_to_unusable)
        for text in ("small", "x" * 200_000):
            rows.append(text)
        assert not await rows.flush()
        was_failing = database.is_failing
        assert was_failing
    other.rollback()
    database.work_s = WORK_S
    assert other.execute("SELECT a FROM t").fetchall() == [("first",)], "nothing of a failed transaction"
    database.close_connection()
    assert await rows.flush()
    assert not database.is_failing
    assert [len(row[0]) for row in other.execute("SELECT a FROM t")] == [5, 5, 200_000]
    other.close()
    await database.close()
