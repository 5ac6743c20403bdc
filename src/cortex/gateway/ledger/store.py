"""The ledger's database: SQLite or PostgreSQL, with the same statements.

Calls block; use them from one thread at a time, never the event loop's. Several processes may share one database:
writes add to the rows that are there, and each gateway writes only its own reservations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from cortex.gateway.database import Database, Driver, Execute, check_location, driver_of
from cortex.gateway.ledger import tables
from cortex.gateway.ledger.limits import MINUTE_S, Spent
from cortex.gateway.ledger.tables import Claim, Counts, GroupBy, Slot
from cortex.settings import Section

NO_CLAIM = Claim(owner="")
"""The claim of a process that reserves nothing."""


class LedgerSection(Section, frozen=True):
    """Where usage is recorded."""

    database: str = "cortex-spend.db"
    """A SQLite file in `gateway.state`, or `postgresql://user@host/name` for gateways with shared usage records."""
    flush_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """How often usage and reservations are written. A gateway that is killed loses at most what it admitted or finished
    within this time; requests that had been running for longer stay charged."""

    audit_days: Annotated[int, msgspec.Meta(ge=0)] = 365
    """How long the audit log is kept: every change of models, nodes, keys and records, and every sign-in, with the key.
    0: nothing is recorded."""

    def __post_init__(self) -> None:
        check_location(self.database)


def open_store(database: str) -> Store:
    """The store at a file path or `postgresql://` URL, created if it does not exist. Raises `StoreError`."""
    return Store(driver_of(database))


class Store:
    """The ledger's database. After a failed call the next one connects again. Raises `StoreError` from every method."""

    def __init__(self, driver: Driver) -> None:
        self._database = Database(driver, tables.SCHEMA, "usage database")
        self._database.run(lambda _: None)

    @property
    def name(self) -> str:
        return self._database.name

    def exchange(
        self,
        batch: Mapping[Slot, Counts],
        since_minute: Mapping[str, int],
        *,
        before: Claim = NO_CLAIM,
        after: Claim = NO_CLAIM,
    ) -> dict[str, Spent]:
        """Add `batch`, replace the reservations `before` by `after`, and read what keys have spent.

        One transaction does all of it or nothing. `since_minute` has the keys to read and the first minute of each;
        totals are of all time.
        """

        def work(execute: Execute) -> dict[str, Spent]:
            # Reservations first, as in `settle_dead`, so that locks are always taken in the same order.
            returned = tables.replace_claim(execute, before, after) if before is not after else {}
            tables.add_spend(execute, {**batch, **returned})
            return tables.read_spent(execute, after.owner, since_minute)

        return self._database.run(work)

    def open_accounts(self, since_minute: Mapping[str, int], claim: Claim) -> dict[str, Spent]:
        """Record that the keys of `since_minute` exist, and read what they have spent, as `exchange` does."""

        def work(execute: Execute) -> dict[str, Spent]:
            tables.add_keys(execute, since_minute)
            return tables.read_spent(execute, claim.owner, since_minute)

        return self._database.run(work)

    def spent(self, since_minute: Mapping[str, int]) -> dict[str, Spent]:
        """What keys have spent, and what all gateways have reserved for them. Changes nothing."""
        return self._database.run(lambda execute: tables.read_spent(execute, NO_CLAIM.owner, since_minute))

    def has_keys(self) -> bool:
        """Whether any key was ever configured on this database."""
        return self._database.run(tables.has_keys)

    def other_claims(self, owner: str) -> dict[str, int]:
        """The other gateways with reservations, and when each last renewed them, in milliseconds."""
        return self._database.run(lambda execute: tables.other_claims(execute, owner))

    def settle_dead(self, owner: str, renewed_ms: int) -> int:
        """Record the reservations of a dead gateway as spent; returns their tokens.

        Does nothing if they have been renewed since `renewed_ms`.
        """

        def work(execute: Execute) -> int:
            spend = tables.take_claim(execute, owner, renewed_ms)
            tables.add_spend(execute, spend)
            return sum(counts.tokens for counts in spend.values())

        return self._database.run(work)

    def usage(self, group: GroupBy, *, since: float, until: float, key_id: str | None = None) -> list[tables.Spend]:
        """The spend in [since, until) of every key, model, node or day (as days since 1970), by model; of one key or of
        all."""
        bounds = (int(since // MINUTE_S), -int(-until // MINUTE_S))
        return self._database.run(lambda execute: tables.read_usage(execute, group, bounds, key_id))

    def close(self) -> None:
        self._database.close()
