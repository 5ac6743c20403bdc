"""The tables of files and batches, and the statements on them, which SQLite and PostgreSQL both run.

`stored_file` has one row for each file, whose bytes are on disk. `batch` has one row for each batch, with the gateway
that runs it and when that last showed that it is alive. `batch_result` locates the result of each line that has one;
its primary key ensures one per line. Every function runs inside the caller's transaction.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from cortex.gateway.database import Execute, Schema
from cortex.gateway.ledger.store import Counts, Slot, add_spend

Kind = Literal["openai", "anthropic"]
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
_ACTIVE = "('validating', 'in_progress', 'finalizing', 'cancelling')"
HIDDEN = "message_batch"
"""The purpose of files of Anthropic batches, which clients cannot see as files."""

SCHEMA = Schema(
    (
        """CREATE TABLE IF NOT EXISTS stored_file (
        id TEXT PRIMARY KEY,
        key_id TEXT NOT NULL,
        purpose TEXT NOT NULL,
        filename TEXT NOT NULL,
        num_bytes BIGINT NOT NULL,
        created_s BIGINT NOT NULL,
        expires_s BIGINT NOT NULL
    )""",
        "CREATE INDEX IF NOT EXISTS stored_file_key ON stored_file (key_id, created_s)",
        """CREATE TABLE IF NOT EXISTS batch (
        id TEXT PRIMARY KEY,
        key_id TEXT NOT NULL,
        key_name TEXT NOT NULL,
        kind TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        completion_window TEXT NOT NULL,
        metadata TEXT NOT NULL,
        input_file_id TEXT NOT NULL,
        output_file_id TEXT NOT NULL,
        error_file_id TEXT NOT NULL,
        status TEXT NOT NULL,
        created_s BIGINT NOT NULL,
        expires_s BIGINT NOT NULL,
        times TEXT NOT NULL,
        problems TEXT NOT NULL,
        num_lines BIGINT NOT NULL,
        num_succeeded BIGINT NOT NULL,
        num_failed BIGINT NOT NULL,
        num_cancelled BIGINT NOT NULL,
        num_expired BIGINT NOT NULL,
        prompt_tokens BIGINT NOT NULL,
        cached_tokens BIGINT NOT NULL,
        completion_tokens BIGINT NOT NULL,
        cost_nano BIGINT NOT NULL,
        owner TEXT NOT NULL,
        renewed_s BIGINT NOT NULL
    )""",
        "CREATE INDEX IF NOT EXISTS batch_key ON batch (key_id, created_s)",
        """CREATE TABLE IF NOT EXISTS batch_result (
        batch_id TEXT NOT NULL,
        number BIGINT NOT NULL,
        outcome TEXT NOT NULL,
        segment TEXT NOT NULL,
        start BIGINT NOT NULL,
        num_bytes BIGINT NOT NULL,
        PRIMARY KEY (batch_id, number)
    )""",
    ),
)

Outcome = Literal["succeeded", "failed", "cancelled", "expired"]
OUTCOMES: tuple[Outcome, ...] = ("succeeded", "failed", "cancelled", "expired")


class StoredFile(msgspec.Struct, frozen=True):
    """A row of `stored_file`."""

    id: str
    key_id: str
    purpose: str
    filename: str
    num_bytes: int
    created_s: int
    expires_s: int


class Batch(msgspec.Struct, frozen=True):
    """A row of `batch`."""

    id: str
    key_id: str
    key_name: str
    kind: str
    endpoint: str
    completion_window: str
    metadata: str
    """A JSON object, or `null`."""
    input_file_id: str
    output_file_id: str
    error_file_id: str
    """The ids reserved for the result files, which exist once the batch has ended."""
    status: str
    created_s: int
    expires_s: int
    times: str
    """When it reached each status, as a JSON object."""
    problems: str
    """The first lines that are invalid, or why it failed, as a JSON array."""
    num_lines: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_expired: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_nano: int = 0
    owner: str = ""
    """The gateway that runs it; empty if none does."""
    renewed_s: int = 0

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE


class LineResult(NamedTuple):
    """Where the result of a line is."""

    number: int
    outcome: Outcome
    segment: str
    start: int
    num_bytes: int


class Charged(NamedTuple):
    """Usage of lines."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_nano: int = 0


def new_id(prefix: str, now_s: float) -> str:
    """Ids made within one second sort in the order of creation, as listings do."""
    return f"{prefix}{int(now_s * 1e6):013x}{secrets.token_hex(6)[:11]}"


_FILE = ", ".join(StoredFile.__struct_fields__)
_BATCH = ", ".join(Batch.__struct_fields__)


def _marks(struct: type[msgspec.Struct]) -> str:
    return ", ".join("?" * len(struct.__struct_fields__))


# --- files


def add_file(execute: Execute, file: StoredFile) -> None:
    execute(
        f"INSERT INTO stored_file ({_FILE}) VALUES ({_marks(StoredFile)}) ON CONFLICT (id) DO NOTHING",
        msgspec.structs.astuple(file),
    )


def held(execute: Execute, key_id: str) -> tuple[int, int]:
    """How many files a key has, and their bytes."""
    [(count, num_bytes)] = execute(
        "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM stored_file WHERE key_id = ?", (key_id,)
    )
    return int(count), int(num_bytes)


def file(execute: Execute, key_id: str, id: str, now_s: float) -> StoredFile | None:
    rows = execute(
        f"SELECT {_FILE} FROM stored_file WHERE id = ? AND key_id = ? AND expires_s > ?", (id, key_id, int(now_s))
    )
    return StoredFile(*rows[0]) if rows else None


def files(
    execute: Execute, key_id: str, now_s: float, *, purpose: str | None, after: str | None, limit: int, ascending: bool
) -> list[StoredFile]:
    """Those of a key after `after`, in order of their creation."""
    where, values = "key_id = ? AND expires_s > ? AND purpose <> ?", [key_id, int(now_s), HIDDEN]
    if purpose is not None:
        where, values = f"{where} AND purpose = ?", [*values, purpose]
    return [
        StoredFile(*row)
        for row in _page(execute, "stored_file", _FILE, where, values, after, limit, ascending=ascending)
    ]


def drop_file(execute: Execute, id: str) -> None:
    execute("DELETE FROM stored_file WHERE id = ?", (id,))


def unowned(execute: Execute, names: Sequence[str]) -> list[str]:
    """The files on disk without a row: neither a client's file nor a segment of an active batch."""
    batch_of = {name: name.partition(".")[0] for name in names}
    marks = ", ".join("?" * len(names))
    rows = execute(
        f"""SELECT id FROM stored_file WHERE id IN ({marks})
        UNION ALL SELECT id FROM batch WHERE id IN ({marks}) AND status IN {_ACTIVE}""",
        (*names, *batch_of.values()),
    )
    owners = {row[0] for row in rows}
    return [name for name in names if name not in owners and batch_of[name] not in owners]


def is_in_use(execute: Execute, id: str) -> bool:
    """Whether a batch that has not ended reads the file."""
    return bool(execute(f"SELECT 1 FROM batch WHERE input_file_id = ? AND status IN {_ACTIVE}", (id,)))


def expired_files(execute: Execute, now_s: float) -> list[str]:
    """Some expired files that no active batch reads."""
    rows = execute(
        f"""SELECT id FROM stored_file WHERE expires_s <= ? AND NOT EXISTS
        (SELECT 1 FROM batch WHERE input_file_id = stored_file.id AND status IN {_ACTIVE}) LIMIT 100""",
        (int(now_s),),
    )
    return [str(row[0]) for row in rows]


# --- batches


def add_batch(execute: Execute, batch: Batch) -> None:
    execute(f"INSERT INTO batch ({_BATCH}) VALUES ({_marks(Batch)})", msgspec.structs.astuple(batch))


def batch(execute: Execute, key_id: str | None, id: str, kind: Kind | None = None) -> Batch | None:
    """The batch with this id, of one key or of any."""
    where, values = "id = ?", [id]
    if key_id is not None:
        where, values = f"{where} AND key_id = ?", [*values, key_id]
    if kind is not None:
        where, values = f"{where} AND kind = ?", [*values, kind]
    rows = execute(f"SELECT {_BATCH} FROM batch WHERE {where}", values)
    return Batch(*rows[0]) if rows else None


def batches(
    execute: Execute,
    key_id: str | None,
    *,
    kind: Kind | None,
    after: str | None = None,
    limit: int,
    ascending: bool = False,
) -> list[Batch]:
    """Those of a key, or of all, after `after`."""
    where = "1 = 1"
    values: list[str] = []
    if key_id is not None:
        where, values = f"{where} AND key_id = ?", [*values, key_id]
    if kind is not None:
        where, values = f"{where} AND kind = ?", [*values, kind]
    return [Batch(*row) for row in _page(execute, "batch", _BATCH, where, values, after, limit, ascending=ascending)]


def num_active(execute: Execute, key_id: str) -> int:
    [(count,)] = execute(f"SELECT COUNT(*) FROM batch WHERE key_id = ? AND status IN {_ACTIVE}", (key_id,))
    return int(count)


def claim(execute: Execute, owner: str, now_s: float, lost_s: float, limit: int) -> list[Batch]:
    """Take over batches without an owner or not renewed since `lost_s`, oldest first. They may be `owner`'s own: one
    that kept running while the database was unavailable, or one that it could not release."""
    rows = execute(
        f"""SELECT id FROM batch WHERE status IN {_ACTIVE} AND (owner = '' OR renewed_s <= ?)
        ORDER BY created_s, id LIMIT ?""",
        (int(lost_s), limit),
    )
    taken = []
    for (id,) in rows:
        taken += execute(
            f"""UPDATE batch SET owner = ?, renewed_s = ? WHERE id = ? AND status IN {_ACTIVE}
            AND (owner = '' OR renewed_s <= ?) RETURNING {_BATCH}""",
            (owner, int(now_s), id, int(lost_s)),
        )
    return [Batch(*row) for row in taken]


def renew(execute: Execute, id: str, owner: str, now_s: float) -> str | None:
    """Show that `owner` still runs the batch; returns its status, or None where another gateway has it."""
    rows = execute(
        "UPDATE batch SET renewed_s = ? WHERE id = ? AND owner = ? RETURNING status", (int(now_s), id, owner)
    )
    return str(rows[0][0]) if rows else None


def release(execute: Execute, id: str, owner: str) -> None:
    """Give up ownership, so that another gateway can claim it at once."""
    execute("UPDATE batch SET owner = '' WHERE id = ? AND owner = ?", (id, owner))


def move(
    execute: Execute,
    id: str,
    owner: str | None,
    status: str,
    now_s: float,
    only: Sequence[str],
    values: Mapping[str, Any] | None = None,
) -> Batch | None:
    """Give the batch a new status if its status is one of `only`, for its owner or (None) for a client; `values` are
    other columns. Returns None if nothing matched."""
    found = batch(execute, None, id)
    if found is None or found.status not in only:
        return None
    times: dict[str, int] = msgspec.json.decode(found.times)
    times[status] = int(now_s)
    columns = {"status": status, "times": msgspec.json.encode(times).decode(), **(values or {})}
    marks = ", ".join(f"{name} = ?" for name in columns)
    of_owner = "" if owner is None else " AND owner = ?"
    rows = execute(
        f"UPDATE batch SET {marks} WHERE id = ? AND status = ?{of_owner} RETURNING {_BATCH}",
        (*columns.values(), id, found.status, *(() if owner is None else (owner,))),
    )
    return Batch(*rows[0]) if rows else None


def record(
    execute: Execute,
    id: str,
    owner: str,
    now_s: float,
    results: Sequence[LineResult],
    charged: Charged,
    spend: Mapping[Slot, Counts],
) -> str | None:
    """Write results and their charges atomically; returns the status of the batch, or None, with nothing written, if
    another gateway owns it."""
    counts = [sum(result.outcome == outcome for result in results) for outcome in OUTCOMES]
    rows = execute(
        """UPDATE batch SET renewed_s = ?, num_succeeded = num_succeeded + ?, num_failed = num_failed + ?,
        num_cancelled = num_cancelled + ?, num_expired = num_expired + ?, prompt_tokens = prompt_tokens + ?,
        cached_tokens = cached_tokens + ?, completion_tokens = completion_tokens + ?, cost_nano = cost_nano + ?
        WHERE id = ? AND owner = ? RETURNING status""",
        (int(now_s), *counts, *charged, id, owner),
    )
    if not rows:
        return None
    for result in results:
        execute(
            """INSERT INTO batch_result (batch_id, number, outcome, segment, start, num_bytes)
            VALUES (?, ?, ?, ?, ?, ?)""",
            (id, *result),
        )
    add_spend(execute, spend)
    return str(rows[0][0])


def results(execute: Execute, id: str, after: int, limit: int) -> list[LineResult]:
    """The results of a batch in order of its lines, from the one after line `after` on."""
    rows = execute(
        """SELECT number, outcome, segment, start, num_bytes FROM batch_result WHERE batch_id = ? AND number > ?
        ORDER BY number LIMIT ?""",
        (id, after, limit),
    )
    return [LineResult(int(row[0]), row[1], row[2], int(row[3]), int(row[4])) for row in rows]


def recorded(execute: Execute, id: str, numbers: Sequence[int]) -> set[int]:
    """Those of the lines that have a result."""
    marks = ", ".join("?" * len(numbers))
    statement = f"SELECT number FROM batch_result WHERE batch_id = ? AND number IN ({marks})"
    return {int(row[0]) for row in execute(statement, (id, *numbers))}


def begin(execute: Execute, id: str, owner: str, now_s: float, num_lines: int, problems: str) -> None:
    """Mark it as in progress after its lines were read, unless it was cancelled meanwhile."""
    values = {"num_lines": num_lines, "problems": problems}
    if move(execute, id, owner, "in_progress", now_s, ("validating",), values) is None:
        execute("UPDATE batch SET num_lines = ?, problems = ? WHERE id = ?", (num_lines, problems, id))


def end(
    execute: Execute, id: str, owner: str, status: str, now_s: float, outputs: Sequence[StoredFile]
) -> Batch | None:
    """End the batch, whose results are in files. None if another gateway owns it."""
    ended = move(execute, id, owner, status, now_s, ACTIVE, {"owner": ""})
    if ended is not None:
        for output in outputs:
            add_file(execute, output)
        execute("DELETE FROM batch_result WHERE batch_id = ?", (id,))
    return ended


def drop_batch(execute: Execute, id: str) -> None:
    execute("DELETE FROM batch_result WHERE batch_id = ?", (id,))
    execute("DELETE FROM batch WHERE id = ?", (id,))


def old_batches(execute: Execute, created_s: float) -> list[str]:
    """Some batches that ended and are older than that."""
    rows = execute(
        f"SELECT id FROM batch WHERE created_s <= ? AND status NOT IN {_ACTIVE} LIMIT 100", (int(created_s),)
    )
    return [str(row[0]) for row in rows]


def _page(
    execute: Execute,
    table: str,
    columns: str,
    where: str,
    values: list[Any],
    after: str | None,
    limit: int,
    *,
    ascending: bool,
) -> list[Sequence[Any]]:
    """Rows by their creation; of the same second, by id."""
    if after is not None:
        sign = ">" if ascending else "<"
        where += f""" AND (created_s, id) {sign} (SELECT created_s, id FROM {table} WHERE id = ?)"""
        values = [*values, after]
    order = "ASC" if ascending else "DESC"
    return execute(
        f"SELECT {columns} FROM {table} WHERE {where} ORDER BY created_s {order}, id {order} LIMIT ?", (*values, limit)
    )
