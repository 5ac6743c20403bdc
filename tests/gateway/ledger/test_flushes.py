"""Usage on its way to the database: regular writes, failures, and requests meanwhile."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from cortex.gateway.database import Database, Execute, StoreError
from cortex.gateway.ledger.keys import Keyring, NewKey, generate
from cortex.gateway.ledger.ledger import Ledger
from cortex.gateway.ledger.meter import KeyedMeter, Meter
from cortex.gateway.ledger.store import open_store
from cortex.system.tasks import Supervisor

from ...waiting import WAIT_S, until
from .exchanges import exchanged
from .metered_requests import NOW, Clock, admit, opened, settle

T = TypeVar("T")


async def test_flushes_at_the_same_time_do_not_give_a_reservation_back_twice(database: str) -> None:
    key = generate("alice", balance_tokens=10_000)
    ledger, meter = await opened(database, key)
    reservation = admit(meter, key, limit=1000)
    await ledger.flush()  # the reservation is in the database
    settle(reservation, 90, 15)
    reports = await asyncio.gather(*(ledger.usage("key", since=NOW - 60, until=NOW + 60) for _ in range(3)))
    assert [[(spend.model, spend.counts.tokens) for spend in report] for report in reports] == [[("m", 105)]] * 3
    assert ledger.account(key.section).total_spent() == 105
    await ledger.close()


class Away(Database):
    """A database that can be unavailable."""

    is_away = False
    failure: Exception | None = None

    def run(self, work: Callable[[Execute], T]) -> T:
        def failing(execute: Execute) -> T:
            if self.is_away:
                raise self.failure or sqlite3.OperationalError("gone")
            return work(execute)

        return super().run(failing)


async def test_loses_nothing_while_the_database_is_unavailable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    key, clock = generate("alice", balance_tokens=500), Clock()
    store = Away(str(tmp_path / "spend.db"))
    ledger = Ledger(store, Keyring([key.section]), flush_s=60, clock=clock)
    await ledger.start()
    meter: Meter = KeyedMeter(ledger)
    store.is_away = True
    for _ in range(3):
        settle(admit(meter, key), 50, 50)
        clock.now += 1
        await ledger.flush()
    assert ledger.account(key.section).total_spent() == 300
    reservation = admit(meter, key, limit=200)
    assert reservation.token_limit == 200
    reservation.cancel()
    store.is_away = False
    settle(admit(meter, key), 50, 50)
    await ledger.flush()
    assert ledger.account(key.section).total_spent() == 400
    await ledger.close()
    assert [record.levelname for record in caplog.records if "database" in record.name] == ["ERROR", "INFO"]
    again = open_store(str(tmp_path / "spend.db"))
    assert exchanged(again, {}, {key.section.id: 0})[key.section.id].total == 400
    again.close_connection()


async def test_flush_of_nothing_finds_out_that_the_database_is_available_again(tmp_path: object) -> None:
    database = Away(f"{tmp_path}/spend.db")
    ledger = Ledger(database, Keyring(()), flush_s=1000)
    database.is_away = True
    with pytest.raises(StoreError):
        await database.do(lambda _: None)
    found = []
    for is_away in (True, False):
        database.is_away = is_away
        await ledger.flush()
        found.append(database.is_failing)
    assert found == [True, False]
    await ledger.close()


async def ledger_with_a_failed_flush(path: str, key: NewKey) -> tuple[Ledger, Away]:
    """One whose flush of ten tokens failed with an error that nobody expects. The store is still away."""
    restarted = asyncio.Event()
    store = Away(path)
    store.failure = RuntimeError("not a failure of the database")
    tasks = Supervisor(lambda _: restarted.set())
    ledger = Ledger(store, Keyring([key.section]), flush_s=0.01, tasks=tasks)
    await ledger.start()
    store.is_away = True
    settle(admit(KeyedMeter(ledger), key), 5, 5)
    await asyncio.wait_for(restarted.wait(), WAIT_S)
    return ledger, store


async def test_unexpected_failure_of_a_flush_is_retried_with_the_same_usage(tmp_path: object) -> None:
    key = generate("alice")
    ledger, store = await ledger_with_a_failed_flush(f"{tmp_path}/spend.db", key)
    settle(admit(KeyedMeter(ledger), key), 5, 5)
    store.is_away = False
    reader = open_store(f"{tmp_path}/spend.db")
    await until(lambda: exchanged(reader, {}, {key.section.id: 0})[key.section.id].total == 20)
    reader.close_connection()
    await ledger.close()


async def test_close_writes_the_usage_that_a_failed_flush_kept(tmp_path: object) -> None:
    key = generate("alice")
    ledger, store = await ledger_with_a_failed_flush(f"{tmp_path}/spend.db", key)
    store.is_away = False
    await ledger.close()
    reader = open_store(f"{tmp_path}/spend.db")
    assert exchanged(reader, {}, {key.section.id: 0})[key.section.id].total == 10
    reader.close_connection()


async def test_writes_spend_regularly(tmp_path: object) -> None:
    key = generate("alice")
    store = open_store(f"{tmp_path}/spend.db")
    ledger = Ledger(store, Keyring([key.section]), flush_s=0.01)
    await ledger.start()
    settle(admit(KeyedMeter(ledger), key), 5, 5)
    reader = open_store(f"{tmp_path}/spend.db")
    await until(lambda: exchanged(reader, {}, {key.section.id: 0})[key.section.id].total == 10)
    reader.close_connection()
    await ledger.close()


async def test_flush_during_settling_counts_everything_once(tmp_path: object) -> None:
    key = generate("alice", balance_tokens=10**9)
    ledger, meter = await opened(f"{tmp_path}/spend.db", key)

    async def spend() -> None:
        for _ in range(50):
            reservation = admit(meter, key)
            await asyncio.sleep(0)
            settle(reservation, 1, 1)

    async def flush() -> None:
        for _ in range(20):
            await ledger.flush()

    await asyncio.gather(*(spend() for _ in range(10)), flush())
    assert ledger.account(key.section).total_spent() == 1000
    await ledger.close()
    store = open_store(f"{tmp_path}/spend.db")
    assert exchanged(store, {}, {key.section.id: 0})[key.section.id].total == 1000
    store.close_connection()
