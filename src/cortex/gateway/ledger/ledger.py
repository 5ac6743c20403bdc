"""The accounts of all keys in memory, and writing them to the database.

Requests settle into a batch in memory. Every `flush_s` a single thread writes the batch and the reservations of running
requests, and reads what other gateways on the same database have spent and reserved. While the database is unavailable,
limits are enforced by what this gateway knows, and no usage is lost: the batch has one row per minute, key, model and
node, not one per request. Gateways that share a database see each other's usage with every flush, so together they may
exceed a budget by what they admit within `flush_s`. Each gateway counts requests per minute by itself.

A stored reservation counts against its key's budgets in every gateway, also when its owner has crashed: only what was
admitted within the last `flush_s` is not charged after a crash. A gateway renews its reservations while it runs. When
another gateway has seen no renewal for `LEASE_S`, it records them as spent. A gateway that was only paused finds its
reservations gone and reverses that usage.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from cortex.gateway.database import Database, StoreError
from cortex.gateway.ledger.groups import Budget, Counters
from cortex.gateway.ledger.keys import Keyring, KeySection
from cortex.gateway.ledger.limits import MINUTE_S, Account, Spent
from cortex.gateway.ledger.store import (
    MAX_RESERVED_TOKENS,
    SCHEMA,
    Claim,
    Counts,
    GroupBy,
    Reserved,
    Slot,
    Spend,
    exchange,
    open_accounts,
    other_claims,
    read_counters,
    read_usage,
    settle_dead,
)
from cortex.gateway.ledger.users import is_user
from cortex.system import private_file
from cortex.system.tasks import SupervisedTask, Supervisor

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""Another gateway that has not renewed for this long counts as dead."""
RENEW_S = LEASE_S / 4

UNWRITTEN_FILE = "usage-unwritten.json"


class _Unwritten(msgspec.Struct, frozen=True):
    claim: Claim
    """The stored reservations. They end when the usage is written."""
    usage: list[tuple[Slot, Counts]]


class UnwrittenUsage:
    """Usage that a gateway could not write before it ended, in a file of its state directory until the next start.
    Calls block."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / UNWRITTEN_FILE

    def save(self, usage: Mapping[Slot, Counts], claim: Claim) -> None:
        """Keep `usage`. Raises OSError."""
        private_file.write(self._path, msgspec.json.encode(_Unwritten(claim, list(usage.items()))))
        log.warning(
            "usage that could not be written to the database is in %s and is written at the next start", self._path
        )

    def recover(self, database: Database) -> None:
        """Write the kept usage, if any. On `StoreError` it stays kept."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Unwritten)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as problem:
            log.error("usage of the last run is not counted: %s cannot be read: %s", self._path, problem)
            return
        batch, after = dict(kept.usage), Claim(owner=kept.claim.owner)
        database.run(lambda execute: exchange(execute, batch, {}, before=kept.claim, after=after))
        self._path.unlink()
        log.info("usage of the last run is written: %d rows", len(kept.usage))


class Ledger:
    """The accounts of all keys. Owned by the event loop; what it reads and writes runs on the database's thread.

    Call `start` before the first request and `close` at the end, which writes the remaining usage.
    """

    def __init__(
        self,
        database: Database,
        keyring: Keyring,
        budgets: Mapping[str, tuple[Budget, ...]] | None = None,
        *,
        flush_s: float = 1.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        tasks: Supervisor | None = None,
        unwritten: UnwrittenUsage | None = None,
    ) -> None:
        """`budgets`: by key id, those beyond the key's own. `clock` dates usage; `monotonic` measures durations,
        independent of changes to the wall clock.

        `tasks` runs the regular flush; without it the ledger has its own supervisor. `unwritten` keeps usage that
        cannot be written at the end.
        """
        self._unwritten = unwritten
        self._database = database.use(SCHEMA)
        self._flush_s = flush_s
        self.clock = clock
        self.monotonic = monotonic
        self._accounts: dict[str, Account] = {}
        self._batch: dict[Slot, Counts] = {}
        self._claim = Claim(owner=secrets.token_hex(16))
        """The reservations of this gateway, as they are stored."""
        self._others: dict[str, tuple[int, float]] = {}
        """Other gateways with reservations: their last renewal, and when this gateway first saw it."""
        self._checked_at = -math.inf
        self._tasks = tasks or Supervisor()
        self._task: SupervisedTask | None = None
        self._writing = asyncio.Lock()  # two writes at once would replace the same claim twice
        self._closing = asyncio.Event()
        self._keyring = keyring
        self._budgets: Mapping[str, tuple[Budget, ...]] = {} if budgets is None else budgets

    async def start(self) -> None:
        """Read past usage and start the regular flush. Raises `StoreError` when the database cannot be read."""
        if self._unwritten is not None:
            await self._database.call(partial(self._unwritten.recover, self._database))
        await self.use(self._keyring, self._budgets)
        self._task = self._tasks.start("ledger flush", self._flush_regularly)

    async def use(self, keyring: Keyring, budgets: Mapping[str, tuple[Budget, ...]] | None = None) -> None:
        """Replace the keys and budgets. Accounts that stay keep their reservations. Raises `StoreError`."""
        now, monotonic_now = self.clock(), self.monotonic()
        budgets = budgets or {}
        extra = {budget.section.id: budget for each in budgets.values() for budget in each}
        sections = (*keyring, *(budget.section for budget in extra.values()))
        fresh = [key for key in sections if key.id not in self._accounts]
        claim, windows = self._claim, _windows(fresh, now)
        spent: Mapping[str, Spent] = {}
        if fresh or not self._accounts:  # a key is revoked even while the database is down
            spent = await self._database.do(lambda execute: open_accounts(execute, windows, claim))
        for key in sections:
            if key.id in self._accounts:
                self._accounts[key.id].change(key, monotonic_now)
            else:
                budget = extra.get(key.id)
                kind = (None, False) if budget is None else (budget.label, budget.is_cost)
                self._accounts[key.id] = Account(key, spent[key.id], monotonic_now, kind[0], is_cost=kind[1])
        self._keyring, self._budgets = keyring, budgets

    async def close(self) -> None:
        """Stop the regular flush and write the remaining usage: to the database, else to the file for the next start.

        Raises `StoreError` when neither can be done."""
        self._closing.set()
        if self._task is not None:
            await self._task.finish()
        try:
            async with self._writing:
                await self._write()
        except StoreError:
            if self._unwritten is None:
                raise
            try:
                self._unwritten.save(self._batch, self._claim)
            except OSError as problem:
                raise StoreError(f"usage is lost, because it cannot be kept in a file either: {problem}") from problem

    @property
    def keyring(self) -> Keyring:
        return self._keyring

    @property
    def accounts(self) -> tuple[Account, ...]:
        """The accounts of the keys in force."""
        return tuple(self._accounts[key.id] for key in self._keyring)

    async def usage(self, group: GroupBy, *, since: float, until: float, key_id: str | None = None) -> list[Spend]:
        """The recorded usage, with that of requests that have just ended. Raises `StoreError`."""
        await self.flush()
        return await self._database.report(
            lambda execute: read_usage(execute, group, since=since, until=until, key_id=key_id)
        )

    async def counters(self) -> dict[str, Counters]:
        """What every key and other budget, limited or not, has spent at all gateways, by id. Raises `StoreError`."""
        await self.flush()
        windows = _windows((account.key for account in self._accounts.values()), self.clock())
        return await self._database.report(lambda execute: read_counters(execute, windows))

    def known_counters(self) -> dict[str, Counters]:
        """`counters` from what this gateway knows, without the database."""
        now = self.clock()
        return {id: Counters(each.window_spent(now), each.total_spent()) for id, each in self._accounts.items()}

    def account(self, key: KeySection) -> Account:
        """The account of a key, or of a user who signed in without one, whose own tokens are not limited."""
        if (account := self._accounts.get(key.id)) is None:
            account = self._accounts[key.id] = Account(key, Spent(), self.monotonic())
        elif account.key != key and is_user(key):  # `use` knows only keys; the rights of users come with their requests
            account.change(key, self.monotonic())
        return account

    def budgets(self, key: KeySection) -> tuple[tuple[Budget, Account], ...]:
        """The budgets that requests of the key are charged to beyond its own, and their accounts."""
        return tuple((budget, self._accounts[budget.section.id]) for budget in self._budgets_of(key))

    def _budgets_of(self, key: KeySection) -> tuple[Budget, ...]:
        own = self._budgets.get(key.id)
        return own if own is not None else self._budgets.get(f"group:{key.group}", ())

    def settle(self, account: Account, reserved: int, slot: Slot, counts: Counts) -> None:
        """Record in `slot` what a request with this reservation has used."""
        account.settle(reserved, counts.tokens, slot.minute * MINUTE_S)
        earlier = self._batch.get(slot)
        self._batch[slot] = counts if earlier is None else earlier + counts

    async def flush(self) -> None:
        """Write now, after any flush under way. After a failure, the batch is kept for the next flush."""
        async with self._writing:
            await self._flush()

    async def _flush(self) -> None:
        try:
            await self._write()
            await self._settle_dead_gateways()
        except StoreError:
            self._others.clear()  # nobody could renew while the database was unavailable

    async def _flush_regularly(self) -> None:
        while not self._closing.is_set():
            try:
                async with asyncio.timeout(self._flush_s):  # unlike `wait_for`, never swallows a cancellation
                    await self._closing.wait()
            except TimeoutError:
                await self.flush()

    async def _write(self) -> None:
        now = self.clock()
        before, after = self._claim, self._renewed_claim(now)
        extra = {budget.section.id: budget.section for each in self._budgets.values() for budget in each}
        limited = [
            key
            for key in (*self._keyring, *extra.values())
            if key.window_tokens is not None or key.balance_tokens is not None
        ]
        if not self._batch and not limited and after is before and not self._database.is_failing:
            return  # while it fails, an empty batch finds out whether the database is back
        batch, self._batch = self._batch, {}
        windows = _windows(limited, now)
        try:
            spent = await self._database.do(
                lambda execute: exchange(execute, batch, windows, before=before, after=after)
            )
        except Exception:  # nothing was committed, and no usage may be lost
            for slot, counts in batch.items():
                self._batch[slot] = self._batch[slot] + counts if slot in self._batch else counts
            raise
        self._claim = after
        written: dict[str, dict[int, int]] = {}
        for slot, counts in batch.items():
            minutes = written.setdefault(slot.key_id, {})
            minutes[slot.minute] = minutes.get(slot.minute, 0) + counts.tokens
        for key_id in written.keys() | spent.keys():
            self._accounts[key_id].synchronise(spent.get(key_id), written.get(key_id, {}))

    def _renewed_claim(self, now: float) -> Claim:
        """The current reservations; the stored claim itself when it is unchanged and recent."""
        by_key = {
            key_id: Reserved(
                account.key.name, account.num_reservations, min(account.reserved_tokens, MAX_RESERVED_TOKENS)
            )
            for key_id, account in self._accounts.items()
            if account.num_reservations
        }
        before = self._claim
        is_fresh = not by_key or 0 <= now - before.renewed_ms / 1000 < RENEW_S
        if by_key == before.by_key and is_fresh:
            return before
        return Claim(owner=before.owner, renewed_ms=int(now * 1000), by_key=by_key)

    async def _settle_dead_gateways(self) -> None:
        """Record the reservations of gateways that no longer renew them as spent.

        Only this gateway's clock is used, so clocks need not agree.
        """
        now = self.monotonic()
        if now - self._checked_at < RENEW_S:
            return
        self._checked_at = now
        claims = await self._database.do(lambda execute: other_claims(execute, self._claim.owner))
        self._others = {
            owner: seen if (seen := self._others.get(owner)) and seen[0] == renewed_ms else (renewed_ms, now)
            for owner, renewed_ms in claims.items()
        }
        for owner, (renewed_ms, since) in list(self._others.items()):
            if now - since >= LEASE_S:
                tokens = await self._database.do(partial(settle_dead, owner=owner, renewed_ms=renewed_ms))
                log.warning("reservations of a dead gateway recorded as spent: %d tokens", tokens)


def _windows(keys: Iterable[KeySection], now: float) -> dict[str, int]:
    """The first minute of each key's window."""
    return {key.id: int((now - key.window_s) // MINUTE_S) for key in keys}
