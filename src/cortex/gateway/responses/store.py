"""Stored responses on the event loop: reads and writes run on one thread, in order.

Because of that order a request finds a response saved before it, although `save` does not wait. If gateways share the
database, clients get the end of a response after it was written. While the database is unavailable, responses are
served as always and not stored. That is logged once and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from cortex.gateway.config import ResponsesSection
from cortex.gateway.database import Database, Execute, StoreError, is_unavailable
from cortex.gateway.responses import conversation_tables, tables
from cortex.gateway.responses.tables import NewResponse, StoredResponse
from cortex.system.tasks import SupervisedTask, Supervisor
from cortex.wire.errors import DatabaseUnavailable, InvalidValue

log = logging.getLogger(__name__)

T = TypeVar("T")

PURGE_S = 30.0
MAX_UNWRITTEN_BYTES = 64 * 1024 * 1024
"""Responses that may wait to be written; further ones are not stored, so that a slow database does not fill the
memory."""


class ResponseStore:
    """Owns the database of stored responses. Used on the loop's thread; opens the database with the first use."""

    def __init__(
        self,
        database: Database,
        section: ResponsesSection,
        tasks: Supervisor,
        count: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`count` counts the outcome of each response: "stored", "too_large" or "failed"."""
        self.section = section
        """Replaced by a reload."""
        self.database = database.use(tables.SCHEMA)
        self._tasks = tasks
        self._count = count
        self.clock = clock
        self._lock = threading.Lock()
        self._unwritten: list[tuple[Callable[[], NewResponse], Callable[[], None]]] = []
        """How each is built, and what is called afterwards."""
        self._num_unwritten_bytes = 0
        self._purging: SupervisedTask | None = None

    def start(self) -> None:
        """Start deleting expired responses regularly."""
        self._purging = self._tasks.every(PURGE_S, "purge of stored responses", self._purge_or_wait)

    async def close(self) -> None:
        """Stop deleting. Waiting responses are written before the database closes. Idempotent."""
        if self._purging is not None:
            self._purging.cancel()
            await self._purging.ended()
            self._purging = None

    @property
    def max_entry_bytes(self) -> int:
        return self.section.max_entry_mb * 1024 * 1024

    def save(self, build: Callable[[], NewResponse], num_bytes: int, then: Callable[[], None] = lambda: None) -> None:
        """Store the response that `build` makes soon, then call `then`, even if storing failed. `num_bytes` is its
        approximate size.

        `build` runs on the thread. It raises msgspec.DecodeError when a node's response is not one, and InvalidValue
        when the input cannot be stored.
        """
        if num_bytes > self.max_entry_bytes:
            self.too_large()
            then()
            return
        with self._lock:
            has_room = self._num_unwritten_bytes + num_bytes <= MAX_UNWRITTEN_BYTES
            if has_room:
                self._num_unwritten_bytes += num_bytes
                self._unwritten.append((build, then))
            is_first = has_room and len(self._unwritten) == 1
        if not has_room:
            self._count("failed")
            then()
        elif is_first:
            self.database.submit(self._write).add_done_callback(self._written)

    def too_large(self) -> None:
        """Count a response that is not stored because of its size."""
        self._count("too_large")
        log.info("response not stored: larger than responses.max_entry_mb, %d", self.section.max_entry_mb)

    def without_end(self) -> None:
        """Count a response that is not stored because its stream ended without the event that has the response."""
        self._count("without_end")
        log.info("response not stored: the stream of the node has no last event with the response")

    async def add(self, response: NewResponse) -> None:
        """Store a response now. Raises `DatabaseUnavailable` when the database is unavailable."""
        await self.run(lambda execute: tables.add(execute, response, self.clock(), self.section.retention_s))

    async def finish(self, id: str, key_id: str, status: str, body: bytes) -> bool:
        """Store the end of a background response; False if it has ended already. Raises `DatabaseUnavailable`."""
        now_s, retention_s = self.clock(), self.section.retention_s
        return await self.run(lambda execute: tables.finish(execute, id, key_id, status, body, now_s, retention_s))

    async def read(self, key_id: str, id: str) -> StoredResponse | None:
        """A stored response of the key. Raises `DatabaseUnavailable`."""
        return await self.run(lambda execute: tables.read(execute, key_id, id, self.clock()))

    async def read_chain(self, key_id: str, id: str) -> list[StoredResponse]:
        """A stored response of the key and those that it continues, oldest first. Raises `DatabaseUnavailable`."""
        return await self.run(lambda execute: tables.read_chain(execute, key_id, id, self.clock()))

    async def delete(self, key_id: str, id: str) -> bool:
        """Delete a response of the key; False if there is none. Raises `DatabaseUnavailable`."""
        return await self.run(lambda execute: tables.delete(execute, key_id, id, self.clock()))

    async def renew(self, ids: list[str]) -> set[str]:
        """Show that background responses still run; returns those that were cancelled or deleted. Raises
        `DatabaseUnavailable`."""
        return await self.run(lambda execute: tables.renew(execute, ids, self.clock()))

    async def purge(self) -> None:
        """Delete what has expired and what exceeds the size of the store."""
        limit = self.section.max_total_mb * 1024 * 1024
        while await self.run(partial(_purge, now_s=self.clock(), max_bytes=limit)):
            pass  # in steps, so that reads and writes of requests come between

    async def run(self, work: Callable[[Execute], T]) -> T:
        """Do `work` in one transaction, after earlier saves. Raises `DatabaseUnavailable`, and InvalidValue for a value
        that the database cannot store."""
        return await self.database.serve(work)

    def _take_unwritten(self) -> list[tuple[Callable[[], NewResponse], Callable[[], None]]]:
        with self._lock:
            unwritten, self._unwritten = self._unwritten, []
            self._num_unwritten_bytes = 0
        return unwritten

    def _write(self) -> tuple[int, list[Callable[[], None]]]:
        """Write waiting responses; runs on the thread. Returns how many were written, and the callbacks."""
        unwritten = self._take_unwritten()
        responses = [response for build, _ in unwritten if (response := _built(build)) is not None]
        responses.sort(key=lambda response: response.conversation_id or "")  # all gateways lock rows in this order
        now_s, retention_s = self.clock(), self.section.retention_s
        adding = (
            partial(tables.add, response=response, now_s=now_s, retention_s=retention_s) for response in responses
        )
        failures = self.database.run_each(list(adding))
        for failure in failures.values():
            if not is_unavailable(failure):
                log.error("a response could not be stored", exc_info=failure)
        return len(responses) - len(failures), [then for _, then in unwritten]

    def _written(self, writing: asyncio.Future[tuple[int, list[Callable[[], None]]]]) -> None:
        try:
            num_stored, thens = writing.result()
        except StoreError:  # it failed before its turn: the waiting writes are not stored
            num_stored, thens = 0, [then for _, then in self._take_unwritten()]
        for result in ("stored",) * num_stored + ("failed",) * (len(thens) - num_stored):
            self._count(result)
        for then in thens:
            then()

    async def _purge_or_wait(self) -> None:
        with contextlib.suppress(DatabaseUnavailable):  # reported; the next round tries again
            await self.purge()


def _purge(execute: Execute, now_s: float, max_bytes: int) -> int:
    """Delete some of what has expired, or else of what exceeds `max_bytes` in all, of the kind that takes more; returns
    how many were deleted."""
    of_responses, of_conversations = tables.total_bytes(execute), conversation_tables.total_bytes(execute)
    if of_responses >= of_conversations:
        limits = (max_bytes - of_conversations, of_conversations)
    else:
        limits = (of_responses, max_bytes - of_responses)
    return tables.purge(execute, now_s, limits[0]) + conversation_tables.purge(execute, now_s, limits[1])


def _built(build: Callable[[], NewResponse]) -> NewResponse | None:
    try:
        return build()
    except (msgspec.DecodeError, InvalidValue) as problem:
        log.debug("response not stored: the input or the node's response cannot be read: %s", problem)
    except Exception:  # one response that cannot be stored must not take others with it
        log.exception("a response could not be stored")
    return None
