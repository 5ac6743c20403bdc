"""The history in the gateway's database, so that a restart does not end it. Each gateway has its own.

Only what has changed is written, about once a minute. While the database is unavailable, the history goes on in memory.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from cortex.gateway.config import Config
from cortex.gateway.database import Database, Execute, StoreError, driver_of, is_url
from cortex.gateway.dispatch.event_log import EventLog
from cortex.gateway.history.device_memory import Holdings
from cortex.gateway.history.history import WINDOWS, History
from cortex.gateway.history.series import Bucket
from cortex.gateway.proxy.accounting.activity import ActivityLog

log = logging.getLogger(__name__)

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS history (gateway TEXT NOT NULL, kind TEXT NOT NULL, at DOUBLE PRECISION NOT NULL, "
    "entry TEXT NOT NULL, PRIMARY KEY (gateway, kind, at))",
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
"""Entries of all gateways: nobody else deletes those of a gateway that does not come back."""


class _Entry(NamedTuple):
    kind: str
    at: float
    text: str


Work = Callable[[], list[_Entry] | None]


class HistoryStore:
    """Owned by the loop. Never raises: a failure is logged once."""

    def __init__(self, activity: ActivityLog, event_log: EventLog, config: Config, directory: Path) -> None:
        """A file of a database that is not there is not created."""
        self.history = History(time.time)
        activity.subscribe(self.history.request_ended)
        event_log.subscribe(self.history.happened)
        self._location = config.database(directory)
        self._gateway = f"{socket.gethostname()}:{config.gateway.listen.port}"
        self._database: Database | None = None
        self._saved_at = 0.0
        self._is_failing = False
        self._is_closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="history")

    async def restore(self) -> None:
        """Continue with what the database has, before the first request."""
        entries = await self._run(self._read)
        now = time.time()
        try:
            for window in WINDOWS:
                texts = [entry.text for entry in entries or () if entry.kind == window]
                buckets = [msgspec.json.decode(text, type=Bucket) for text in texts]
                self.history.rings[window].restore(buckets, now)
            texts = [entry.text for entry in entries or () if entry.kind.startswith("memory ")]
            self.history.memory.restore([msgspec.json.decode(text, type=Holdings) for text in texts], now)
        except msgspec.DecodeError as problem:
            log.warning("the history before the restart is unreadable: %s", problem)
        self._saved_at = now

    async def run(self) -> None:
        """Save regularly, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.save()

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
        if await self._run(lambda: self._write(entries, now)) is not None:
            self._saved_at = now

    async def close(self) -> None:
        """Write what is not written yet. Idempotent."""
        if self._is_closed:
            return
        await self.save()
        self._is_closed = True
        if self._database is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Work) -> list[_Entry] | None:
        """What `work` returns; None if there is no database, or it cannot be used."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except StoreError as error:
            if not self._is_failing:
                log.error("the history is kept in memory until the database is available: %s", error)
            self._is_failing = True
            return None
        self._is_failing = False
        return found

    def _open(self) -> Database | None:
        if self._database is None and (is_url(self._location) or Path(self._location).exists()):
            self._database = Database(driver_of(self._location), SCHEMA, "database of the history")
        return self._database

    def _read(self) -> list[_Entry] | None:
        if (database := self._open()) is None:
            return None
        oldest = time.time() - KEEP_S
        query = "SELECT kind, at, entry FROM history WHERE gateway = ? AND at >= ?"
        rows = database.run(lambda execute: list(execute(query, (self._gateway, oldest))))
        return [_Entry(str(kind), float(at), str(text)) for kind, at, text in rows]

    def _write(self, entries: list[_Entry], now: float) -> list[_Entry] | None:
        if (database := self._open()) is None:
            return None

        def write(execute: Execute) -> list[_Entry]:
            for entry in entries:
                execute(_WRITE, (self._gateway, *entry))
            execute(_DELETE_OLD, (now - KEEP_S, now - KEEP_HOUR_S))
            return entries

        return database.run(write)
