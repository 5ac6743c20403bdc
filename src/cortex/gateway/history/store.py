"""The history in the gateway's database, so that a restart does not end it. Each gateway has its own.

Only what has changed is written, about once a minute. While the database is unavailable, the history continues in
memory.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from typing import NamedTuple

import msgspec

from cortex.gateway.database import Database, Execute, Schema, StoreError
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.history.history import WINDOWS, Bucket, History, Holdings
from cortex.gateway.proxy.accounting.activity import ActivityLog

log = logging.getLogger(__name__)

SCHEMA = Schema(
    (
        "CREATE TABLE IF NOT EXISTS history (gateway TEXT NOT NULL, kind TEXT NOT NULL, at DOUBLE PRECISION NOT NULL, "
        "entry TEXT NOT NULL, PRIMARY KEY (gateway, kind, at))",
    ),
)
INTERVAL_S = 60.0
KEEP_S = 86_400.0
KEEP_HOUR_S = 3_600.0
"""How long the steps of the window of an hour are kept."""
_WRITE = (
    "INSERT INTO history (gateway, kind, at, entry) VALUES (?, ?, ?, ?) "
    "ON CONFLICT (gateway, kind, at) DO UPDATE SET entry = excluded.entry"
)
_DELETE_OLD = "DELETE FROM history WHERE at < ? OR (kind = 'hour' AND at < ?)"
"""For entries of all gateways, because a gateway that does not come back leaves its own behind."""


class _Entry(NamedTuple):
    kind: str
    at: float
    text: str


class HistoryStore:
    """Owned by the loop. Never raises. A database that does not exist is not created."""

    def __init__(self, activity: ActivityLog, event_log: EventLog, database: Database, port: int) -> None:
        """`port` tells the gateways of a host apart."""
        self.history = History(time.time)
        activity.subscribe(self.history.request_ended)
        event_log.subscribe(self.history.happened)
        self._gateway = f"{socket.gethostname()}:{port}"
        self._database = database.use(SCHEMA)
        self._saved_at = 0.0

    async def restore(self) -> None:
        """Continue with what the database has, before the first request."""
        entries, now = await self._read(), time.time()
        try:
            for window in WINDOWS:
                texts = [entry.text for entry in entries if entry.kind == window]
                buckets = [msgspec.json.decode(text, type=Bucket) for text in texts]
                self.history.rings[window].restore(buckets, now)
            texts = [entry.text for entry in entries if entry.kind.startswith("memory ")]
            self.history.memory.restore([msgspec.json.decode(text, type=Holdings) for text in texts], now)
        except msgspec.DecodeError as problem:
            log.warning("the history before the restart is unreadable: %s", problem)
        self._saved_at = now

    async def save(self) -> None:
        """Write what has changed since the last time."""
        self.history.fold()
        now, since = time.time(), self._saved_at
        entries = [
            _Entry(window, bucket.at, msgspec.json.encode(bucket).decode())
            for window in WINDOWS
            for bucket in self.history.rings[window].since(since - self.history.rings[window].step_s)
        ]
        entries += [
            _Entry(f"memory {change.index} {change.node}", change.at, msgspec.json.encode(change).decode())
            for change in self.history.memory.since(since)
            if change.at >= since
        ]
        if self._database.exists:
            with contextlib.suppress(StoreError):  # the next write includes it
                await self._database.do(lambda execute: self._write(execute, entries, now))
                self._saved_at = now

    async def _read(self) -> list[_Entry]:
        if not self._database.exists:
            return []
        query, oldest = "SELECT kind, at, entry FROM history WHERE gateway = ? AND at >= ?", time.time() - KEEP_S
        try:
            rows = await self._database.do(lambda execute: execute(query, (self._gateway, oldest)))
        except StoreError:
            return []
        return [_Entry(str(kind), float(at), str(text)) for kind, at, text in rows]

    def _write(self, execute: Execute, entries: list[_Entry], now: float) -> None:
        for entry in entries:
            execute(_WRITE, (self._gateway, *entry))
        execute(_DELETE_OLD, (now - KEEP_S, now - KEEP_HOUR_S))
