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

from cortex.gateway.database import Execute, Schema, placeholders
from cortex.gateway.ledger.store import Counts, Slot, add_spend

Kind = Literal["openai", "anthropic"]
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
_ACTIVE = "('validating', 'in_progress', 'finalizing', 'cancelling')"
HIDDEN = "message_batch"
"""The purpose of files of Anthropic batches, which clients cannot see as files."""

SCHEMA: Schema = (
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
    return placeholders(len(struct.__struct_fields__))


# --- files


def add_file(execute: Execute, file: StoredFile) -> None:
    execute(
        f"INSERT INTO stored_file ({_FILE}) VALUES ({_marks(StoredFile)}) ON CONFLICT (id) DO NOTHING",
        msgspec.structs.astuple(file),
    )


def held(execute: Execute, key_id: str) -> tuple[int, int]:
    """How many files a key has, and their bytes."""
    [(count, num_bytes)] = execute(
        "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM stored_file WHERE key_id = $1", (key_id,)
    )
    return int(count), int(num_bytes)


def file(execute: Execute, key_id: str, id: str, now_s: float) -> StoredFile | None:
    rows = execute(
        f"SELECT {_FILE} FROM stored_file WHERE id = $1 AND key_id = $2 AND expires_s > $3", (id, key_id, int(now_s))
    )
    return StoredFile(*rows[0]) if rows else None


def files(
    execute: Execute, key_id: str, now_s: float, *, purpose: str | None, after: str | None, limit: int, ascending: bool
) -> list[StoredFile]:
    """Those of a key after `after`, in order of their creation."""
    conditions = {"key_id =": key_id, "expires_s >": int(now_s), "purpose <>": HIDDEN, "purpose =": purpose}
    return [
        StoredFile(*row) for row in _page(execute, "stored_file", _FILE, conditions, after, limit, ascending=ascending)
    ]


def drop_file(execute: Execute, id: str) -> None:
    execute("DELETE FROM stored_file WHERE id = $1", (id,))


def unowned(execute: Execute, names: Sequence[str]) -> list[str]:
    """The files on disk without a row: neither a client's file nor a segment of an active batch."""
    batch_of = {name: name.partition(".")[0] for name in names}
    names_of_files, names_of_batches = placeholders(len(names)), placeholders(len(names), len(names) + 1)
    rows = execute(
        f"""SELECT id FROM stored_file WHERE id IN ({names_of_files})
        UNION ALL SELECT id FROM batch WHERE id IN ({names_of_batches}) AND status IN {_ACTIVE}""",
        (*names, *batch_of.values()),
    )
    owners = {row[0] for row in rows}
    return [name for name in names if name not in owners and batch_of[name] not in owners]


def is_in_use(execute: Execute, id: str) -> bool:
    """Whether a batch that has not ended reads the file."""
    return bool(execute(f"SELECT 1 FROM batch WHERE input_file_id = $1 AND status IN {_ACTIVE}", (id,)))


def expired_files(execute: Execute, now_s: float) -> list[str]:
    """Some expired files that no active batch reads."""
    rows = execute(
        f"""SELECT id FROM stored_file WHERE expires_s <= $1 AND NOT EXISTS
        (SELECT 1 FROM batch WHERE input_file_id = stored_file.id AND status IN {_ACTIVE}) LIMIT 100""",
        (int(now_s),),
    )
    return [str(row[0]) for row in rows]


# --- batches


def add_batch(execute: Execute, batch: Batch) -> None:
    execute(f"INSERT INTO batch ({_BATCH}) VALUES ({_marks(Batch)})", msgspec.structs.astuple(batch))


def batch(execute: Execute, key_id: str | None, id: str, kind: Kind | None = None) -> Batch | None:
    """The batch with this id, of one key or of any."""
    where, values = _where({"id =": id, "key_id =": key_id, "kind =": kind})
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
    conditions = {"key_id =": key_id, "kind =": kind}
    return [Batch(*row) for row in _page(execute, "batch", _BATCH, conditions, after, limit, ascending=ascending)]


def num_active(execute: Execute, key_id: str) -> int:
    [(count,)] = execute(f"SELECT COUNT(*) FROM batch WHERE key_id = $1 AND status IN {_ACTIVE}", (key_id,))
    return int(count)


def claim(execute: Execute, owner: str, now_s: float, lost_s: float, limit: int) -> list[Batch]:
    """Take over batches without an owner or not renewed since `lost_s`, oldest first. They may be `owner`'s own: one
    that kept running while the database was unavailable, or one that it could not release."""
    rows = execute(
        f"""SELECT id FROM batch WHERE status IN {_ACTIVE} AND (owner = '' OR renewed_s <= $1)
        ORDER BY created_s, id LIMIT $2""",
        (int(lost_s), limit),
    )
    taken = []
    for (id,) in rows:
        taken += execute(
            f"""UPDATE batch SET owner = $1, renewed_s = $2 WHERE id = $3 AND status IN {_ACTIVE}
            AND (owner = '' OR renewed_s <= $4) RETURNING {_BATCH}""",
            (owner, int(now_s), id, int(lost_s)),
        )
    return [Batch(*row) for row in taken]


def renew(execute: Execute, id: str, owner: str, now_s: float) -> str | None:
    """Show that `owner` still runs the batch; returns its status, or None where another gateway has it."""
    rows = execute(
        "UPDATE batch SET renewed_s = $1 WHERE id = $2 AND owner = $3 RETURNING status", (int(now_s), id, owner)
    )
    return str(rows[0][0]) if rows else None


def release(execute: Execute, id: str, owner: str) -> None:
    """Give up ownership, so that another gateway can claim it at once."""
    execute("UPDATE batch SET owner = '' WHERE id = $1 AND owner = $2", (id, owner))


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
    where, matched = _where({"id =": id, "status =": found.status, "owner =": owner})
    marks = ", ".join(f"{name} = ${number}" for number, name in enumerate(columns, len(matched) + 1))
    rows = execute(f"UPDATE batch SET {marks} WHERE {where} RETURNING {_BATCH}", (*matched, *columns.values()))
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
        """UPDATE batch SET renewed_s = $1, num_succeeded = num_succeeded + $2, num_failed = num_failed + $3,
        num_cancelled = num_cancelled + $4, num_expired = num_expired + $5, prompt_tokens = prompt_tokens + $6,
        cached_tokens = cached_tokens + $7, completion_tokens = completion_tokens + $8, cost_nano = cost_nano + $9
        WHERE id = $10 AND owner = $11 RETURNING status""",
        (int(now_s), *counts, *charged, id, owner),
    )
    if not rows:
        return None
    for result in results:
        execute(
            """INSERT INTO batch_result (batch_id, number, outcome, segment, start, num_bytes)
            VALUES ($1, $2, $3, $4, $5, $6)""",
            (id, *result),
        )
    add_spend(execute, spend)
    return str(rows[0][0])


def results(execute: Execute, id: str, after: int, limit: int) -> list[LineResult]:
    """The results of a batch in order of its lines, from the one after line `after` on."""
    rows = execute(
        """SELECT number, outcome, segment, start, num_bytes FROM batch_result WHERE batch_id = $1 AND number > $2
        ORDER BY number LIMIT $3""",
        (id, after, limit),
    )
    return [LineResult(int(row[0]), row[1], row[2], int(row[3]), int(row[4])) for row in rows]


def recorded(execute: Execute, id: str, numbers: Sequence[int]) -> set[int]:
    """Those of the lines that have a result."""
    statement = f"SELECT number FROM batch_result WHERE batch_id = $1 AND number IN ({placeholders(len(numbers), 2)})"
    return {int(row[0]) for row in execute(statement, (id, *numbers))}


def begin(execute: Execute, id: str, owner: str, now_s: float, num_lines: int, problems: str) -> None:
    """Mark it as in progress after its lines were read, unless it was cancelled meanwhile."""
    values = {"num_lines": num_lines, "problems": problems}
    if move(execute, id, owner, "in_progress", now_s, ("validating",), values) is None:
        execute("UPDATE batch SET num_lines = $1, problems = $2 WHERE id = $3", (num_lines, problems, id))


def end(
    execute: Execute, id: str, owner: str, status: str, now_s: float, outputs: Sequence[StoredFile]
) -> Batch | None:
    """End the batch, whose results are in files. None if another gateway owns it."""
    ended = move(execute, id, owner, status, now_s, ACTIVE, {"owner": ""})
    if ended is not None:
        for output in outputs:
            add_file(execute, output)
        execute("DELETE FROM batch_result WHERE batch_id = $1", (id,))
    return ended


def drop_batch(execute: Execute, id: str) -> None:
    execute("DELETE FROM batch_result WHERE batch_id = $1", (id,))
    execute("DELETE FROM batch WHERE id = $1", (id,))


def old_batches(execute: Execute, created_s: float) -> list[str]:
    """Some batches that ended and are older than that."""
    rows = execute(
        f"SELECT id FROM batch WHERE created_s <= $1 AND status NOT IN {_ACTIVE} LIMIT 100", (int(created_s),)
    )
    return [str(row[0]) for row in rows]


def _page(
    execute: Execute,
    table: str,
    columns: str,
    conditions: Mapping[str, Any],
    after: str | None,
    limit: int,
    *,
    ascending: bool,
) -> list[Sequence[Any]]:
    """Rows by their creation; of the same second, by id."""
    where, values = _where(conditions)
    if after is not None:
        values.append(after)
        sign = ">" if ascending else "<"
        where += f" AND (created_s, id) {sign} (SELECT created_s, id FROM {table} WHERE id = ${len(values)})"
    order = "ASC" if ascending else "DESC"
    values.append(limit)
    return execute(
        f"SELECT {columns} FROM {table} WHERE {where} ORDER BY created_s {order}, id {order} LIMIT ${len(values)}",
        values,
    )


def _where(conditions: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The condition that all of them hold, such as `created_s <` for its value, and its parameters. None: any value."""
    given = {condition: value for condition, value in conditions.items() if value is not None}
    texts = [f"{condition} ${number}" for number, condition in enumerate(given, 1)]
    return " AND ".join(texts) or "1 = 1", list(given.values())
