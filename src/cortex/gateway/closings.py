"""The books of requests that are over, closed when the loop has a moment.

Streams often end together, and their clients ask again in the same instant. What is told of the old requests would then
stand before the first event of the new ones, so it waits a little.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Protocol

log = logging.getLogger(__name__)

DELAY_S = 0.02
"""From the end of a request until its books are closed, as a rule: a crowd is served by then."""
MAX_OPEN = 64
"""More than this do not wait: the oldest is closed for each that comes."""


class Books(Protocol):
    """What one request leaves behind."""

    def close(self) -> None:
        """Settle and tell. Called exactly once."""


class Closings:
    """Closes every book that it is given exactly once, oldest first. Owned by the loop.

    One per turn of the loop, so that no request waits for the books of many that went before.

    Who needs them closed now calls `drain`: a scrape, a refusal that an open book may have caused, the end of the
    process.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: deque[Books] = deque()
        self._awaited = False
        """The loop will call `_close_one`."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, books: Books) -> None:
        self._open.append(books)
        if len(self._open) > MAX_OPEN:
            self._close_oldest()
        elif not self._awaited:
            self._awaited = True
            self._loop.call_later(DELAY_S, self._close_one)

    def drain(self) -> bool:
        """Close all that are open now; False when none was."""
        had_any = bool(self._open)
        while self._open:
            self._close_oldest()
        return had_any

    def _close_one(self) -> None:
        if self._open:
            self._close_oldest()
        self._awaited = bool(self._open)
        if self._awaited:
            self._loop.call_soon(self._close_one)

    def _close_oldest(self) -> None:
        books = self._open.popleft()
        try:
            books.close()
        except Exception:  # whatever goes wrong with one must not keep the others open
            log.exception("the books of a request could not be closed; what it used may not be billed")
