"""An index of a fleet, so that a decision looks only at the nodes that it concerns.

The index of a fleet that differs in a few nodes is derived from that of the previous fleet. `remembered` caches values
that depend on one node alone, once per node and report.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, Protocol, TypeVar

import msgspec

S = TypeVar("S")
T = TypeVar("T")


_REMEMBERED = "remembered"


def remembered(derive: Callable[[S], T]) -> Callable[[S], T]:
    """Call `derive` once for each value, which must be immutable and have a `__dict__`, where the result is cached. The
    result must not depend on requests in flight, because `carry` copies it to a node that differs only in those."""

    @wraps(derive)
    def known(value: S) -> T:
        try:
            found: T = value.__dict__[_REMEMBERED][derive]
        except KeyError:
            found = derive(value)
            _kept(value)[derive] = found
        return found

    return known


def carry(before: object, after: object) -> None:
    """Share the remembered values of `before` and `after` in both directions."""
    after.__dict__[_REMEMBERED] = _kept(before)


def _kept(value: object) -> dict[Callable[..., Any], Any]:
    kept: dict[Callable[..., Any], Any] = value.__dict__.setdefault(_REMEMBERED, {})
    return kept


class IndexedNode(Protocol):
    """The fields of a node that the index reads."""

    @property
    def name(self) -> str: ...
    @property
    def residencies(self) -> Mapping[str, object]: ...
    @property
    def members(self) -> Sequence[object]: ...


class FleetIndex(msgspec.Struct, frozen=True):
    """Positions in `Fleet.nodes`. Never changed in place."""

    positions: dict[str, int]
    """By the node's name."""
    listing: dict[str, tuple[int, ...]]
    """The nodes that list each model, in order; the same object as long as no node lists other models."""
    sharing: tuple[int, ...]
    """The nodes with parts of models that others serve, in order."""

    @classmethod
    def of(cls, nodes: Sequence[IndexedNode]) -> FleetIndex:
        listing: dict[str, list[int]] = {}
        for position, node in enumerate(nodes):
            for model in node.residencies:
                listing.setdefault(model, []).append(position)
        return cls(
            {node.name: position for position, node in enumerate(nodes)},
            {model: tuple(found) for model, found in listing.items()},
            tuple(position for position, node in enumerate(nodes) if node.members),
        )

    def changed(self, before: Sequence[IndexedNode], nodes: Collection[IndexedNode]) -> FleetIndex:
        """The index after `nodes` replaced those of the same names; `before`: all nodes until then."""
        listing, sharing = self.listing, self.sharing
        for node in nodes:
            position = self.positions[node.name]
            old = before[position]
            if old.residencies.keys() != node.residencies.keys():
                listing = dict(listing) if listing is self.listing else listing
                for model in old.residencies.keys() - node.residencies.keys():
                    found = tuple(each for each in listing.pop(model) if each != position)
                    listing |= {model: found} if found else {}
                for model in node.residencies.keys() - old.residencies.keys():
                    listing[model] = _with(listing.get(model, ()), position)
            if bool(old.members) != bool(node.members):
                others = tuple(each for each in sharing if each != position)
                sharing = _with(others, position) if node.members else others
        return FleetIndex(self.positions, listing, sharing)


def _with(positions: tuple[int, ...], position: int) -> tuple[int, ...]:
    found = list(positions)
    insort(found, position)
    return tuple(found)
