from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import cortex
from cortex.gateway.database import Database, StoreError, StoreSettingError
from cortex.gateway.ledger.limits import Spent
from cortex.gateway.ledger.store import SCHEMA, Counts, GroupBy, Slot, open_store
from cortex.gateway.ledger.usage_report import usage
from cortex.wire.events import Usage

from ...waiting import WAIT_S
from .exchanges import exchanged

NOW = 1_700_000_040.0
MINUTE = int(NOW // 60)
DAY_S = 86400


def counts(prompt: int, completion: int, requests: int = 1) -> Counts:
    return Counts(
        requests=requests,
        usage=Usage(prompt_tokens=prompt, cached_tokens=1, completion_tokens=completion, energy_mj=5000),
    )


def slot(key: str = "k1", at: float = NOW, model: str = "m", node: str = "n") -> Slot:
    return Slot.at(at, key_id=key, key_name=f"name of {key}", model=model, node=node)


def test_spend_adds_up_and_survives_reopening(database: str) -> None:
    store = open_store(database)
    assert exchanged(store, {slot(): counts(10, 5)}, {"k1": 0}) == {"k1": Spent(by_minute={MINUTE: 15}, total=15)}
    exchanged(store, {slot(): counts(1, 1), slot(node="other"): counts(2, 2), slot("k2"): counts(100, 0)}, {})
    store.close_connection()
    again = open_store(database)
    spent = exchanged(again, {slot(at=NOW + 60): counts(3, 0)}, {"k1": 0, "k2": 0, "nobody": 0})
    assert spent == {
        "k1": Spent(by_minute={MINUTE: 21, MINUTE + 1: 3}, total=24),
        "k2": Spent(by_minute={MINUTE: 100}, total=100),
        "nobody": Spent(),
    }
    assert exchanged(again, {}, {"k1": MINUTE + 1}) == {"k1": Spent(by_minute={MINUTE + 1: 3}, total=24)}
    again.close_connection()


def test_usage_by_key_model_node_and_day(database: str) -> None:
    store = open_store(database)
    exchanged(
        store,
        {
            slot("k1", model="big"): counts(100, 50),
            slot("k1", NOW + DAY_S, model="small", node="other"): counts(10, 5, requests=3),
            slot("k2", model="small"): counts(1, 1),
            slot("k2", NOW - 30 * DAY_S): counts(9999, 9999),
        },
        {},
    )
    since, until = NOW - DAY_S, NOW + 2 * DAY_S

    def rows(group: GroupBy) -> list[tuple[str, int, int]]:
        return [(row.id, row.requests, row.total_tokens) for row in usage(store, group=group, since=since, until=until)]

    assert rows("key") == [("k1", 4, 165), ("k2", 1, 2)]
    assert rows("model") == [("big", 1, 150), ("small", 4, 17)]
    assert rows("node") == [("n", 2, 152), ("other", 3, 15)]
    assert rows("day") == [("2023-11-14", 2, 152), ("2023-11-15", 3, 15)]
    (first, _) = usage(store, since=since, until=until)
    assert (first.name, first.cells()) == ("name of k1", ("4", "110", "2", "55", "0", "165", "0.003", ""))
    store.close_connection()


def test_writes_a_whole_batch_or_nothing(database: str) -> None:
    store = open_store(database)
    broken = Counts(requests=None)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="requests"):
        exchanged(store, {slot("a"): counts(1, 1), slot("b"): broken}, {})
    assert exchanged(store, {}, {"a": 0, "b": 0}) == {"a": Spent(), "b": Spent()}
    store.close_connection()


WRITER = """
import sys
from cortex.gateway.database import StoreError, StoreSettingError
from cortex.gateway.ledger.store import Counts, Slot, exchange, open_store
from cortex.wire.events import Usage
store = open_store(sys.argv[1])
for _ in range(20):
    batch = {
        Slot.at(0.0, key_id=key, key_name=key, model="m", node="n"): Counts(requests=1, usage=Usage(prompt_tokens=1))
        for key in sys.argv[2]
    }
    store.run(lambda execute: exchange(execute, batch, {}))
store.close_connection()
"""


def write(database: str, order: str, script: str = WRITER) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(Path(cortex.__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", script, database, order], env=environment)


def test_concurrent_processes_lose_nothing(database: str) -> None:
    writers = [write(database, order) for order in ("abc", "cba", "bca")]
    assert [writer.wait(timeout=WAIT_S) for writer in writers] == [0, 0, 0]
    store = open_store(database)
    spent = exchanged(store, {}, dict.fromkeys("abc", 0))
    assert {key: each.total for key, each in spent.items()} == {"a": 60, "b": 60, "c": 60}
    store.close_connection()


def test_committed_usage_survives_a_killed_process(database: str) -> None:
    script = WRITER.replace("store.close_connection()", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert write(database, "a", script).wait(timeout=WAIT_S) == -signal.SIGKILL
    store = open_store(database)
    assert exchanged(store, {}, {"a": 0})["a"].total == 20
    store.close_connection()


def test_reconnects_after_a_lost_connection(postgres_url: str) -> None:
    import psycopg

    store = open_store(postgres_url)
    with psycopg.connect(postgres_url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    with pytest.raises(StoreError, match="cannot use the database postgresql at"):
        exchanged(store, {slot("lost"): counts(1, 1)}, {})
    assert exchanged(store, {slot("lost"): counts(1, 1)}, {"lost": 0})["lost"].total == 2
    store.close_connection()


@pytest.mark.parametrize("content", [b"this is no database, whatever its name says" * 50, None])
def test_error_names_an_unusable_file(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "spend.db"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(StoreSettingError, match=r"cannot use the database .*spend\.db"):
        open_store(str(path))


def test_locked_file_is_no_error_of_the_configuration(tmp_path: Path) -> None:
    path = str(tmp_path / "spend.db")
    open_store(path).close_connection()
    database = Database(path).use(SCHEMA)
    database.work_s = 0.0
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="locked") as caught:
            database.run(lambda _: None)
    assert not isinstance(caught.value, StoreSettingError)


def test_error_names_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(StoreSettingError, match=r"spend\.db: .*state: (Not a directory|File exists)$"):
        open_store(str(tmp_path / "state" / "spend.db"))


def test_error_names_an_unreachable_server_without_its_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError, match=r"postgresql at 127\.0\.0\.1") as caught:
        open_store("postgresql://someone:secret-word@127.0.0.1:1/none")
    assert "secret-word" not in str(caught.value)
    assert not isinstance(caught.value, StoreSettingError)


def test_invalid_url_is_an_error_of_the_configuration() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreSettingError, match=r"not a valid postgresql:// URL") as caught:
        open_store("postgresql://someone:secret-word@[half")
    assert "secret-word" not in str(caught.value)


def test_creates_files_that_only_their_owner_can_read(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "spend.db"))
    exchanged(store, {}, {"a": 0})
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    store.close_connection()
    assert modes["spend.db"] == 0o600
    assert set(modes.values()) == {0o600}
