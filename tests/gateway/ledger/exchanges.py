"""Exchanges with the ledger's database, as a gateway makes them."""

from collections.abc import Mapping
from typing import Any

from cortex.gateway.database import Database
from cortex.gateway.ledger.limits import Spent
from cortex.gateway.ledger.store import Counts, Slot, exchange


def exchanged(
    database: Database, batch: Mapping[Slot, Counts], since_minute: Mapping[str, int], **claims: Any
) -> dict[str, Spent]:
    """Adds `batch`, and reads what the keys of `since_minute` have spent."""
    return database.run(lambda execute: exchange(execute, batch, since_minute, **claims))
