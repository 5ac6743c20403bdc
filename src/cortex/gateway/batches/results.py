"""The results of one batch: every line has one, and is charged once, whatever fails.

A result is first written to a segment, a file of the gateway that owns the batch. Then it is recorded together with its
cost, in a transaction that fails where the batch has another owner by now. So a line may run twice, but has one result
and one charge. At the end the segments become the files that clients get.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from cortex.gateway.batches import tables
from cortex.gateway.batches.files import FileStore
from cortex.gateway.batches.lines import Line
from cortex.gateway.batches.tables import Batch, Charged, LineResult, Outcome, StoredFile
from cortex.gateway.database import RejectedValue
from cortex.gateway.ledger.meter import LineReservation
from cortex.gateway.ledger.store import Counts, Slot

log = logging.getLogger(__name__)

RENEW_S = 2.0
"""How often a gateway shows that it is alive."""
PAGE = 500


class Lost(Exception):
    """Another gateway runs the batch."""


class Finished(NamedTuple):
    """A line that has a result."""

    number: int
    outcome: Outcome
    text: bytes
    reservation: LineReservation | None = None


class BatchResults:
    """Belongs to the run of a batch, on the loop's thread; what blocks runs on others."""

    def __init__(self, files: FileStore, batch: Batch, owner: str, renew_s: float = RENEW_S) -> None:
        self._files = files
        self._batch = batch
        self._owner = owner
        self._renew_s = renew_s
        self._finished: list[Finished] = []
        self._unrecorded: list[tuple[LineResult, Finished]] = []
        """In the segment, and not in the database."""
        self._segment: IO[bytes] | None = None
        self._appending = threading.Lock()
        self.num_left = 0
        """Lines without a recorded result."""
        self.renewed_at = time.monotonic()
        self.status = batch.status
        """That of the batch, when it was last written or renewed."""

    @property
    def num_unwritten(self) -> int:
        return len(self._finished) + len(self._unrecorded)

    def __contains__(self, line: Line) -> bool:
        """Whether a line has a result that is not recorded yet."""
        unrecorded = (finished.number for _, finished in self._unrecorded)
        return line.number in {*unrecorded, *(finished.number for finished in self._finished)}

    def add(self, finished: Finished) -> None:
        self._finished.append(finished)

    async def renew(self) -> None:
        """Show that the gateway is alive. Raises Lost or StoreError."""
        self.renewed_at, now = time.monotonic(), self._files.clock()
        found = await self._files.database.do(lambda execute: tables.renew(execute, self._batch.id, self._owner, now))
        if found is None:
            raise Lost
        self.status = found

    async def write(self) -> None:
        """Record all results there are. Raises Lost; or StoreError or OSError, and then they are kept."""
        while self._finished or self._unrecorded:
            if not self._unrecorded:
                batch = self._finished[:PAGE]
                self._unrecorded = await asyncio.to_thread(self._append, batch)
                del self._finished[: len(batch)]
            await self._record()

    def _append(self, batch: list[Finished]) -> list[tuple[LineResult, Finished]]:
        """Write results to the segment. Blocks. A call that was cancelled may still run when the next one begins."""
        name = f"{self._batch.id}.{self._owner}"
        with self._appending:
            if self._segment is None:
                path = self._files.path(name)
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._segment = open(file, "ab")  # noqa: SIM115
            start = self._segment.seek(0, os.SEEK_END)
            found = []
            for finished in batch:
                found.append((LineResult(finished.number, finished.outcome, name, start, len(finished.text)), finished))
                start += len(finished.text)
                self._segment.write(finished.text)
            _sync([self._segment])
            return found

    async def _record(self) -> None:
        charged, spend = _charges(finished.reservation for _, finished in self._unrecorded)
        found, now = [result for result, _ in self._unrecorded], self._files.clock()
        work = partial(
            tables.record, id=self._batch.id, owner=self._owner, now_s=now, results=found, charged=charged, spend=spend
        )
        try:
            status = await self._files.database.do(work)
        except RejectedValue:
            await self._drop_recorded()
            return
        if status is None:
            raise Lost
        self.status = status
        self._settle({result.number for result in found})
        self.renewed_at = time.monotonic()

    async def _drop_recorded(self) -> None:
        """A transaction seemed to fail but was committed: keep what it recorded. Raises RejectedValue if that is not
        the reason."""
        numbers = [result.number for result, _ in self._unrecorded]
        recorded = await self._files.database.do(lambda execute: tables.recorded(execute, self._batch.id, numbers))
        if not recorded:
            raise RejectedValue(f"the results of batch {self._batch.id} cannot be recorded")
        self._settle(recorded)

    def _settle(self, recorded: set[int]) -> None:
        """These results are in the database, and charged."""
        for result, finished in self._unrecorded:
            if result.number in recorded:
                self.num_left -= 1
                if finished.reservation is not None:
                    finished.reservation.end(is_recorded=True)
        self._unrecorded = [each for each in self._unrecorded if each[0].number not in recorded]

    def close(self) -> None:
        """Drop what is not recorded: it is not charged."""
        for finished in (*self._finished, *(each for _, each in self._unrecorded)):
            if finished.reservation is not None:
                finished.reservation.end(is_recorded=False)
        self._finished, self._unrecorded = [], []
        if self._segment is not None:
            with contextlib.suppress(OSError):  # the disk is full, and none of this is recorded
                self._segment.close()

    async def finalise(self) -> None:
        """Write the result files and end the batch. Starts over if it was interrupted. Raises Lost, StoreError or
        OSError."""
        batch, now = self._batch, self._files.clock()
        database = self._files.database
        await database.do(
            lambda execute: tables.move(execute, batch.id, self._owner, "finalizing", now, ("in_progress",))
        )
        await self.renew()
        fresh = [self._files.temporary(id) for id in (batch.output_file_id, batch.error_file_id)]
        outcomes: set[str] = set()
        try:
            with _Segments(self._files.directory) as segments, contextlib.ExitStack() as stack:
                outputs = [stack.enter_context(_private(path)) for path in fresh]
                last = 0
                while page := await database.do(partial(tables.results, id=batch.id, after=last, limit=PAGE)):
                    await asyncio.to_thread(segments.copy, page, outputs, is_divided=batch.kind == "openai")
                    last = page[-1].number
                    outcomes.update(result.outcome for result in page)
                    if time.monotonic() - self.renewed_at >= self._renew_s:
                        await self.renew()
                await asyncio.to_thread(_sync, outputs)
            stored = await asyncio.to_thread(self._place, fresh)
        finally:
            for path in fresh:
                path.unlink(missing_ok=True)
        ended = "cancelled" if self.status == "cancelling" else "expired" if "expired" in outcomes else "completed"
        now = self._files.clock()
        if await database.do(lambda execute: tables.end(execute, batch.id, self._owner, ended, now, stored)) is None:
            raise Lost
        for segment in await asyncio.to_thread(lambda: list(self._files.directory.glob(f"{batch.id}.*"))):
            segment.unlink(missing_ok=True)
        log.info("batch %s is %s", batch.id, ended)

    def _place(self, fresh: list[Path]) -> list[StoredFile]:
        """Rename the result files into place; a file without results is left out. Blocks."""
        batch, now = self._batch, int(self._files.clock())
        expires_s = now + int(self._files.section.retention_s)
        found = []
        for path, id, what in zip(fresh, (batch.output_file_id, batch.error_file_id), ("output", "error"), strict=True):
            num_bytes = path.stat().st_size
            if num_bytes or (batch.kind == "anthropic" and what == "output"):
                path.rename(self._files.path(id))
                purpose = "batch_output" if batch.kind == "openai" else tables.HIDDEN
                name = f"{batch.id}_{what}.jsonl"
                found.append(StoredFile(id, batch.key_id, purpose, name, num_bytes, now, expires_s))
        return found


class _Segments:
    """The segments of a batch, for reading. Blocks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, IO[bytes]] = {}

    def __enter__(self) -> _Segments:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()

    def copy(self, page: list[LineResult], outputs: list[IO[bytes]], *, is_divided: bool) -> None:
        """Add results to the files of successes and of errors, or all to the first."""
        for result in page:
            if (file := self._open.get(result.segment)) is None:
                file = self._open[result.segment] = (self._directory / result.segment).open("rb")
            text = os.pread(file.fileno(), result.num_bytes, result.start)
            outputs[int(is_divided and result.outcome != "succeeded")].write(text)


def _private(path: Path) -> IO[bytes]:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _sync(files: Iterable[IO[bytes]]) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())


def _charges(reservations: Iterable[LineReservation | None]) -> tuple[Charged, dict[Slot, Counts]]:
    """What lines have used, and the rows that charge for it."""
    charged, spend = Charged(), dict[Slot, Counts]()
    for each in reservations:
        if each is None:
            continue
        if (usage := each.usage) is not None:
            charged = Charged(
                charged.prompt_tokens + usage.prompt_tokens,
                charged.cached_tokens + usage.cached_tokens,
                charged.completion_tokens + usage.completion_tokens,
                charged.cost_nano + each.cost_nano,
            )
        for slot, counts in each.spend().items():
            spend[slot] = spend[slot] + counts if slot in spend else counts
    return charged, spend
