"""Budgets beyond the tokens of one key: those that the keys of a group share, and those in money.

Each is an account of its own, which the ledger keeps like a key's, under an id that no key has. A budget in money
counts in billionths of the currency of the catalogue's prices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple, Protocol, TypeVar

import msgspec

from cortex.gateway.ledger.keys import KeySection, Limit, Money
from cortex.gateway.ledger.users import SignInSection
from cortex.settings import Section
from cortex.wire.events import Usage
from cortex.wire.fields.request_class import RequestClass

NANO = 10**9
_GROUP, _COST = "group:", "cost:"
Member = TypeVar("Member", KeySection, SignInSection)


class Counters(NamedTuple):
    """What a key or another budget has spent, in tokens or billionths of money."""

    in_window: int = 0
    total: int = 0


class Prices(Protocol):
    """The price of a million tokens of a model, as the catalogue has it."""

    @property
    def input(self) -> float: ...
    @property
    def cached_input(self) -> float: ...
    @property
    def output(self) -> float: ...


class NoPrices(NamedTuple):
    """The prices of a model that has none."""

    input: float = 0.0
    cached_input: float = 0.0
    output: float = 0.0


class GroupSection(Section, frozen=True):
    """Keys that share limits; a key names its group with `group`. A limit that is not set does not apply."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    """As in `group` of the keys."""
    models: tuple[str, ...] = ()
    """Models that keys and users without a list of their own may use, as ids or patterns with `*`; all when empty."""
    request_class: RequestClass | None = None
    """The default class of requests, for keys that set none."""
    highest_class: RequestClass | None = None
    """The highest class of requests, for keys that set none."""
    requests_per_min: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Requests per minute of all its keys together."""
    window_tokens: Limit | None = None
    """Prompt and completion tokens of all its keys within `window_s`."""
    window_cost: Money | None = None
    """What all its keys may cost within `window_s`, by the prices in `models.toml`."""
    window_s: Annotated[int, msgspec.Meta(ge=60)] = 86400
    """The rolling window of `window_tokens` and `window_cost`, in whole minutes."""
    balance_tokens: Limit | None = None
    """Lifetime tokens of all its keys; raise it to top the group up."""
    balance_cost: Money | None = None
    """What all its keys may cost in total."""


class Budget(NamedTuple):
    """An account beyond that of a key."""

    section: KeySection
    """Its id, name and limits. Limits of money are in its token fields, in billionths."""
    label: str
    """For messages: `The group lab`."""
    is_cost: bool

    def amount(self, usage: Usage, prices: Prices) -> int:
        """The amount that a request with this usage takes."""
        return cost_nano(prices, usage) if self.is_cost else usage.prompt_tokens + usage.completion_tokens


def budget_left(owner: KeySection | GroupSection, tokens: Counters, cost: Counters) -> dict[str, float | None]:
    """What a key or group has spent and may still spend (None without a limit). `cost` is in billionths."""

    def left(limit: float | None, spent: float) -> float | None:
        return None if limit is None else max(0, limit - spent)

    def money_left(limit: float | None, spent: int) -> float | None:
        found = left(limit, spent / NANO)
        return None if found is None else round(found, 6)

    return {
        "spent_tokens": tokens.total,
        "window_spent_tokens": tokens.in_window,
        "balance_left_tokens": left(owner.balance_tokens, tokens.total),
        "window_left_tokens": left(owner.window_tokens, tokens.in_window),
        "balance_left_cost": money_left(owner.balance_cost, cost.total),
        "window_left_cost": money_left(owner.window_cost, cost.in_window),
    }


def group_id(name: str) -> str:
    """The id of the account of a group."""
    return f"{_GROUP}{name}"


def cost_id(owner: KeySection | GroupSection) -> str:
    """The id of the account for the cost of a key or group."""
    return f"{_COST}{owner.id if isinstance(owner, KeySection) else group_id(owner.name)}"


def cost_nano(prices: Prices, usage: Usage) -> int:
    """What the usage costs, in billionths."""
    fresh = usage.prompt_tokens - usage.cached_tokens
    per_million = (
        fresh * prices.input + usage.cached_tokens * prices.cached_input + usage.completion_tokens * prices.output
    )
    return math.ceil(per_million * NANO / 1e6)


def nano_per_token(prices: Prices) -> int:
    """The highest price of one token, in billionths; 0 if free."""
    return math.ceil(max(prices.input, prices.cached_input, prices.output) * NANO / 1e6)


def check_groups(keys: Iterable[KeySection], groups: Sequence[GroupSection]) -> None:
    """Raises ValueError for two groups with one name, and for a key of a group that does not exist."""
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two groups are called `{name}`; give each its own name")
    for key in keys:
        if key.group is not None and key.group not in names:
            known = ", ".join(f"`{name}`" for name in names) or "none"
            raise ValueError(
                f"the key `{key.name}` is in the group `{key.group}`, which does not exist; groups: {known}"
            )


_INHERITED = ("models", "request_class", "highest_class")


def with_values_of_groups(keys: Iterable[Member], groups: Iterable[GroupSection]) -> tuple[Member, ...]:
    """The keys (or the section of users), with unset fields of `_INHERITED` taken from their group."""
    by_name = {group.name: group for group in groups}
    return tuple(key if key.group is None else _inheriting(key, by_name[key.group]) for key in keys)


def _inheriting(key: Member, group: GroupSection) -> Member:
    missing = {name: getattr(group, name) for name in _INHERITED if hasattr(key, name) and not getattr(key, name)}
    return msgspec.structs.replace(key, **missing)


def budgets_of(keys: Iterable[KeySection], groups: Iterable[GroupSection]) -> dict[str, tuple[Budget, ...]]:
    """The budgets that each key's requests are charged to in addition to its own tokens, by key id; and those of each
    group, by its id, for users without a key."""
    shared = {group.name: tuple(_budgets_of_group(group)) for group in groups}
    by_group = {group_id(name): budgets for name, budgets in shared.items()}
    return by_group | {
        key.id: (*_cost_of(key, f"The key `{key.name}`"), *shared.get(key.group or "", ())) for key in keys
    }


def _budgets_of_group(group: GroupSection) -> Iterable[Budget]:
    label = f"The group `{group.name}`"
    section = KeySection(
        name=group.name,
        id=group_id(group.name),
        sha256="",
        requests_per_min=group.requests_per_min,
        window_tokens=group.window_tokens,
        window_s=group.window_s,
        balance_tokens=group.balance_tokens,
    )
    yield Budget(section, label, is_cost=False)  # also without limits, because the usage of the group is shown
    yield from _cost_of(group, label)


def _cost_of(owner: KeySection | GroupSection, label: str) -> Iterable[Budget]:
    if owner.window_cost is None and owner.balance_cost is None:
        return
    section = KeySection(
        name=owner.name,
        id=cost_id(owner),
        sha256="",
        window_tokens=None if owner.window_cost is None else round(owner.window_cost * NANO),
        window_s=owner.window_s,
        balance_tokens=None if owner.balance_cost is None else round(owner.balance_cost * NANO),
    )
    yield Budget(section, label, is_cost=True)
