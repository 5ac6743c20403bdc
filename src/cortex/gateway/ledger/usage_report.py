"""Usage by key, model, node or day, for `cortex usage` and for billing."""

from __future__ import annotations

import datetime

import msgspec

from cortex.gateway.ledger.store import Store
from cortex.gateway.ledger.tables import GroupBy

HEADER = ("requests", "prompt", "cached", "completion", "reasoning", "total")


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """The spend of one key, model, node or day."""

    id: str
    """The key's id, the model's or node's name, or the day as `2026-01-31`."""
    name: str
    """The key's name; otherwise as `id`."""
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Part of the prompt tokens."""
    completion_tokens: int
    reasoning_tokens: int
    """Part of the completion tokens."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def cells(self) -> tuple[str, ...]:
        """The numbers for a table, under `HEADER`."""
        numbers = (
            self.requests,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            self.reasoning_tokens,
            self.total_tokens,
        )
        return tuple(f"{number:,}" for number in numbers)


def usage(store: Store, *, group: GroupBy = "key", since: float, until: float) -> tuple[UsageRow, ...]:
    """Spend in [since, until) in seconds since 1970, to the minute; days oldest first, others most tokens first."""
    rows = []
    for row_id, name, counts in store.usage(group, since=since, until=until):
        label = _date(int(row_id)) if group == "day" else row_id
        rows.append(
            UsageRow(
                id=label,
                name=label if group == "day" else name,
                requests=counts.requests,
                prompt_tokens=counts.usage.prompt_tokens,
                cached_tokens=counts.usage.cached_tokens,
                completion_tokens=counts.usage.completion_tokens,
                reasoning_tokens=counts.usage.reasoning_tokens,
            )
        )
    if group == "day":
        return tuple(sorted(rows, key=lambda row: row.id))
    return tuple(sorted(rows, key=lambda row: (-row.total_tokens, row.id)))


def _date(day: int) -> str:
    """Days are those of UTC."""
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=day)).isoformat()
