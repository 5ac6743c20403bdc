"""The audit log: who changed the fleet, its keys or its records, who signed in, when, and with which outcome, in the
database.

Entries are written in batches, off the loop. While the database is unavailable, the latest ones wait in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from cortex.gateway.database import Database, Execute, Schema, WaitingRows

DAY_S = 86400
FLUSH_S = 1.0
EXPIRE_S = 600.0
"""How often entries that are too old are deleted."""
MAX_WAITING = 10_000
"""Entries that wait in memory for the database; the oldest ones beyond it are lost."""
SIGN_IN_ACTIONS = ("POST /session", "GET /session/callback", "HEAD /session/callback")
MAX_DETAIL = 1000

SCHEMA: Schema = (
    """CREATE TABLE IF NOT EXISTS audit (
        at_ms BIGINT NOT NULL,
        key_id TEXT NOT NULL,
        key_name TEXT NOT NULL,
        client TEXT NOT NULL,
        action TEXT NOT NULL,
        detail TEXT NOT NULL,
        status BIGINT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS audit_at ON audit (at_ms)",
)
_ADD = "INSERT INTO audit (at_ms, key_id, key_name, client, action, detail, status) VALUES ($1, $2, $3, $4, $5, $6, $7)"
_EXPIRE = "DELETE FROM audit WHERE at_ms < $1"
_NTH = "SELECT at_ms FROM audit ORDER BY at_ms DESC LIMIT 1 OFFSET $1"
_IS_REJECTED = "status BETWEEN 400 AND 499"
_EXPIRE_REJECTED = f"DELETE FROM audit WHERE at_ms < $1 AND {_IS_REJECTED}"
_NTH_REJECTED = f"SELECT at_ms FROM audit WHERE {_IS_REJECTED} ORDER BY at_ms DESC LIMIT 1 OFFSET $1"
_IS_WITHOUT_KEY = "status >= 400 AND key_id = ''"
_EXPIRE_WITHOUT_KEY = f"DELETE FROM audit WHERE at_ms < $1 AND {_IS_WITHOUT_KEY}"
_NTH_WITHOUT_KEY = f"SELECT at_ms FROM audit WHERE {_IS_WITHOUT_KEY} ORDER BY at_ms DESC LIMIT 1 OFFSET $1"
_IS_SIGN_IN = f"status < 400 AND action IN {SIGN_IN_ACTIONS}"
_EXPIRE_SIGN_INS = f"DELETE FROM audit WHERE at_ms < $1 AND {_IS_SIGN_IN}"
_NTH_SIGN_IN = f"SELECT at_ms FROM audit WHERE {_IS_SIGN_IN} ORDER BY at_ms DESC LIMIT 1 OFFSET $1"
_READ = """
    SELECT at_ms, key_id, key_name, client, action, detail, status FROM audit
    WHERE at_ms >= $1 AND at_ms < $2{of_key} ORDER BY at_ms DESC LIMIT $3
"""
_OF_KEY = " AND (key_id = $4 OR key_name = $4)"


class NamedKey(Protocol):
    """What is recorded of a key."""

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str: ...


class AuditEntry(msgspec.Struct, frozen=True):
    """One action, allowed or rejected."""

    at_ms: int
    key_id: str
    """Empty without a key: on an open gateway, for a failed sign-in, a change of the configuration file, or a command
    that writes to the database."""
    key_name: str
    client: str
    """The address of the client; empty where there is none."""
    action: str
    """Method and path, such as `POST /fleet/models/small/unload`."""
    detail: str
    """The body of the request, shortened; for a sign-in, its outcome."""
    status: int
    """The HTTP status of the response; 0 where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLimits:
    """Numbers of entries to keep; older ones are deleted."""

    entries: int = 1_000_000
    """All entries, so that no key can fill the disk."""
    rejected: int = 100_000
    """Rejected requests, which are deleted first, so that no key without rights can displace the changes of others."""
    without_key: int = 20_000
    """Failures without a valid key, such as sign-ins, so that unauthenticated clients displace no records of keys."""
    sign_ins: int = 100_000
    """Sign-ins, which every key may repeat without limit."""


class AuditLog:
    """Belongs to the loop."""

    def __init__(
        self,
        database: Database,
        retention_days: int,
        clock: Callable[[], float] = time.time,
        limits: AuditLimits | None = None,
    ) -> None:
        """0 days: nothing is recorded. A database that does not exist is created when there is something to write."""
        self._database = database.use(SCHEMA)
        self._retention_days = retention_days
        self._clock = clock
        self._limits = limits or AuditLimits()
        self._waiting = WaitingRows(database, _add, MAX_WAITING)
        self._expired_at = clock()

    def record(
        self, action: str, status: int, *, key_id: str = "", key_name: str = "", client: str = "", detail: str = ""
    ) -> None:
        """Never waits and never raises."""
        if self._retention_days:
            at_ms = int(self._clock() * 1000)
            key_id, key_name, client, action, detail = map(_text, (key_id, key_name, client, action, detail))
            self._waiting.append(
                AuditEntry(at_ms, key_id, key_name, client, action[:MAX_DETAIL], detail[:MAX_DETAIL], status)
            )

    async def flush(self) -> None:
        """Write what waits, and delete what is too old. Never raises."""
        now = self._clock()
        is_due = self._retention_days > 0 and now - self._expired_at >= EXPIRE_S and self._database.exists
        if not self._waiting and not is_due:
            return
        oldest_ms = int((now - self._retention_days * DAY_S) * 1000)
        expire = partial(_expire, oldest_ms=oldest_ms, limits=self._limits)
        if await self._waiting.flush(expire if is_due else None) and is_due:
            self._expired_at = now

    async def read(self, since: float, until: float, limit: int, key: str = "") -> list[AuditEntry]:
        """The newest `limit` entries of [since, until), newest first; `key`: only those of this name or id. Raises
        StoreError."""
        await self.flush()
        if not self._database.exists:
            return []
        statement = _READ.format(of_key=_OF_KEY if key else "")
        values = (int(since * 1000), int(until * 1000), limit, *([key] if key else []))
        rows = await self._database.report(lambda execute: execute(statement, values))
        return [AuditEntry(*row) for row in rows]


def record_changed_keys(audit: AuditLog, before: Sequence[NamedKey], after: Sequence[NamedKey]) -> None:
    """Record the keys that a reload of the configuration file has added or removed."""
    old, new = ({key.id: key for key in keys} for keys in (before, after))
    for change, ids in (
        ("added", new.keys() - old.keys()),
        ("removed", old.keys() - new.keys()),
        ("changed", [id for id in new.keys() & old.keys() if new[id] != old[id]]),
    ):
        for name in sorted((new if change != "removed" else old)[id].name for id in ids):
            audit.record(f"key {change} in the configuration file", 0, detail=name)


def add_command(execute: Execute, action: str, detail: str) -> None:
    """Record a command that changes the database itself, in the transaction that does it. `action`: the command."""
    entry = AuditEntry(int(time.time() * 1000), "", "", "", _text(action), _text(detail)[:MAX_DETAIL], 0)
    _add(execute, entry)


def _text(given: str) -> str:
    """`given` without NUL, which PostgreSQL holds in no text."""
    return given.replace("\0", "\ufffd")


def _add(execute: Execute, entry: AuditEntry) -> None:
    execute(_ADD, msgspec.structs.astuple(entry))


def _expire(execute: Execute, oldest_ms: int, limits: AuditLimits) -> None:
    execute(_EXPIRE, (oldest_ms,))
    for nth, expire, max_entries in (
        (_NTH_WITHOUT_KEY, _EXPIRE_WITHOUT_KEY, limits.without_key),
        (_NTH_SIGN_IN, _EXPIRE_SIGN_INS, limits.sign_ins),
        (_NTH_REJECTED, _EXPIRE_REJECTED, limits.rejected),
        (_NTH, _EXPIRE, limits.entries),
    ):
        for (beyond_ms,) in execute(nth, (max_entries,)):
            execute(expire, (beyond_ms + 1,))
