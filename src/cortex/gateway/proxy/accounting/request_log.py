"""The request log: every request without its texts, in the database, for as many days as configured.

Requests that end are written in batches, off the loop. While the database is unavailable, the latest ones wait in
memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from cortex.gateway.database import Database, Execute, Schema, WaitingRows
from cortex.gateway.proxy.accounting.activity import ActivityLog, RequestRecord

DAY_S = 86400
FLUSH_S = 1.0
EXPIRE_S = 600.0
"""How often requests that are too old are deleted."""
_MANY = 2**53
_NEVER_S = 1e11

SCHEMA: Schema = (
    """CREATE TABLE IF NOT EXISTS request_log (
        ended_ms BIGINT NOT NULL,
        request_id TEXT NOT NULL,
        key_id TEXT NOT NULL,
        record TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS request_log_ended ON request_log (ended_ms)",
    "CREATE INDEX IF NOT EXISTS request_log_request ON request_log (request_id, ended_ms)",
    "CREATE INDEX IF NOT EXISTS request_log_key ON request_log (key_id, ended_ms)",
)
_ADD = "INSERT INTO request_log (ended_ms, request_id, key_id, record) VALUES ($1, $2, $3, $4)"
_EXPIRE = "DELETE FROM request_log WHERE ended_ms < $1"
_READ = """
    SELECT ended_ms, record FROM request_log WHERE ended_ms >= $1 AND ended_ms <= $2{where}
    ORDER BY ended_ms DESC, record LIMIT $3 OFFSET $4
"""
_FORGET = "DELETE FROM request_log WHERE request_id = $1 AND key_id = $2 AND ended_ms = $3 RETURNING request_id"

Matches = Callable[[RequestRecord], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLimits:
    waiting: int = 20_000
    """Requests that may wait in memory for the database; older ones beyond it are lost."""
    searched: int = 500_000
    """Requests that one search reads at most, which takes seconds on its thread."""
    page: int = 500
    """Requests that are read at once."""


class SearchTooLong(Exception):
    """`LogLimits.searched` requests were read, and too few match."""


class RequestLog:
    """Belongs to the loop."""

    def __init__(
        self,
        activity: ActivityLog,
        database: Database,
        clock: Callable[[], float] = time.time,
        limits: LogLimits | None = None,
    ) -> None:
        """A database that does not exist is created when there is something to write or to read."""
        self.limits = limits or LogLimits()
        self._database = database.use(SCHEMA)
        self._clock = clock
        self._waiting = WaitingRows(database, _add, self.limits.waiting)
        self._expired_at = 0.0
        self._activity = activity
        self._retention_days = 0
        self._unsubscribe: Callable[[], None] | None = None

    @property
    def retention_days(self) -> int:
        """0 disables the log."""
        return self._retention_days

    @retention_days.setter
    def retention_days(self, days: int) -> None:
        self._retention_days = days
        if days and self._unsubscribe is None:
            self._unsubscribe = self._activity.subscribe(self._waiting.append)
        elif not days and self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    async def flush(self) -> None:
        """Write completed requests and delete those that are too old. Never raises. Continues if its caller is
        cancelled."""
        now = self._clock()
        is_due = self.retention_days > 0 and now - self._expired_at >= EXPIRE_S
        if not self._waiting and not is_due:
            return
        oldest_ms = int((now - self.retention_days * DAY_S) * 1000)
        if await self._waiting.flush((lambda execute: execute(_EXPIRE, (oldest_ms,))) if is_due else None) and is_due:
            self._expired_at = now

    async def read(
        self,
        since: float,
        until: float,
        limit: int,
        matches: Matches,
        *,
        key_id: str | None = None,
        request_id: str | None = None,
    ) -> list[RequestRecord]:
        """The newest `limit` matching requests that ended in [since, until), newest first. A key or id restricts what
        is read. Raises StoreError and SearchTooLong."""
        await self.flush()
        wanted = {"key_id": key_id, "request_id": request_id}
        return await self._database.report(
            lambda execute: _read(execute, since, until, limit, matches, wanted, self.limits)
        )

    async def forget(self, matches: Matches, *, request_id: str | None = None) -> int:
        """Delete the matching requests, only those of an id if it is given; returns how many. Raises StoreError."""
        await self.flush()
        wanted, limits = {"request_id": request_id}, replace(self.limits, searched=_MANY)
        found = await self._database.report(lambda execute: _read(execute, 0, _NEVER_S, _MANY, matches, wanted, limits))
        # Clients choose ids, so requests of other clients may have the same.
        rows = list({(record.id.decode(), record.key_id or "", _ended_ms(record)) for record in found})
        num_forgotten = 0
        for start in range(0, len(rows), limits.page):  # in steps, so that other writes come between
            num_forgotten += await self._database.do(partial(_forget, rows=rows[start : start + limits.page]))
        return num_forgotten


def _add(execute: Execute, record: RequestRecord) -> None:
    text = msgspec.json.encode(msgspec.structs.replace(record, capture=None)).decode()
    execute(_ADD, (_ended_ms(record), record.id.decode(), record.key_id or "", text))


def _forget(execute: Execute, rows: Iterable[Sequence[object]]) -> int:
    return sum(len(execute(_FORGET, row)) for row in rows)


def _ended_ms(record: RequestRecord) -> int:
    return int(record.ended_at * 1000)


def _read(
    execute: Execute,
    since: float,
    until: float,
    limit: int,
    matches: Matches,
    wanted: Mapping[str, str | None],
    limits: LogLimits,
) -> list[RequestRecord]:
    """`wanted`: values of columns; None: any. Raises SearchTooLong."""
    values = {column: value for column, value in wanted.items() if value is not None}
    statement = _READ.format(where="".join(f" AND {column} = ${number}" for number, column in enumerate(values, 5)))
    found: list[RequestRecord] = []
    # A page begins at the time where the last one ended, so the database does not read returned rows again. Several
    # requests may end in one millisecond: only those are skipped by their number.
    last_ms, num_at_last, num_read = int(until * 1000) - 1, 0, 0
    while len(found) < limit:
        if num_read >= limits.searched:
            raise SearchTooLong
        rows = execute(statement, (int(since * 1000), last_ms, limits.page, num_at_last, *values.values()))
        records = (msgspec.json.decode(row[1], type=RequestRecord) for row in rows)
        found += [record for record in records if matches(record)]
        if len(rows) < limits.page:
            break
        oldest_ms = rows[-1][0]
        num_at_last = sum(row[0] == oldest_ms for row in rows) + (num_at_last if oldest_ms == last_ms else 0)
        last_ms, num_read = oldest_ms, num_read + len(rows)
    # The database orders by milliseconds only.
    return sorted(found, key=lambda record: (record.ended_at, record.number), reverse=True)[:limit]
