"""Budgets beyond the tokens of one key: those that the keys of a group share, and those in money.

Each is an account of its own, which the ledger keeps like that of a key, under an id that no key has. A budget in money
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

NANO = 10**9
_GROUP, _COST = "group:", "cost:"
Member = TypeVar("Member", KeySection, SignInSection)


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
    """Models that its keys and users may use if they name none, as ids or patterns with `*`; all when empty."""
    requests_per_min: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Requests per minute of all its keys together."""
    window_tokens: Limit | None = None
    """Prompt and completion tokens of all its keys within `window_s`."""
    window_cost: Money | None = None
    """What all its keys may cost within `window_s`, by the prices in `models.toml`."""
    window_s: Annotated[int, msgspec.Meta(ge=60)] = 86400
    """The rolling window of `window_tokens` and `window_cost`, in whole minutes."""
    balance_tokens: Limit | None = None
    """Tokens of all its keys, for ever; raise it to top the group up."""
    balance_cost: Money | None = None
    """What all its keys may cost, for ever."""


class Budget(NamedTuple):
    """An account beyond that of a key."""

    section: KeySection
    """Its id, name and limits. Limits of money are in its token fields, in billionths."""
    label: str
    """For messages: `The group lab`."""
    is_cost: bool

    def owns(self, key: KeySection) -> bool:
        """Whether it is the key's own, not its group's."""
        return self.section.id == cost_id(key)

    def amount(self, tokens: int, usage: Usage, prices: Prices) -> int:
        """What a request with this usage takes of it."""
        return cost_nano(prices, usage) if self.is_cost else tokens


class CostLeft(NamedTuple):
    """What a key may still cost, in the currency of the prices; None: without a limit."""

    window: float | None = None
    balance: float | None = None

    @classmethod
    def of(cls, key: KeySection, spent_in_window: int, spent: int) -> CostLeft:
        """`spent`: by the account of its cost, in billionths."""
        return cls(
            None if key.window_cost is None else max(0.0, round(key.window_cost - spent_in_window / NANO, 6)),
            None if key.balance_cost is None else max(0.0, round(key.balance_cost - spent / NANO, 6)),
        )


def cost_id(key: KeySection) -> str:
    """The id of the account of what the key costs."""
    return f"{_COST}{key.id}"


def cost_nano(prices: Prices, usage: Usage) -> int:
    """What the usage costs, in billionths."""
    fresh = usage.prompt_tokens - usage.cached_tokens
    per_million = (
        fresh * prices.input + usage.cached_tokens * prices.cached_input + usage.completion_tokens * prices.output
    )
    return math.ceil(per_million * NANO / 1e6)


def nano_per_token(prices: Prices) -> int:
    """The most that one token costs, in billionths; 0: it is free."""
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


def with_models_of_groups(keys: Iterable[Member], groups: Iterable[GroupSection]) -> tuple[Member, ...]:
    """The keys, or what holds for users; those that name no models have those of their group."""
    models = {group.name: group.models for group in groups}
    return tuple(
        key if key.models or key.group is None else msgspec.structs.replace(key, models=models[key.group])
        for key in keys
    )


def budgets_of(keys: Iterable[KeySection], groups: Iterable[GroupSection]) -> dict[str, tuple[Budget, ...]]:
    """The budgets that requests of each key are charged to beyond its own tokens, by key id; and those of each group by
    its id, for users without a key."""
    shared = {group.name: tuple(_budgets_of_group(group)) for group in groups}
    by_group = {f"{_GROUP}{name}": budgets for name, budgets in shared.items()}
    return by_group | {
        key.id: (*_cost_of(key, cost_id(key), f"The key `{key.name}`"), *shared.get(key.group or "", ()))
        for key in keys
    }


def _budgets_of_group(group: GroupSection) -> Iterable[Budget]:
    label = f"The group `{group.name}`"
    if any(limit is not None for limit in (group.requests_per_min, group.window_tokens, group.balance_tokens)):
        section = KeySection(
            name=group.name,
            id=f"{_GROUP}{group.name}",
            sha256="",
            requests_per_min=group.requests_per_min,
            window_tokens=group.window_tokens,
            window_s=group.window_s,
            balance_tokens=group.balance_tokens,
        )
        yield Budget(section, label, is_cost=False)
    yield from _cost_of(group, f"{_COST}{_GROUP}{group.name}", label)


def _cost_of(owner: KeySection | GroupSection, id: str, label: str) -> Iterable[Budget]:
    if owner.window_cost is None and owner.balance_cost is None:
        return
    section = KeySection(
        name=owner.name,
        id=id,
        sha256="",
        window_tokens=None if owner.window_cost is None else round(owner.window_cost * NANO),
        window_s=owner.window_s,
        balance_tokens=None if owner.balance_cost is None else round(owner.balance_cost * NANO),
    )
    yield Budget(section, label, is_cost=True)
