"""Reservations of gateways that are killed, paused or shut down."""

from __future__ import annotations

import pytest

from cortex.gateway.ledger.keys import generate
from cortex.gateway.ledger.ledger import LEASE_S, Ledger
from cortex.gateway.ledger.store import open_store, other_claims
from cortex.gateway.ledger.usage_report import usage
from cortex.wire.errors import InsufficientQuota

from .metered_requests import NOW, Clock, admit, opened, settle


async def crash(ledger: Ledger) -> None:
    """Write as the last regular flush before the gateway is killed."""
    await ledger.flush()


async def test_reservations_of_a_killed_gateway_stay_charged(database: str) -> None:
    key = generate("alice", balance_tokens=500)
    dead, meter = await opened(database, key)
    admit(meter, key, limit=300)
    await crash(dead)
    ledger, meter = await opened(database, key)
    assert admit(meter, key, limit=300).token_limit == 100
    with pytest.raises(InsufficientQuota, match="has 0 of 500 tokens left, because its running requests hold 500"):
        admit(meter, key)
    await ledger.close()


async def test_usage_settled_before_a_crash_is_charged_as_used(database: str) -> None:
    key = generate("alice", balance_tokens=500)
    dead, meter = await opened(database, key)
    reservation = admit(meter, key, limit=300)
    await dead.flush()
    settle(reservation, 10, 10)
    await crash(dead)
    ledger, meter = await opened(database, key)
    assert admit(meter, key, limit=380).token_limit == 480
    await ledger.close()


async def test_reservations_of_a_dead_gateway_become_usage_after_its_lease(database: str) -> None:
    key, clock = generate("alice", balance_tokens=500, window_tokens=10_000), Clock()
    dead, meter = await opened(database, key, clock=clock)
    admit(meter, key, limit=300)
    await crash(dead)
    ledger, meter = await opened(database, key, clock=clock)
    for _ in range(3):
        await ledger.flush()
        assert ledger.account(key.section).total_spent() == 0
        clock.now += LEASE_S / 2
    await ledger.flush()
    await ledger.flush()
    assert ledger.account(key.section).total_spent() == 400
    assert ledger.account(key.section).window_spent(clock.now) == 400
    reservation = admit(meter, key, limit=300)
    assert reservation.token_limit == 100
    reservation.cancel()
    await ledger.close()
    store = open_store(database)
    (row,) = usage(store, since=NOW - 60, until=NOW + 60)
    assert (row.name, row.requests, row.total_tokens) == ("alice", 1, 400)
    store.close_connection()


async def test_running_gateway_keeps_its_reservations(database: str) -> None:
    key, clock = generate("alice", balance_tokens=500), Clock()
    busy, meter = await opened(database, key, clock=clock)
    other, _ = await opened(database, key, clock=clock)
    reservation = admit(meter, key, limit=300)
    for _ in range(10):
        await busy.flush()
        await other.flush()
        clock.now += LEASE_S / 3
    assert other.account(key.section).total_spent() == 0
    settle(reservation, 5, 5)
    await busy.close()
    await other.flush()
    assert other.account(key.section).total_spent() == 10
    await other.close()


async def test_paused_gateway_reverses_what_was_charged_for_it(database: str) -> None:
    key, clock = generate("alice", balance_tokens=500), Clock()
    paused, meter = await opened(database, key, clock=clock)
    other, _ = await opened(database, key, clock=clock)
    reservation = admit(meter, key, limit=300)
    await paused.flush()
    for _ in range(4):
        await other.flush()
        clock.now += LEASE_S / 2
    await other.flush()
    assert other.account(key.section).total_spent() == 400
    settle(reservation, 5, 5)
    await paused.close()
    await other.flush()
    assert other.account(key.section).total_spent() == 10
    await other.close()


async def test_request_that_ends_between_two_flushes_leaves_no_reservation(database: str) -> None:
    key = generate("alice", balance_tokens=500)
    ledger, meter = await opened(database, key)
    settle(admit(meter, key), 1, 1)
    await ledger.flush()
    reader = open_store(database)
    assert reader.run(lambda execute: other_claims(execute, "")) == {}
    reader.close_connection()
    await ledger.close()


async def test_clean_shutdown_leaves_no_reservation(database: str) -> None:
    key = generate("alice", balance_tokens=500)
    ledger, meter = await opened(database, key)
    reservation = admit(meter, key)
    await ledger.flush()
    reservation.settle(None, model="m", node="n")
    await ledger.close()
    reader = open_store(database)
    assert reader.run(lambda execute: other_claims(execute, "")) == {}
    reader.close_connection()
