from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from cortex.gateway.database import StoreError
from cortex.gateway.ledger.keys import Keyring, NewKey, generate
from cortex.gateway.ledger.ledger import LEASE_S, Ledger
from cortex.gateway.ledger.limits import Spent
from cortex.gateway.ledger.meter import KeyedMeter, Meter, Reservation
from cortex.gateway.ledger.store import Store, open_store
from cortex.gateway.ledger.tables import Claim, Counts, Slot
from cortex.gateway.ledger.usage_report import usage
from cortex.http.request import Request
from cortex.tasks import Supervisor
from cortex.wire.errors import InsufficientQuota, InvalidAPIKey, ModelNotAllowed, RateLimitExceeded
from cortex.wire.events import Usage

NOW = 1_700_000_040.0


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class Limits(NamedTuple):
    completion_limit: int | None
    num_choices: int = 1


def request(*headers: tuple[bytes, bytes]) -> Request:
    return Request(b"POST", b"/v1/chat/completions", b"", headers, b"{}", "127.0.0.1")


def bearer(key: NewKey) -> Request:
    return request((b"authorization", b"Bearer " + key.text.encode()))


def admit(meter: Meter, key: NewKey, *, limit: int | None = 100) -> Reservation:
    return meter.admit(meter.key(bearer(key)), 400, Limits(limit))


def settle(reservation: Reservation, prompt: int, completion: int) -> None:
    used = Usage(prompt_tokens=prompt, completion_tokens=completion)
    reservation.settle(used, model="m", node="n")


async def opened(database: str, *keys: NewKey, clock: Clock | None = None) -> tuple[Ledger, Meter]:
    clock = clock or Clock()
    keyring = Keyring(key.section for key in keys)
    ledger = Ledger(open_store(database), keyring, flush_s=60, clock=clock, monotonic=clock)
    await ledger.start()
    return ledger, KeyedMeter(ledger)


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
    store.close()


async def test_spend_counts_after_a_restart(database: str) -> None:
    key = generate("alice", balance_tokens=250, window_tokens=10_000)
    ledger, meter = await opened(database, key)
    settle(admit(meter, key), 150, 50)
    await ledger.close()
    ledger, meter = await opened(database, key)
    with pytest.raises(InsufficientQuota, match="has 50 of 250"):
        admit(meter, key)
    await ledger.close()


async def test_gateways_on_one_database_see_each_others_spend(database: str) -> None:
    key = generate("alice", balance_tokens=400)
    first, meter = await opened(database, key)
    second, other = await opened(database, key)
    settle(admit(meter, key), 200, 50)
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
        meter.admit(None, 1, Limits(None))
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
    assert ledger.account(key.section).reserved_tokens == 100 + 1024 + 100 + 100
    await ledger.close()


async def test_cancelled_reservation_is_returned_and_not_recorded(tmp_path: object) -> None:
    key = generate("alice", models=("m",), balance_tokens=200)
    ledger, meter = await opened(f"{tmp_path}/spend.db", key)
    reservation = admit(meter, key)
    reservation.check_model("m")
    with pytest.raises(ModelNotAllowed):
        reservation.check_model("other")
    reservation.cancel()
    assert ledger.account(key.section).reserved_tokens == 0
    await ledger.close()
    store = open_store(f"{tmp_path}/spend.db")
    assert usage(store, since=NOW - 60, until=NOW + 60) == ()
    store.close()


async def test_request_without_a_response_counts_and_uses_no_tokens(tmp_path: object) -> None:
    key = generate("alice", balance_tokens=200)
    ledger, meter = await opened(f"{tmp_path}/spend.db", key)
    for _ in range(3):
        admit(meter, key).settle(None, model="m", node="n")
    await ledger.close()
    store = open_store(f"{tmp_path}/spend.db")
    (row,) = usage(store, since=NOW - 60, until=NOW + 60)
    assert (row.requests, row.total_tokens) == (3, 0)
    store.close()


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
    with pytest.raises(InsufficientQuota):
        admit(meter, alice)
    await ledger.close()


class Away:
    """A store whose database can be unavailable."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.is_away = False
        self.failure: Exception = StoreError("gone")
        self.name = "the database"

    def open_accounts(self, since_minute: Mapping[str, int], claim: Claim) -> dict[str, Spent]:
        return self.store.open_accounts(since_minute, claim)

    def exchange(
        self, batch: Mapping[Slot, Counts], since_minute: Mapping[str, int], *, before: Claim, after: Claim
    ) -> dict[str, Spent]:
        if self.is_away:
            raise self.failure
        return self.store.exchange(batch, since_minute, before=before, after=after)

    def other_claims(self, owner: str) -> dict[str, int]:
        return self.store.other_claims(owner)

    def close(self) -> None:
        self.store.close()


async def test_loses_nothing_while_the_database_is_unavailable(database: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    key, clock = generate("alice", balance_tokens=500), Clock()
    store = Away(open_store(database))
    ledger = Ledger(store, Keyring([key.section]), flush_s=60, clock=clock)  # type: ignore[arg-type]
    await ledger.start()
    meter: Meter = KeyedMeter(ledger)
    store.is_away = True
    for _ in range(3):
        settle(admit(meter, key), 50, 50)
        clock.now += 1
        await ledger.flush()
    assert ledger.account(key.section).total_spent() == 300
    with pytest.raises(InsufficientQuota):
        admit(meter, key, limit=200)
    store.is_away = False
    settle(admit(meter, key), 50, 50)
    await ledger.flush()
    assert ledger.account(key.section).total_spent() == 400
    await ledger.close()
    assert [record.levelname for record in caplog.records if "ledger" in record.name] == ["ERROR", "INFO"]
    again = open_store(database)
    assert again.exchange({}, {key.section.id: 0})[key.section.id].total == 400
    again.close()


async def test_unexpected_failure_of_a_flush_is_retried_with_the_same_usage(tmp_path: object) -> None:
    key, restarted = generate("alice"), asyncio.Event()
    store = Away(open_store(f"{tmp_path}/spend.db"))
    store.failure = RuntimeError("not a failure of the database")
    tasks = Supervisor(lambda _: restarted.set())
    ledger = Ledger(store, Keyring([key.section]), flush_s=0.01, tasks=tasks)  # type: ignore[arg-type]
    await ledger.start()
    store.is_away = True
    settle(admit(KeyedMeter(ledger), key), 5, 5)
    await asyncio.wait_for(restarted.wait(), 20)
    settle(admit(KeyedMeter(ledger), key), 5, 5)
    store.is_away = False
    reader = open_store(f"{tmp_path}/spend.db")
    async with asyncio.timeout(20):
        while reader.exchange({}, {key.section.id: 0})[key.section.id].total != 20:
            await asyncio.sleep(0.01)
    reader.close()
    await ledger.close()


async def test_close_writes_the_usage_that_a_failed_flush_kept(tmp_path: object) -> None:
    key, restarted = generate("alice"), asyncio.Event()
    store = Away(open_store(f"{tmp_path}/spend.db"))
    store.failure = RuntimeError("not a failure of the database")
    tasks = Supervisor(lambda _: restarted.set())
    ledger = Ledger(store, Keyring([key.section]), flush_s=0.01, tasks=tasks)  # type: ignore[arg-type]
    await ledger.start()
    store.is_away = True
    settle(admit(KeyedMeter(ledger), key), 5, 5)
    await asyncio.wait_for(restarted.wait(), 20)
    store.is_away = False
    await ledger.close()
    reader = open_store(f"{tmp_path}/spend.db")
    assert reader.exchange({}, {key.section.id: 0})[key.section.id].total == 10
    reader.close()


async def test_writes_spend_regularly(tmp_path: object) -> None:
    key = generate("alice")
    store = open_store(f"{tmp_path}/spend.db")
    ledger = Ledger(store, Keyring([key.section]), flush_s=0.01)
    await ledger.start()
    settle(admit(KeyedMeter(ledger), key), 5, 5)
    reader = open_store(f"{tmp_path}/spend.db")
    for _ in range(300):
        if reader.exchange({}, {key.section.id: 0})[key.section.id].total == 10:
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("nothing was written within 3 s")
    reader.close()
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
    assert store.exchange({}, {key.section.id: 0})[key.section.id].total == 1000
    store.close()


async def crash(ledger: Ledger) -> None:
    """Write as the last regular flush before the gateway is killed."""
    await ledger.flush()


async def test_reservations_of_a_killed_gateway_stay_charged(database: str) -> None:
    key = generate("alice", balance_tokens=500)
    dead, meter = await opened(database, key)
    admit(meter, key, limit=300)
    await crash(dead)
    ledger, meter = await opened(database, key)
    with pytest.raises(InsufficientQuota, match="has 100 of 500"):
        admit(meter, key, limit=1)
    await ledger.close()


async def test_usage_settled_before_a_crash_is_charged_as_used(database: str) -> None:
    key = generate("alice", balance_tokens=500)
    dead, meter = await opened(database, key)
    reservation = admit(meter, key, limit=300)
    await dead.flush()
    settle(reservation, 10, 10)
    await crash(dead)
    ledger, meter = await opened(database, key)
    admit(meter, key, limit=380)
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
    with pytest.raises(InsufficientQuota, match="has 100 of 500"):
        admit(meter, key, limit=1)
    await ledger.close()
    store = open_store(database)
    (row,) = usage(store, since=NOW - 60, until=NOW + 60)
    assert (row.name, row.requests, row.total_tokens) == ("alice", 1, 400)
    store.close()


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
    assert reader.other_claims("") == {}
    reader.close()
    await ledger.close()


async def test_clean_shutdown_leaves_no_reservation(database: str) -> None:
    key = generate("alice", balance_tokens=500)
    ledger, meter = await opened(database, key)
    reservation = admit(meter, key)
    await ledger.flush()
    reservation.settle(None, model="m", node="n")
    await ledger.close()
    reader = open_store(database)
    assert reader.other_claims("") == {}
    reader.close()


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
    with pytest.raises(RateLimitExceeded, match="tokens left in its window"):
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
