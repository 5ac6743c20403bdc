"""The latest requests, kept in memory for operators and for the owners of keys.

A request costs one object when it ends. JSON is made only on reading. Prompts and responses are kept only if the
operator enables it, up to a number of bytes, and with text that matches the operator's patterns redacted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from cortex.gateway.config import ActivitySection
from cortex.wire.events import Usage
from cortex.wire.words import about, os_error_in_words

REDACTED = b"[redacted]"
_MARGIN_BYTES = 4096
"""Text after the kept part of a request that is searched too, because a match may extend into it."""

Subscriber = Callable[["RequestRecord"], None]


class Capture(NamedTuple):
    """The kept texts of one request."""

    request: bytes
    """The start of the client's body."""
    num_request_bytes: int
    """The length of the whole body."""
    response_end: bytes
    """The last bytes of the response."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One completed request. Thousands are kept, so the garbage collector does not track them: a record refers only to
    values."""

    number: int
    """Number of the request at this gateway, from 1."""
    id: bytes
    ended_at: float
    """Seconds since 1970."""
    key_id: str | None
    """None on an open gateway."""
    key_name: str
    model: str
    node: str
    """The last node that it was sent to; empty when it was sent to none."""
    dialect: str
    path: bytes
    status: int
    outcome: str
    error_code: str | None
    error_message: str | None
    reason: str
    """Why this node."""
    waited_s: float = 0.0
    """Time in the queue, with the load that it waited for."""
    load_s: float = 0.0
    """The part of `waited_s` in which the model was loaded or woken."""
    first_token_s: float | None = None
    """Time to the first token; None if unknown, as for a whole response of another server."""
    duration_s: float = 0.0
    num_attempts: int = 0
    request_class: str = "default"
    usage: Usage | None = None
    dimensions: int | None = None
    """The length of the vectors of a response with embeddings."""
    capture: Capture | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """The speed after the first token."""
        if self.usage is None or self.first_token_s is None:
            return None
        num_later, later_s = self.usage.completion_tokens - 1, self.duration_s - self.first_token_s
        return num_later / later_s if num_later > 0 and later_s > 0 else None


class ActivityLog:
    """The latest requests, newest last. Used on the loop's thread only; subscribers must not raise."""

    def __init__(self, section: ActivitySection, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._num_requests = 0
        self.version = 0
        """Changes with the records."""
        self._subscribers: tuple[Subscriber, ...] = ()
        self._records: deque[RequestRecord] = deque()
        self.configure(section)

    def configure(self, section: ActivitySection) -> None:
        """Use a changed configuration. Captures that it no longer allows are dropped."""
        self._section = section
        self.captures = section.capture
        """Whether `capture` keeps anything."""
        self._patterns = [re.compile(pattern.encode()) for pattern in section.redact]
        kept = self._records if section.capture else (replace(record, capture=None) for record in self._records)
        self._records = deque(kept, maxlen=section.requests)

    @property
    def last_number(self) -> int:
        """The number of the latest request; 0 before the first."""
        return self._num_requests

    def capture(self, request: bytes, response_end: bytes, *, is_stream: bool) -> Capture:
        """The texts of a request as they may be kept.

        With patterns, nothing of a stream is kept: its text is split over events, where they would not match.
        """
        limit = self._section.capture_kb * 1024
        if is_stream and self._patterns:
            response_end = b""
        return Capture(self._start(request, limit), len(request), self._redacted(response_end)[-limit:])

    def _start(self, request: bytes, limit: int) -> bytes:
        """The first bytes of a request, redacted. The rest of a large request is not searched."""
        redacted = self._redacted(request[: limit + _MARGIN_BYTES])
        if self._patterns and len(request) > limit + _MARGIN_BYTES:
            redacted = redacted[:-_MARGIN_BYTES]  # it may end inside a match
        return redacted[:limit]

    def stamp(self) -> tuple[int, float]:
        """The number and the time of a request that ends now."""
        self._num_requests += 1
        return self._num_requests, self._wall_clock()

    def append(self, record: RequestRecord) -> None:
        """Record a request that has ended."""
        self.version += 1
        self._records.append(record)
        for subscriber in self._subscribers:
            subscriber(record)

    def restore(self, records: Sequence[RequestRecord]) -> None:
        """Begin with the records of an earlier process, oldest first; before the first request."""
        self.version += 1
        self._records.extend(records)
        self._num_requests = max((record.number for record in records), default=0)

    def latest(self, count: int) -> list[RequestRecord]:
        """The newest `count` records, oldest first."""
        return list(islice(self._records, max(0, len(self._records) - count), None))

    def newest_first(self) -> Iterator[RequestRecord]:
        return reversed(self._records)

    def forget(self, matches: Callable[[RequestRecord], bool]) -> int:
        """Remove the matching records and their captures; returns how many."""
        kept = [record for record in self._records if not matches(record)]
        num_removed = len(self._records) - len(kept)
        self.version += 1
        self._records = deque(kept, maxlen=self._section.requests)
        return num_removed

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every request that ends, until the returned function is called."""
        self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            self._subscribers = tuple(each for each in self._subscribers if each is not subscriber)

        return unsubscribe

    def _redacted(self, text: bytes) -> bytes:
        for pattern in self._patterns:
            text = pattern.sub(REDACTED, text)
        return text


log = logging.getLogger(__name__)

FILE_NAME = "activity.msgpack"
INTERVAL_S = 10.0
MOST_RECORDS = 10_000
"""How many of the latest requests are written, however many are kept in memory."""


class ActivityFile:
    """Reading and writing never raise: a failure is logged, and the activity is lost with the process.

    A gateway that takes over from another one claims the file with its first write; the other writes no more.
    """

    def __init__(self, directory: Path, activity: ActivityLog) -> None:
        self._path = directory / FILE_NAME
        self._activity = activity
        self._inode: int | None = None
        """The inode of the file that this process wrote last."""
        self._written = 0
        """The version of the activity that it contains."""
        self._failing = False

    async def restore(self) -> None:
        """Continue with the requests in the file, and claim it. Before the first request."""
        self._activity.restore(await asyncio.to_thread(self._read))
        await self.save()

    async def save(self) -> None:
        """Write the requests if they differ from the file."""
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
