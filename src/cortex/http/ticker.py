"""One timer for all deadlines.

A timer per request would cost more than the rest of its bookkeeping. Objects with a deadline join a ticker instead,
which calls them a few times a second.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger(__name__)


class Ticking(Protocol):
    """A member of a ticker."""

    def on_tick(self, now: float) -> None:
        """Called every `interval_s` with the loop's time. What it raises is logged."""


class Ticker:
    """Calls `on_tick` of every member at a fixed interval; stops while it has no member. One per event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = 0.25) -> None:
        self.loop = loop
        self._interval_s = interval_s
        self._members: set[Ticking] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Ticking) -> None:
        """Start calling `member`; adding it twice changes nothing."""
        self._members.add(member)
        if self._timer is None:
            self._timer = self.loop.call_later(self._interval_s, self._tick)

    def discard(self, member: Ticking) -> None:
        """Stop calling `member`, if it is one."""
        self._members.discard(member)

    def _tick(self) -> None:
        self._timer = self.loop.call_later(self._interval_s, self._tick) if self._members else None
        now = self.loop.time()
        for member in tuple(self._members):
            try:
                member.on_tick(now)
            except Exception:  # of one connection; the deadlines of all others must hold
                log.exception("a deadline was not checked")
