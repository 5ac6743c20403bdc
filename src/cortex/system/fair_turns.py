"""Decides whose turn it is: classes of requests, and equal shares for the clients within a class. Pure; times are
passed in.

Clients share by virtual time, counted in tokens or in any other cost. The client that has used the least goes first.
One that returns starts level with those that waited: it does not save up unused shares.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

IDLE, FLEX, DEFAULT, PRIORITY = range(4)
"""The levels of classes. A request of a lower level waits for those of higher ones, and is preempted first."""
RISES_AFTER_S = (600.0, 60.0, 60.0)
"""A request that has waited this long at its level counts as one of the next, so that no class starves another."""

Client = TypeVar("Client", bound=Hashable)


def aged(level: int, waited_s: float) -> int:
    """The level at which a request takes its turn after a wait."""
    while level < PRIORITY and waited_s >= RISES_AFTER_S[level]:
        waited_s -= RISES_AFTER_S[level]
        level += 1
    return level


class VirtualTime(Generic[Client]):
    """What clients have used, while it affects turns. Reset when no client waits."""

    def __init__(self) -> None:
        self._used: dict[Client, float] = {}
        self._waiting: Counter[Client] = Counter()
        self._level = 0.0
        """The least that a waiting client had used when this was last looked at. It never falls."""

    def used(self, client: Client) -> float:
        """The lowest is next."""
        return max(self._used.get(client, 0.0), self._level)

    def joins(self, client: Client) -> None:
        """One more request of the client waits."""
        if client not in self._waiting:
            self._rise()
            self._used[client] = self.used(client)
        self._waiting[client] += 1

    def leaves(self, client: Client) -> None:
        """A request that has joined no longer waits, whatever its outcome."""
        if self._waiting[client] <= 1:
            self._rise()
            del self._waiting[client]
            if not self._waiting:  # nobody is owed anything
                self._used, self._level = {}, 0.0
            self._used = {
                each: used for each, used in self._used.items() if used > self._level or each in self._waiting
            }
        else:
            self._waiting[client] -= 1

    def charge(self, client: Client, cost: float) -> None:
        """The client has used this much. A negative amount corrects an earlier charge. Does not count while no client
        waits."""
        if self._waiting:
            self._used[client] = max(self.used(client) + cost, 0.0)

    def _rise(self) -> None:
        self._level = max(self._level, min((self._used[each] for each in self._waiting), default=0.0))
