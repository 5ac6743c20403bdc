"""The latest requests on disk, so that a restarted gateway shows them. Texts of requests are never written."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cortex.gateway.proxy.accounting.activity import ActivityLog, RequestRecord
from cortex.wire.words import about, os_error_in_words

log = logging.getLogger(__name__)

FILE_NAME = "activity.msgpack"
INTERVAL_S = 10.0
MOST_RECORDS = 10_000
"""How many of the latest requests are written, however many are kept in memory."""


class ActivityFile:
    """Reading and writing never raise: on failure they log, and the activity ends with the process.

    A gateway that takes over from another one claims the file with its first write; the other writes no more.
    """

    def __init__(self, directory: Path, activity: ActivityLog) -> None:
        self._path = directory / FILE_NAME
        self._activity = activity
        self._inode: int | None = None
        """The inode of the file that this process wrote last."""
        self._written = 0
        """The version of the activity that it has."""
        self._failing = False

    async def restore(self) -> None:
        """Continue with the requests in the file, and claim it. Before the first request."""
        self._activity.restore(await asyncio.to_thread(self._read))
        await self.save()

    async def run(self) -> None:
        """Save regularly. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.save()

    async def save(self) -> None:
        """Write the requests if there are others than in the file."""
        version = self._activity.version
        if version != self._written:
            await asyncio.to_thread(self._write, version, self._activity.latest(MOST_RECORDS))

    def _read(self) -> list[RequestRecord]:
        """The records in the file, oldest first; empty when there is no readable one."""
        try:
            return msgspec.msgpack.decode(self._path.read_bytes(), type=list[RequestRecord])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as problem:
            log.warning("activity before the restart not read: %s", about(str(self._path), problem))
            return []

    def _write(self, version: int, records: Sequence[RequestRecord]) -> None:
        """Write `records` atomically, without captures, unless the file belongs to a successor. Blocking."""
        draft = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            if self._inode is not None and self._path.exists() and self._path.stat().st_ino != self._inode:
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = [msgspec.structs.replace(record, capture=None) for record in records]
            draft.unlink(missing_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.msgpack.encode(kept))
            self._inode = draft.stat().st_ino
            draft.replace(self._path)
        except OSError as problem:
            if not self._failing:
                reason = os_error_in_words(problem)
                log.warning("activity not written: %s; set gateway.state to a writable directory", reason)
            self._failing = True
        else:
            self._written, self._failing = version, False
