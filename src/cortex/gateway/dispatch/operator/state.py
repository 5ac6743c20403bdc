"""Operators' decisions that survive restarts, pinned models and drained nodes, kept in the gateway's database.

Gateways that share a database share these decisions. While the database is unavailable, a gateway continues with what
it knows and writes its own changes later.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NamedTuple

from cortex.fleet.topology import ModelOnNode
from cortex.gateway.database import Database, Execute, Schema, StoreError
from cortex.gateway.dispatch.dispatcher import Dispatcher

SCHEMA: Schema = (
    "CREATE TABLE IF NOT EXISTS pin (node TEXT NOT NULL, model TEXT NOT NULL, PRIMARY KEY (node, model))",
    "CREATE TABLE IF NOT EXISTS drained (node TEXT PRIMARY KEY)",
)
INTERVAL_S = 1.0
STORE_S = 10.0
"""How long an order waits for the database; after that its change is written later."""
READ_S = 1.0
"""How long a tick waits for the database."""
READ_EVERY = 5
"""A gateway without changes of its own reads those of other gateways once in this many calls."""


class Decisions(NamedTuple):
    """What operators decided."""

    pins: frozenset[ModelOnNode] = frozenset()
    drained: frozenset[str] = frozenset()

    def since(self, before: Decisions) -> tuple[Decisions, Decisions]:
        """What was added and what was removed since `before`."""
        return (
            Decisions(self.pins - before.pins, self.drained - before.drained),
            Decisions(before.pins - self.pins, before.drained - self.drained),
        )

    def changed(self, added: Decisions, removed: Decisions) -> Decisions:
        return Decisions(
            (self.pins | added.pins) - removed.pins,
            (self.drained | added.drained) - removed.drained,
        )


class OperatorState:
    """Keeps the dispatcher and the database equal. Owned by the loop."""

    def __init__(self, dispatcher: Dispatcher, database: Database) -> None:
        """A database that does not exist is created only when there is something to store."""
        self._dispatcher = dispatcher
        self._database = database.use(SCHEMA)
        self._stored = Decisions()
        """As last read from the database."""
        self._num_calls = 0
        self._turn = asyncio.Lock()

    async def synchronise(self) -> None:
        """Write local changes and adopt those of other gateways. Never raises."""
        async with self._turn:
            await self._synchronise()

    async def before_tick(self) -> None:
        """Another gateway may just have unpinned a model that the next tick would load. Never raises."""
        if self._dispatcher.lacks_pinned and not self._database.is_failing:
            with suppress(TimeoutError):
                async with asyncio.timeout(READ_S), self._turn:
                    await self._synchronise(is_due=True)

    async def store(self) -> None:
        """Returns when what was decided here is written, or cannot be for now."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STORE_S):
                await self.synchronise()

    async def _synchronise(self, *, is_due: bool = False) -> None:
        local = self._local()
        added, removed = local.since(self._stored)
        has_changed = any(added) or any(removed)
        is_due = is_due or self._num_calls % READ_EVERY == 0
        self._num_calls += 1
        if not (has_changed or (is_due and self._database.exists)):
            return
        try:
            stored = await self._database.do(lambda execute: _exchange(execute, added, removed))
        except StoreError:
            return  # the next call retries
        self._stored = stored
        self._adopt(stored.changed(*self._local().since(local)))  # with the changes made here meanwhile

    def _local(self) -> Decisions:
        return Decisions(self._dispatcher.pins, self._dispatcher.drained)

    def _adopt(self, wanted: Decisions) -> None:
        added, removed = wanted.since(self._local())
        if added.pins or removed.pins:
            self._dispatcher.change_pins(added=added.pins, removed=removed.pins)
        for node in added.drained:
            self._dispatcher.drain(node, drained=True)
        for node in removed.drained:
            self._dispatcher.drain(node, drained=False)


def _exchange(execute: Execute, added: Decisions, removed: Decisions) -> Decisions:
    for pin in sorted(added.pins):
        execute("INSERT INTO pin (node, model) VALUES ($1, $2) ON CONFLICT (node, model) DO NOTHING", pin)
    for pin in sorted(removed.pins):
        execute("DELETE FROM pin WHERE node = $1 AND model = $2", pin)
    for node in sorted(added.drained):
        execute("INSERT INTO drained (node) VALUES ($1) ON CONFLICT (node) DO NOTHING", (node,))
    for node in sorted(removed.drained):
        execute("DELETE FROM drained WHERE node = $1", (node,))
    pins = frozenset(ModelOnNode(str(node), str(model)) for node, model in execute("SELECT node, model FROM pin", ()))
    return Decisions(pins, frozenset(str(row[0]) for row in execute("SELECT node FROM drained", ())))
