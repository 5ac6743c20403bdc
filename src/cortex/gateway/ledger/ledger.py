"""The accounts in memory, and their way to disk.

The loop settles into a batch; every `flush_s` a single thread writes the batch and what running requests still hold,
and reads back what other gateways on the same database have spent and reserved. While the database is away, limits hold
by what is known here, and nothing is lost: the batch grows by rows of minutes, not of requests. Gateways that share a
database learn of each other with every flush, so together they may pass a budget by what they admit within `flush_s`;
requests per minute are counted by each process alone.

A stored reservation counts against its key's budgets in every gateway, whether the one that owns it lives or not: a
crash forgives nothing that ran for longer than `flush_s`. A gateway renews its reservations while it lives. One whose
reservations nobody has renewed for `LEASE_S`, as another gateway sees it, is dead: they are recorded as spent. Should
it live after all, it finds them gone and takes that spend back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from cortex.gateway.ledger.keys import Keyring, KeySection
from cortex.gateway.ledger.limits import MINUTE_S, Account, Spent
from cortex.gateway.ledger.store import Store, StoreError
from cortex.gateway.ledger.tables import MAX_RESERVED_TOKENS, Claim, Counts, Reserved, Slot
from cortex.wire.events import Usage

log = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_S = 60.0
"""Without a renewal for this long, the reservations of another gateway are those of a dead one."""
RENEW_S = LEASE_S / 4

_EMPTY = Usage()


class Ledger:
    """Accounts of every key. Owned by the event loop; the store is touched only by the book's own thread.

    `await start()` before the first request and `await close()` at the end, which writes what is left.
    """

    def __init__(
        self, store: Store, keyring: Keyring, *, flush_s: float = 1.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._flush_s = flush_s
        self.clock = clock
        self._accounts: dict[str, Account] = {}
        self._batch: dict[Slot, Counts] = {}
        self._claim = Claim(owner=secrets.token_hex(16))
        """The reservations of this gateway as the store has them."""
        self._others: dict[str, tuple[int, float]] = {}
        """Other gateways with reservations: the renewal that was seen last, and since when."""
        self._looked_at = 0.0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._keyring = keyring
        self._failing = False

    async def start(self) -> None:
        """Read what was spent before, and begin to write. Raises `StoreError` when the ledger cannot be read."""
        await self.use(self._keyring)
        self._task = asyncio.create_task(self._flush_regularly(), name="ledger-flush")

    async def use(self, keyring: Keyring) -> None:
        """Change to other keys. Accounts of keys that stay keep their reservations. Raises `StoreError`."""
        now = self.clock()
        fresh = [key for key in keyring if key.id not in self._accounts]
        claim, windows = self._claim, _windows(fresh, now)
        spent = await self._in_thread(lambda: self._store.exchange({}, windows, before=claim, after=claim))
        for key in keyring:
            if key.id in self._accounts:
                self._accounts[key.id].change(key, now)
            else:
                self._accounts[key.id] = Account(key, spent[key.id], now)
        self._keyring = keyring

    async def close(self) -> None:
        """Stop writing regularly and write what is left. Raises `StoreError` when that fails."""
        self._closing.set()
        if self._task is not None:
            await self._task
        try:
            await self._write()
        finally:
            await self._in_thread(self._store.close)
            self._thread.shutdown()

    @property
    def keyring(self) -> Keyring:
        return self._keyring

    def account(self, key: KeySection) -> Account:
        return self._accounts[key.id]

    def settle(self, account: Account, reserved: int, usage: Usage | None, *, model: str, node: str) -> None:
        """Record one request: what it used, or nothing when it ended without a response."""
        now = self.clock()
        counts = Counts(requests=1, usage=usage or _EMPTY)
        account.settle(reserved, counts.tokens, now)
        slot = Slot.at(now, key_id=account.key.id, key_name=account.key.name, model=model, node=node)
        earlier = self._batch.get(slot)
        self._batch[slot] = counts if earlier is None else earlier + counts

    async def flush(self) -> None:
        """Write now. A failure is logged once, and the batch is kept for the next time."""
        try:
            await self._write()
            await self._settle_dead_gateways()
        except StoreError as error:
            self._others.clear()  # nobody could renew while the database was away
            if not self._failing:
                log.error("spend is kept in memory until the database is back: %s", error)
            self._failing = True
        else:
            if self._failing:
                log.info("spend is written again to %s", self._store.name)
            self._failing = False

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
        limited = [key for key in self._keyring if key.window_tokens is not None or key.balance_tokens is not None]
        if not self._batch and not limited and after is before:
            return
        batch, self._batch = self._batch, {}
        windows = _windows(limited, now)
        try:
            spent = await self._in_thread(lambda: self._store.exchange(batch, windows, before=before, after=after))
        except StoreError:
            for slot, counts in batch.items():
                self._batch[slot] = self._batch[slot] + counts if slot in self._batch else counts
            raise
        self._claim = after
        written: dict[str, dict[int, int]] = {}
        for slot, counts in batch.items():
            minutes = written.setdefault(slot.key_id, {})
            minutes[slot.minute] = minutes.get(slot.minute, 0) + counts.tokens
        for key_id in written.keys() | spent.keys():
            self._accounts[key_id].book(spent.get(key_id, Spent()), written.get(key_id, {}))

    def _renewed_claim(self, now: float) -> Claim:
        """What requests hold now; the claim that the store has where that is still good."""
        by_key = {
            key_id: Reserved(
                account.key.name, account.num_reservations, min(account.reserved_tokens, MAX_RESERVED_TOKENS)
            )
            for key_id, account in self._accounts.items()
            if account.num_reservations
        }
        before = self._claim
        is_fresh = not by_key or now - before.renewed_ms / 1000 < RENEW_S
        if by_key == before.by_key and is_fresh:
            return before
        return Claim(owner=before.owner, renewed_ms=int(now * 1000), by_key=by_key)

    async def _settle_dead_gateways(self) -> None:
        """Record as spent what gateways had reserved that no longer renew it.

        Judged by how long this gateway has seen no change, so that clocks need not agree.
        """
        now = self.clock()
        if now - self._looked_at < RENEW_S:
            return
        self._looked_at = now
        claims = await self._in_thread(lambda: self._store.other_claims(self._claim.owner))
        self._others = {
            owner: seen if (seen := self._others.get(owner)) and seen[0] == renewed_ms else (renewed_ms, now)
            for owner, renewed_ms in claims.items()
        }
        for owner, (renewed_ms, since) in list(self._others.items()):
            if now - since >= LEASE_S:
                tokens = await self._in_thread(partial(self._store.settle_dead, owner, renewed_ms))
                log.warning("a gateway ended without settling its requests; %d reserved tokens count as spent", tokens)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _windows(keys: Iterable[KeySection], now: float) -> dict[str, int]:
    """From which minute on each key's spend is in its window."""
    return {key.id: int((now - key.window_s) // MINUTE_S) for key in keys}
