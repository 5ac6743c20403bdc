"""The embedded database, opened several times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cortex.gateway.ledger.store import open_store

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
    first.close()
    second.close()


def test_database_is_private(tmp_path: Path) -> None:
    path = tmp_path / "spend.db"
    open_store(str(path)).close()
    assert path.stat().st_mode & 0o777 == 0o600
