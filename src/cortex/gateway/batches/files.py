"""The files of clients and batches: rows in the database, bytes in a directory. No file is held in memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

from cortex.gateway.batches import tables
from cortex.gateway.batches.tables import StoredFile
from cortex.gateway.config import BatchesSection
from cortex.gateway.database import Database, Execute
from cortex.http.composed_body import ComposedBody
from cortex.http.request import Headers
from cortex.http.server.exchange import ClientPace, Exchange
from cortex.system import private_file
from cortex.wire.errors import Overloaded, RateLimitExceeded

T = TypeVar("T")
CHUNK_BYTES = 256 * 1024
MEBIBYTE = 1024 * 1024
UNFINISHED_S = 86400.0
"""A file without a row that has not been written to for this long is left over from a dead gateway."""
PAGE = 500
_OURS = re.compile(r"\.?(file-|batch_|msgbatch_)[0-9a-f]{24}")
"""Prefixes of our files. The directory may hold others."""


class FileStore:
    """Owns the directory. Used on the loop's thread; what blocks runs on others."""

    def __init__(
        self, database: Database, section: BatchesSection, directory: Path, clock: Callable[[], float] = time.time
    ) -> None:
        self.section = section
        """Replaced by a reload."""
        self.database = database.use(tables.SCHEMA)
        self.directory = directory
        self.clock = clock
        self._sweep_at_s = 0.0

    async def do(self, work: Callable[[Execute], T]) -> T:
        """Work on the database. Raises DatabaseUnavailable or InvalidValue."""
        return await self.database.serve(work)

    def path(self, id: str) -> Path:
        return self.directory / id

    def temporary(self, id: str) -> Path:
        return self.directory / f".{id}.{secrets.token_hex(4)}"

    async def save(
        self, key_id: str, purpose: str, filename: str, content: Iterable[bytes], *, num_bytes: int, lasts_s: float
    ) -> StoredFile:
        """Keep a file. `content` is read on another thread. Raises RateLimitExceeded over a quota, Overloaded where the
        disk does not take it."""
        now_s = self.clock()
        id, now = tables.new_id("file-", now_s), int(now_s)
        file = StoredFile(id, key_id, purpose, filename[:500], num_bytes, now, now + int(lasts_s))
        await self.do(lambda execute: self._check_quota(execute, file))
        try:
            await asyncio.to_thread(_write, self.path(id), content)
        except OSError as problem:
            raise Overloaded(f"the file cannot be written ({problem.strerror}); try again later") from problem

        def add(execute: Execute) -> None:
            self._check_quota(execute, file)
            tables.add_file(execute, file)

        try:
            await self.do(add)
        except BaseException:
            self.path(id).unlink(missing_ok=True)
            raise
        return file

    def _check_quota(self, execute: Execute, file: StoredFile) -> None:
        section = self.section
        count, num_bytes = tables.held(execute, file.key_id)
        if count >= section.max_files_per_key:
            raise RateLimitExceeded(
                f"This key has {count} files, which is the limit (batches.max_files_per_key); delete some."
            )
        if num_bytes + file.num_bytes > section.max_mb_per_key * MEBIBYTE:
            raise RateLimitExceeded(
                f"The files of this key would have more than {section.max_mb_per_key} MB (batches.max_mb_per_key); "
                "delete some."
            )

    async def delete(self, id: str) -> None:
        await self.do(lambda execute: tables.drop_file(execute, id))
        await asyncio.to_thread(self.path(id).unlink, missing_ok=True)

    async def purge(self) -> None:
        """Delete what has expired."""
        now = self.clock()
        for id in await self.do(lambda execute: tables.expired_files(execute, now)):
            await self.delete(id)
        for id in await self.do(lambda execute: tables.old_batches(execute, now - self.section.retention_s)):
            await self.do(partial(tables.drop_batch, id=id))
        if now >= self._sweep_at_s:
            self._sweep_at_s = now + UNFINISHED_S
            await self._sweep(now - UNFINISHED_S)

    async def _sweep(self, before_s: float) -> None:
        """Delete files that killed gateways left behind."""
        old = await asyncio.to_thread(self._old, before_s)
        for start in range(0, len(old), PAGE):
            work = partial(tables.unowned, names=old[start : start + PAGE])
            for name in await self.do(work):
                await asyncio.to_thread(self.path(name).unlink, missing_ok=True)

    def _old(self, before_s: float) -> list[str]:
        """The files last written before `before_s`. Blocks."""
        found = []
        for path in self.directory.glob("*"):
            with contextlib.suppress(FileNotFoundError):
                if _OURS.match(path.name) and path.stat().st_mtime < before_s:
                    found.append(path.name)
        return found

    async def send(self, exchange: Exchange, id: str, headers: Headers) -> None:
        """Respond with the content of a file, at the pace of the client. Raises FileNotFoundError."""
        file = await asyncio.to_thread(open, self.path(id), "rb")
        try:
            num_bytes = os.fstat(file.fileno()).st_size
            exchange.start(200, headers, num_bytes)
            pace = ClientPace(exchange)
            while not exchange.closed and (data := await asyncio.to_thread(file.read, CHUNK_BYTES)):
                exchange.write(data)
                await pace.has_room()
            exchange.finish()
        finally:
            file.close()


def _write(path: Path, content: Iterable[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    private_file.write(path, content)


def chunks_of(body: bytes | ComposedBody, start: int, end: int) -> Iterable[bytes]:
    """A range of a body, piece by piece. Blocks."""
    while start < end:
        data = body[start : min(end, start + CHUNK_BYTES)]
        if not data:
            return
        yield data
        start += len(data)
