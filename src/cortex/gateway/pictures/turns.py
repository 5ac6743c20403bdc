"""How many pictures are fetched at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_MAX_AT_ONCE = 16
"""Fetches of all clients together."""
_MAX_EACH = 4
"""Fetches of one client, so that it cannot occupy all."""


class FetchTurns:
    """Belongs to one loop. Clients who wait have their turns in the order in which they came."""

    def __init__(self, at_once: int = _MAX_AT_ONCE, each: int = _MAX_EACH) -> None:
        self._all = asyncio.Semaphore(at_once)
        self._each = each
        self._by_client: dict[str, asyncio.Semaphore] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def of(self, client: str) -> AsyncIterator[None]:
        own = self._by_client.setdefault(client, asyncio.Semaphore(self._each))
        self._users[client] += 1
        try:
            async with own, self._all:
                yield
        finally:
            self._users[client] -= 1
            if not self._users[client]:
                del self._users[client], self._by_client[client]
