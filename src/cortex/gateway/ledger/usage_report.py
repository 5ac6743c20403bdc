"""Usage by key, group, model, node or day, for `cortex usage` and for billing, as rows and as CSV."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Callable, Iterable

import msgspec

from cortex.gateway.database import Database
from cortex.gateway.ledger.groups import NANO
from cortex.gateway.ledger.store import GroupBy, Spend, read_usage
from cortex.wire.events import Usage

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
HEADER = ("requests", "prompt", "cached", "completion", "reasoning", "total", "Wh", "cost")

MILLIJOULES_PER_WH = 3_600_000

CostOf = Callable[[str, Usage], float]
"""Computes the cost of a model's usage."""


def free(model: str, usage: Usage) -> float:  # noqa: ARG001
    """The cost without a catalogue."""
    return 0.0


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """The spend of one key, group, model, node or day, or of one key on one model."""

    id: str
    """The key's id, the name of the group, model or node, or the day as `2026-01-31`."""
    name: str
    """The key's name; otherwise as `id`."""
    model: str = ""
    """Only in usage by `key-model`."""
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Part of the prompt tokens."""
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """Part of the completion tokens."""
    energy_wh: float = 0.0
    """Energy that its requests used on devices whose power nodes can read."""
    cost: float = 0.0
    """At the catalogue's present prices, in their currency."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def cells(self) -> tuple[str, ...]:
        """The cells of a table, under `HEADER`."""
        counts = (
            self.requests,
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            self.reasoning_tokens,
            self.total_tokens,
        )
        measured = f"{self.energy_wh:,.3f}" if self.energy_wh else ""
        return (*(f"{count:,}" for count in counts), measured, f"{self.cost:,.4f}" if self.cost else "")


def usage(
    database: Database, *, group: GroupBy = "key", since: float, until: float, cost_of: CostOf = free
) -> tuple[UsageRow, ...]:
    """Spend in [since, until) in seconds since 1970, to the minute; days oldest first, others most tokens first."""
    spends = database.run(lambda execute: read_usage(execute, group, since=since, until=until))
    return report(group, spends, cost_of)


def report(group: GroupBy, spends: Iterable[Spend], cost_of: CostOf) -> tuple[UsageRow, ...]:
    """One row for each group, in the order of `usage`."""
    rows: dict[tuple[str, str], UsageRow] = {}
    for spend in spends:
        label = _date(int(spend.group_id)) if group == "day" else spend.group_id
        model = spend.model if group == "key-model" else ""
        used = spend.counts.usage
        name = label if group == "day" else spend.group_name or "(none)"
        before = rows.get((label, model)) or UsageRow(id=label, name=name, model=model)
        rows[label, model] = UsageRow(
            id=label,
            name=before.name,
            model=model,
            requests=before.requests + spend.counts.requests,
            prompt_tokens=before.prompt_tokens + used.prompt_tokens,
            cached_tokens=before.cached_tokens + used.cached_tokens,
            completion_tokens=before.completion_tokens + used.completion_tokens,
            reasoning_tokens=before.reasoning_tokens + used.reasoning_tokens,
            energy_wh=before.energy_wh + used.energy_mj / MILLIJOULES_PER_WH,
            cost=max(0.0, before.cost + cost_of(spend.model, used) - spend.counts.saved_nano / NANO),
        )
    if group == "day":
        return tuple(sorted(rows.values(), key=lambda row: row.id))
    if group == "key-model":
        return tuple(sorted(rows.values(), key=lambda row: (row.name, row.id, -row.total_tokens, row.model)))
    return tuple(sorted(rows.values(), key=lambda row: (-row.total_tokens, row.id)))


def as_csv(group: GroupBy, rows: Iterable[UsageRow]) -> str:
    """The rows under a header, with costs to the millionth. No cell is a formula to a spreadsheet."""
    out = io.StringIO()
    writer = csv.writer(out)
    columns = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens", "total_tokens")
    has_model = group == "key-model"
    writer.writerow(
        ["key" if has_model else group, "id", *(["model"] if has_model else []), *columns, "cost", "energy_wh"]
    )
    for row in rows:
        names = [row.name, row.id, *([row.model] if has_model else [])]
        cells = [*map(_as_text, names), *(getattr(row, name) for name in columns)]
        writer.writerow([*cells, f"{row.cost:.6f}", f"{row.energy_wh:.6f}"])
    return out.getvalue()


def _as_text(name: str) -> str:
    return f"'{name}" if name.startswith(_FORMULA) else name


def _date(day: int) -> str:
    """Days are those of UTC."""
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=day)).isoformat()
