"""Slots that clients share fairly. Decides without I/O; only `hold` waits.

A free place goes to the client that holds the fewest, among equals to the one that has had the fewest. No client holds
all places, so that one with expensive requests delays no other. The number of waiting requests is bounded, in all
and for each client.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from cortex.system.fair_turns import VirtualTime


class NoPlace(Exception):
    """The queue is full, in all or (`is_own`) for this client."""

    def __init__(self, num_waiting: int, *, is_own: bool) -> None:
        super().__init__(f"{num_waiting} requests are waiting already")
        self.num_waiting = num_waiting
        self.is_own = is_own


class FairQueue:
    """Belongs to one loop. Every entry that `enter` accepts must be passed to `leave` once, whatever its outcome."""

    def __init__(self, num_places: int, max_waiting: int, max_waiting_per_client: int) -> None:
        self._num_places = num_places
        self._max_held = max(1, num_places - 1)
        self._max_waiting = max_waiting
        self._max_waiting_per_client = max_waiting_per_client
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[Entry]] = {}
        self._served: VirtualTime[str] = VirtualTime()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def hold(self, client: str) -> AsyncIterator[None]:
        """Waits for a place and holds it. Raises NoPlace."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def start() -> None:
            if not started.done():
                started.set_result(None)

        entry = self.enter(client, start)
        try:
            await started
            yield
        finally:
            self.leave(entry)

    def enter(self, client: str, start: Callable[[], None]) -> Entry:
        """Calls `start` now or when there is a place. Raises NoPlace."""
        entry = Entry(client, start)
        if not self._may_start(client):
            own = self._waiting.get(client, ())
            if len(own) >= self._max_waiting_per_client:
                raise NoPlace(len(own), is_own=True)
            if self.num_waiting >= self._max_waiting:
                raise NoPlace(self.num_waiting, is_own=False)
        self._waiting.setdefault(client, deque()).append(entry)
        self._served.joins(client)
        self._fill()
        return entry

    def leave(self, entry: Entry) -> None:
        """The request has ended or is no longer wanted."""
        client = entry.client
        if entry.has_place:
            entry.has_place = False
            self._held[client] -= 1
            if not self._held[client]:
                del self._held[client]
        elif client in self._waiting and entry in self._waiting[client]:
            self._waiting[client].remove(entry)
            self._leave_queue(client)
        self._fill()

    def _leave_queue(self, client: str) -> None:
        self._served.leaves(client)
        if not self._waiting[client]:
            del self._waiting[client]

    def _may_start(self, client: str) -> bool:
        return self._held.total() < self._num_places and self._held[client] < self._max_held

    def _fill(self) -> None:
        while candidates := [client for client in self._waiting if self._may_start(client)]:
            client = min(
                candidates, key=lambda each: (self._held[each], self._served.used(each))
            )  # the first of equals
            entry = self._waiting[client].popleft()
            self._leave_queue(client)
            self._served.charge(client, 1)
            entry.has_place = True
            self._held[client] += 1
            entry.start()


class Entry:
    """One request in the queue or in a place."""

    __slots__ = ("client", "has_place", "start")

    def __init__(self, client: str, start: Callable[[], None]) -> None:
        self.client = client
        self.start = start
        self.has_place = False
