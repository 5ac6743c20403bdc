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
    """Calls `on_tick` of every member at a fixed interval; stops while it has no member. One per event loop.

    A tick that comes late, because the process had no core or the machine was stopped, is skipped once: what came
    meanwhile is read before a deadline is judged, and peers on this machine get their turn too.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = 0.25) -> None:
        self.loop = loop
        self._interval_s = interval_s
        self._members: set[Ticking] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._has_skipped = False

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Ticking) -> None:
        """Start calling `member`; adding it twice changes nothing."""
        self._members.add(member)
        if self._timer is None:
            self._schedule()

    def discard(self, member: Ticking) -> None:
        """Stop calling `member`, if it is one."""
        self._members.discard(member)

    def _schedule(self) -> None:
        self._timer = self.loop.call_later(self._interval_s, self._tick)

    def _tick(self) -> None:
        assert self._timer is not None
        now = self.loop.time()
        is_late = now - self._timer.when() > self._interval_s
        self._timer = None
        if self._members:
            self._schedule()
        self._has_skipped = is_late and not self._has_skipped
        if self._has_skipped:
            return
        for member in tuple(self._members):
            try:
                member.on_tick(now)
            except Exception:  # of one connection; the deadlines of all others must hold
                log.exception("a deadline was not checked")
