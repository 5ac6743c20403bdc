"""Entries about models on nodes that mark the nodes which they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TypeVar

from cortex.fleet.topology import ModelOnNode

T = TypeVar("T")


class NodeEntries(MutableMapping[ModelOnNode, T]):
    """By model and node, in order of arrival; also those of one node. Every change adds its nodes to `stale`."""

    def __init__(self, stale: set[str], also: Callable[[T], Iterable[str]] = lambda _: ()) -> None:
        """`also`: the other nodes that an entry concerns."""
        self._stale = stale
        self._also = also
        self._entries: dict[ModelOnNode, T] = {}
        self._by_node: dict[str, dict[str, T]] = {}

    def __getitem__(self, target: ModelOnNode) -> T:
        return self._entries[target]

    def __setitem__(self, target: ModelOnNode, entry: T) -> None:
        if target in self._entries:
            self._stale.update(self._also(self._entries[target]))
        self._entries[target] = entry
        self._by_node.setdefault(target.node, {})[target.model] = entry
        self._stale.add(target.node)
        self._stale.update(self._also(entry))

    def __delitem__(self, target: ModelOnNode) -> None:
        entry = self._entries.pop(target)
        here = self._by_node[target.node]
        del here[target.model]
        if not here:
            del self._by_node[target.node]
        self._stale.add(target.node)
        self._stale.update(self._also(entry))

    def __contains__(self, target: object) -> bool:
        return target in self._entries

    def __iter__(self) -> Iterator[ModelOnNode]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that have any."""
        return tuple(self._by_node)

    def on(self, node: str) -> Iterable[tuple[str, T]]:
        """The models of `node` that have an entry, each with it."""
        return self._by_node.get(node, {}).items()

    def drop_node(self, node: str) -> None:
        """Remove all entries of `node`."""
        for model in [*self._by_node.get(node, ())]:
            del self[ModelOnNode(node, model)]
