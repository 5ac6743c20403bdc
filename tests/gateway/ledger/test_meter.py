"""What keys may spend, and how requests are charged."""

from __future__ import annotations

import pytest

from cortex.gateway.ledger.keys import Keyring, generate
from cortex.gateway.ledger.ledger import Ledger
from cortex.gateway.ledger.meter import KeyedMeter
from cortex.gateway.ledger.store import open_store
from cortex.gateway.ledger.usage_report import usage
from cortex.wire.errors import InsufficientQuota, InvalidAPIKey, RateLimitExceeded

from .metered_requests import NOW, Clock, admit, bearer, limited, opened, request, settle


async def test_request_reserves_settles_and_is_written(database: str) -> None:
    key = generate("alice", balance_tokens=1000)
    ledger, meter = await opened(database, key)
    reservation = admit(meter, key)
    assert reservation.principal == "alice"
    assert ledger.account(key.section).reserved_tokens == 200
    settle(reservation, 90, 30)
    assert (ledger.account(key.section).reserved_tokens, ledger.account(key.section).total_spent()) == (0, 120)
    await ledger.close()
    store = open_store(database)
    (row,) = usage(store, since=NOW - 60, until=NOW + 60)
    assert (row.name, row.requests, row.total_tokens) == ("alice", 1, 120)
    store.close_connection()


async def test_spend_counts_after_a_restart(database: str) -> None:
    key = generate("alice", balance_tokens=250, window_tokens=10_000)
    ledger, meter = await opened(database, key)
    settle(admit(meter, key), 150, 50)
    await ledger.close()
    ledger, meter = await opened(database, key)
    settle(admit(meter, key), 20, 30)
    with pytest.raises(InsufficientQuota, match="has 0 of 250"):
        admit(meter, key)
    await ledger.close()


async def test_gateways_on_one_database_see_each_others_spend(database: str) -> None:
    key = generate("alice", balance_tokens=400)
    first, meter = await opened(database, key)
    second, other = await opened(database, key)
    settle(admit(meter, key), 100, 100)
    settle(admit(meter, key), 100, 99)
    await first.flush()
    await second.flush()
    with pytest.raises(InsufficientQuota):
        admit(other, key)
    await first.close()
    await second.close()


async def test_key_without_a_limit_keeps_its_total_after_a_flush(database: str) -> None:
    key = generate("alice")
    ledger, meter = await opened(database, key)
    settle(admit(meter, key), 90, 30)
    await ledger.flush()
    assert ledger.account(key.section).total_spent() == 120
    await ledger.close()


@pytest.mark.parametrize("header", [b"authorization", b"x-api-key"])
async def test_accepts_both_ways_to_send_a_key(tmp_path: object, header: bytes) -> None:
    key = generate("alice")
    ledger, meter = await opened(f"{tmp_path}/spend.db", key)
    text = key.text.encode()
    sent = request((header, b"bearer  " + text if header == b"authorization" else text))
    assert meter.authenticate(sent) == "alice"
    await ledger.close()


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer nonsense")],
        [(b"authorization", b"Basic abc")],
        [(b"x-api-key", b"\xff\xfe")],
        [(b"x-api-key", b"")],
    ],
)
async def test_rejects_requests_without_a_valid_key(tmp_path: object, headers: list[tuple[bytes, bytes]]) -> None:
    ledger, meter = await opened(f"{tmp_path}/spend.db", generate("alice"))
    with pytest.raises(InvalidAPIKey):
        meter.key(request(*headers))
    with pytest.raises(InvalidAPIKey):
        meter.admit(None, 1, limited(None))
    with pytest.raises(InvalidAPIKey):
        meter.authenticate(request(*headers))
    await ledger.close()


async def test_rejections_reserve_nothing(tmp_path: object) -> None:
    key = generate("alice", models=("m",), requests_per_min=2, balance_tokens=10_000)
    ledger, meter = await opened(f"{tmp_path}/spend.db", key)
    admit(meter, key, limit=None)
    admit(meter, key)
    with pytest.raises(RateLimitExceeded):
        admit(meter, key)
    assert ledger.account(key.section).reserved_tokens == 5000 + 200
    await ledger.close()


async def test_cancelled_reservation_is_returned_and_not_recorded(tmp_path: object) -> None:
    key = generate("alice", models=("m",), balance_tokens=200)
    ledger, meter = await opened(f"{tmp_path}/spend.db", key)
    reservation = admit(meter, key)
    reservation.cancel()
    assert ledger.account(key.section).reserved_tokens == 0
    await ledger.close()
    store = open_store(f"{tmp_path}/spend.db")
    assert usage(store, since=NOW - 60, until=NOW + 60) == ()
    store.close_connection()


async def test_request_without_a_response_counts_and_uses_no_tokens(tmp_path: object) -> None:
    key = generate("alice", balance_tokens=200)
    ledger, meter = await opened(f"{tmp_path}/spend.db", key)
    for _ in range(3):
        admit(meter, key).settle(None, model="m", node="n")
    await ledger.close()
    store = open_store(f"{tmp_path}/spend.db")
    (row,) = usage(store, since=NOW - 60, until=NOW + 60)
    assert (row.requests, row.total_tokens) == (3, 0)
    store.close_connection()


async def test_keys_change_while_requests_run(tmp_path: object) -> None:
    alice, bob = generate("alice", balance_tokens=300), generate("bob")
    ledger, meter = await opened(f"{tmp_path}/spend.db", alice)
    reservation = admit(meter, alice)
    await ledger.use(Keyring([bob.section]))
    assert meter.authenticate(bearer(bob)) == "bob"
    with pytest.raises(InvalidAPIKey):
        admit(meter, alice)
    settle(reservation, 100, 100)
    await ledger.flush()
    await ledger.use(Keyring([alice.section, bob.section]))
    await ledger.flush()
    assert ledger.account(alice.section).total_spent() == 200
    assert admit(meter, alice).token_limit == 100
    await ledger.close()


async def test_wall_clock_set_back_blocks_no_key(database: str) -> None:
    """Usage dated in the future is kept, and does not fill the window until then."""
    key, clock = generate("alice", window_tokens=1000, window_s=600, requests_per_min=2), Clock()
    monotonic = Clock()
    keyring = Keyring([key.section])
    ledger = Ledger(open_store(database), keyring, flush_s=60, clock=clock, monotonic=monotonic)
    await ledger.start()
    meter = KeyedMeter(ledger)
    clock.now += 365 * 86400
    for _ in range(2):
        settle(admit(meter, key), 200, 200)
    await ledger.flush()
    clock.now -= 365 * 86400
    monotonic.now += 60
    settle(admit(meter, key, limit=900), 450, 450)
    await ledger.flush()
    assert ledger.account(key.section).window_spent(clock.now) == 900
    assert ledger.account(key.section).total_spent() == 1700
    monotonic.now += 60
    settle(admit(meter, key, limit=900), 50, 50)
    monotonic.now += 60
    with pytest.raises(InsufficientQuota, match="has 0 of 1000 tokens left in its window"):
        admit(meter, key, limit=900)
    await ledger.close()


async def test_rate_ignores_steps_of_the_wall_clock(tmp_path: object) -> None:
    key, clock, monotonic = generate("alice", requests_per_min=1), Clock(), Clock()
    store = open_store(f"{tmp_path}/spend.db")
    ledger = Ledger(store, Keyring([key.section]), flush_s=60, clock=clock, monotonic=monotonic)
    await ledger.start()
    meter = KeyedMeter(ledger)
    settle(admit(meter, key), 1, 1)
    clock.now += 3600
    with pytest.raises(RateLimitExceeded):
        admit(meter, key)
    clock.now -= 7200
    monotonic.now += 60
    settle(admit(meter, key), 1, 1)
    await ledger.close()
