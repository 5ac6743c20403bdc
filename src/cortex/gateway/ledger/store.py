"""The usage records in the database.

`spend` has the usage by minute, key, model and node, `total` its sum by key. `reservation` has what running requests
may still use, by gateway and key. Budgets beyond those of keys (`groups.py`) have rows of the same kind, under ids with
a colon, which no key has; reports leave them out. Several gateways may share the database: writes add to the rows that
are there, and each gateway writes only its own reservations. Functions run inside the transaction of their caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from cortex.gateway.database import Database, Execute, Schema, check_location
from cortex.gateway.ledger.groups import Counters
from cortex.gateway.ledger.limits import MINUTE_S, Spent
from cortex.settings import Section
from cortex.wire.events import Usage
from cortex.wire.response import summed

GroupBy = Literal["key", "group", "model", "node", "day", "key-model"]
"""Groupings of usage; `key-model` is every model of every key."""

UNSETTLED = "(unsettled)"
"""Model and node of reservations that were recorded as spent because their gateway died."""
MAX_RESERVED_TOKENS = 2**53
"""The largest reservation that is stored, so that a 64-bit sum of them cannot overflow."""

SCHEMA: Schema = (
    """CREATE TABLE IF NOT EXISTS spend (
        minute BIGINT NOT NULL,
        key_id TEXT NOT NULL,
        key_name TEXT NOT NULL,
        model TEXT NOT NULL,
        node TEXT NOT NULL,
        requests BIGINT NOT NULL,
        prompt_tokens BIGINT NOT NULL,
        cached_tokens BIGINT NOT NULL,
        completion_tokens BIGINT NOT NULL,
        reasoning_tokens BIGINT NOT NULL,
        key_group TEXT NOT NULL,
        energy_mj BIGINT NOT NULL,
        saved_nano BIGINT NOT NULL,
        PRIMARY KEY (key_id, minute, model, node)
    )""",
    "CREATE INDEX IF NOT EXISTS spend_minute ON spend (minute)",
    """CREATE TABLE IF NOT EXISTS total (
        key_id TEXT PRIMARY KEY,
        tokens BIGINT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS reservation (
        owner TEXT NOT NULL,
        key_id TEXT NOT NULL,
        key_name TEXT NOT NULL,
        requests BIGINT NOT NULL,
        tokens BIGINT NOT NULL,
        renewed_ms BIGINT NOT NULL,
        PRIMARY KEY (owner, key_id)
    )""",
)
_ADD_SPEND = """
    INSERT INTO spend (minute, key_id, key_name, key_group, model, node,
                       requests, prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens, energy_mj,
                       saved_nano)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
    ON CONFLICT (key_id, minute, model, node) DO UPDATE SET
        key_name = excluded.key_name,
        key_group = excluded.key_group,
        requests = spend.requests + excluded.requests,
        prompt_tokens = spend.prompt_tokens + excluded.prompt_tokens,
        cached_tokens = spend.cached_tokens + excluded.cached_tokens,
        completion_tokens = spend.completion_tokens + excluded.completion_tokens,
        reasoning_tokens = spend.reasoning_tokens + excluded.reasoning_tokens,
        energy_mj = spend.energy_mj + excluded.energy_mj,
        saved_nano = spend.saved_nano + excluded.saved_nano
"""
_ADD_TOTAL = """
    INSERT INTO total (key_id, tokens) VALUES ($1, $2)
    ON CONFLICT (key_id) DO UPDATE SET tokens = total.tokens + excluded.tokens
"""
_ANY_KEY = "SELECT 1 FROM total LIMIT 1"
_BY_MINUTE = """
    SELECT minute, SUM(prompt_tokens + completion_tokens) FROM spend
    WHERE key_id = $1 AND minute >= $2 GROUP BY minute
"""
_TOTAL = "SELECT tokens FROM total WHERE key_id = $1"
_ALL_SINCE = "SELECT key_id, SUM(prompt_tokens + completion_tokens) FROM spend WHERE minute >= $1 GROUP BY key_id"
_GROUPS: dict[GroupBy, str] = {
    "key": "key_id, MAX(key_name)",
    "key-model": "key_id, MAX(key_name)",
    "group": "key_group, key_group",
    "model": "model, model",
    "node": "node, node",
    "day": "minute / 1440, minute / 1440",
}
_USAGE = """
    SELECT {group}, model, SUM(requests), SUM(prompt_tokens), SUM(cached_tokens),
           SUM(completion_tokens), SUM(reasoning_tokens), SUM(energy_mj), SUM(saved_nano)
    FROM spend WHERE minute >= $1 AND minute < $2{of_key}
        AND substr(key_id, 1, 6) <> 'group:' AND substr(key_id, 1, 5) <> 'cost:'
    GROUP BY 1, 3 ORDER BY 1, 3
"""
_ADD_RESERVATION = """
    INSERT INTO reservation (owner, key_id, key_name, requests, tokens, renewed_ms) VALUES ($1, $2, $3, $4, $5, $6)
"""
_DROP_RESERVATIONS = "DELETE FROM reservation WHERE owner = $1 RETURNING key_id"
_TAKE_RESERVATIONS = """
    DELETE FROM reservation WHERE owner = $1 AND renewed_ms = $2 RETURNING key_id, key_name, requests, tokens
"""
_RESERVED_ELSEWHERE = "SELECT key_id, SUM(tokens) FROM reservation WHERE owner <> $1 GROUP BY key_id"
_OWNERS = "SELECT owner, MAX(renewed_ms) FROM reservation WHERE owner <> $1 GROUP BY owner"


class LedgerSection(Section, frozen=True):
    """Where keys and usage are kept."""

    database: str = "cortex-spend.db"
    """A SQLite file in `gateway.state`, or `postgresql://user@host/name` for gateways with shared keys and usage."""
    flush_s: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """How often usage and reservations are written. A gateway that is killed loses at most what it admitted or finished
    within this time; requests that had been running for longer stay charged."""

    audit_days: Annotated[int, msgspec.Meta(ge=0)] = 365
    """How long the audit log is kept: every change of models, nodes, keys and records, and every sign-in, with the key.
    0: nothing is recorded."""

    def __post_init__(self) -> None:
        check_location(self.database)


class Slot(msgspec.Struct, frozen=True, order=True):
    """The key of one row of `spend`."""

    key_id: str
    minute: int
    model: str
    node: str
    key_name: str
    key_group: str = ""

    @classmethod
    def at(cls, now: float, *, key_id: str, key_name: str, model: str, node: str, key_group: str = "") -> Slot:
        return cls(key_id, int(now // MINUTE_S), model, node, key_name, key_group)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and tokens."""

    requests: int = 0
    usage: Usage = Usage()
    saved_nano: int = 0
    """Discount of batches, in billionths."""

    @property
    def tokens(self) -> int:
        """What counts against budgets: prompt and completion."""
        return self.usage.prompt_tokens + self.usage.completion_tokens

    def __add__(self, other: Counts) -> Counts:
        saved_nano = self.saved_nano + other.saved_nano
        usage = summed((self.usage, other.usage))
        return Counts(requests=self.requests + other.requests, usage=usage, saved_nano=saved_nano)


class Spend(NamedTuple):
    """One group's usage of one model."""

    group_id: str
    group_name: str
    model: str
    counts: Counts


class Reserved(msgspec.Struct, frozen=True):
    """What the running requests of one key have reserved."""

    key_name: str
    requests: int
    tokens: int


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """All reservations of one gateway at one moment."""

    owner: str
    """The random id of the gateway process."""
    renewed_ms: int = 0
    """When it was last renewed, in milliseconds since 1970."""
    by_key: Mapping[str, Reserved] = {}

    def counts(self, sign: int = 1) -> dict[Slot, Counts]:
        """The claim as spend; with `sign` -1, the counts that reverse that spend."""
        return {
            Slot.at(
                self.renewed_ms / 1000, key_id=key_id, key_name=held.key_name, model=UNSETTLED, node=UNSETTLED
            ): Counts(requests=sign * held.requests, usage=Usage(completion_tokens=sign * held.tokens))
            for key_id, held in self.by_key.items()
        }


NO_CLAIM = Claim(owner="")
"""The claim of a process that reserves nothing."""


def open_store(location: str) -> Database:
    """The database at a file path or `postgresql://` URL, created if it does not exist. Raises `StoreError`."""
    database = Database(location).use(SCHEMA)
    database.run(lambda _: None)
    return database


def exchange(
    execute: Execute,
    batch: Mapping[Slot, Counts],
    since_minute: Mapping[str, int],
    *,
    before: Claim = NO_CLAIM,
    after: Claim = NO_CLAIM,
) -> dict[str, Spent]:
    """Add `batch`, replace the reservations `before` by `after`, and read what keys have spent.

    `since_minute` has the keys to read and the first minute of each; totals are of all time.
    """
    # Reservations first, as in `settle_dead`, so that locks are always taken in the same order.
    returned = replace_claim(execute, before, after) if before is not after else {}
    add_spend(execute, {**batch, **returned})
    return read_spent(execute, after.owner, since_minute)


def open_accounts(execute: Execute, since_minute: Mapping[str, int], claim: Claim) -> dict[str, Spent]:
    """Record that the keys of `since_minute` exist, and read what they have spent, as `exchange` does."""
    for key_id in sorted(since_minute):
        execute(_ADD_TOTAL, (key_id, 0))
    return read_spent(execute, claim.owner, since_minute)


def settle_dead(execute: Execute, owner: str, renewed_ms: int) -> int:
    """Record the reservations of a dead gateway as spent; returns their tokens. Does nothing if they have been renewed
    since `renewed_ms`."""
    rows = execute(_TAKE_RESERVATIONS, (owner, renewed_ms))
    by_key = {str(key): Reserved(str(name), int(requests), int(tokens)) for key, name, requests, tokens in rows}
    spend = Claim(owner=owner, renewed_ms=renewed_ms, by_key=by_key).counts()
    add_spend(execute, spend)
    return sum(counts.tokens for counts in spend.values())


def add_spend(execute: Execute, batch: Mapping[Slot, Counts]) -> None:
    """Add `batch` to `spend` and `total`."""
    # Sorted, so that processes that write the same rows lock them in the same order.
    for slot, counts in sorted(batch.items(), key=lambda entry: entry[0]):
        execute(_ADD_SPEND, _row(slot, counts))
    totals: dict[str, int] = {}
    for slot, counts in batch.items():
        totals[slot.key_id] = totals.get(slot.key_id, 0) + counts.tokens
    for row in sorted(totals.items()):
        execute(_ADD_TOTAL, row)


def has_keys(execute: Execute) -> bool:
    """Whether any key was recorded."""
    return bool(execute(_ANY_KEY, ()))


def replace_claim(execute: Execute, before: Claim, after: Claim) -> dict[Slot, Counts]:
    """Replace `before`, which this gateway wrote last, by `after`.

    Returns what reverses the spend that another gateway recorded for `before`, if it took this gateway for dead;
    otherwise nothing.
    """
    found = execute(_DROP_RESERVATIONS, (before.owner,))
    for key_id, held in sorted(after.by_key.items()):
        row = (after.owner, key_id, held.key_name, held.requests, held.tokens, after.renewed_ms)
        execute(_ADD_RESERVATION, row)
    return before.counts(-1) if before.by_key and not found else {}


def other_claims(execute: Execute, owner: str) -> dict[str, int]:
    """The other gateways with reservations, and when each last renewed them."""
    return {str(other): int(renewed_ms) for other, renewed_ms in execute(_OWNERS, (owner,))}


def read_spent(execute: Execute, owner: str, since_minute: Mapping[str, int]) -> dict[str, Spent]:
    """What each key has spent, and what gateways other than `owner` have reserved for it."""
    if not since_minute:
        return {}
    elsewhere = {str(key_id): int(tokens) for key_id, tokens in execute(_RESERVED_ELSEWHERE, (owner,))}
    spent: dict[str, Spent] = {}
    for key_id, first in since_minute.items():
        by_minute = {int(minute): int(tokens) for minute, tokens in execute(_BY_MINUTE, (key_id, first))}
        total = execute(_TOTAL, (key_id,))
        spent[key_id] = Spent(
            by_minute=by_minute,
            total=int(total[0][0]) if total else 0,
            reserved_elsewhere=elsewhere.get(key_id, 0),
        )
    return spent


def read_counters(execute: Execute, since_minute: Mapping[str, int]) -> dict[str, Counters]:
    """What every key of `since_minute` has spent since then and in all, whether it has a limit or not."""
    totals = {str(key_id): int(tokens) for key_id, tokens in execute("SELECT key_id, tokens FROM total", ())}
    recent = {
        first: {str(key_id): int(tokens) for key_id, tokens in execute(_ALL_SINCE, (first,))}
        for first in sorted(set(since_minute.values()))
    }
    return {
        key_id: Counters(recent[first].get(key_id, 0), totals.get(key_id, 0)) for key_id, first in since_minute.items()
    }


def read_usage(
    execute: Execute, group: GroupBy, *, since: float, until: float, key_id: str | None = None
) -> list[Spend]:
    """The spend in [since, until), to the minute, of every key, model, node or day (as days since 1970), by model; of
    one key or of all."""
    bounds = (int(since // MINUTE_S), -int(-until // MINUTE_S))
    statement = _USAGE.format(group=_GROUPS[group], of_key="" if key_id is None else " AND key_id = $3")
    rows: Iterable[Sequence[Any]] = execute(statement, bounds if key_id is None else (*bounds, key_id))
    return [Spend(str(row[0]), str(row[1]), str(row[2]), _counts(row[3:])) for row in rows]


def _row(slot: Slot, counts: Counts) -> tuple[str | int, ...]:
    usage = counts.usage
    used = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens, usage.energy_mj)
    names = (slot.minute, slot.key_id, slot.key_name, slot.key_group, slot.model, slot.node)
    return (*names, counts.requests, *used, counts.saved_nano)


def _counts(row: Sequence[Any]) -> Counts:
    requests, prompt, cached, completion, reasoning, energy_mj, saved_nano = map(int, row)
    usage = Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        reasoning_tokens=reasoning,
        energy_mj=energy_mj,
    )
    return Counts(requests=requests, usage=usage, saved_nano=saved_nano)
