"""Finds the best node for a model among many, assessing only candidates."""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Set

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.memory import MemoryNeed, need_of
from cortex.fleet.topology import Fleet, Node

from .bounds import Bound, by_free_memory, by_residents, has_free, is_plain, node_memory, of_load
from .decision import RANK, START_RANKS, Assessment, Decision, Origin, Verdict
from .place import assess, decided, preference, raised_need, without_memory

_FITS, _AFTER_EVICTION = RANK[Verdict.FITS], RANK[Verdict.FITS_AFTER_EVICTION]
_BEFORE_NAME = 11
"""The length of a bound without the node's name, which breaks ties."""
SMALL_FLEET = 8
"""A decision for at most this many nodes explains all of them."""
MIN_ASSESSED = 3
"""A decision for more nodes explains at least this many."""


def search(
    model_id: str,
    fleet: Fleet,
    now: float,
    *,
    origin: Origin = "request",
    small_fleet: int = SMALL_FLEET,
    min_assessed: int = MIN_ASSESSED,
) -> Decision:
    """The same action and node as `place` decides, with the assessments of fewer nodes.

    Nodes are assessed in the order of their bounds, until no other can be better than the best found. If the model has
    to wait or is rejected, until no other has a better verdict.
    """
    spec = fleet.catalogue.spec(model_id)
    is_small = len(fleet.nodes) <= small_fleet
    candidates = _Candidates(spec, fleet, now, origin, takes_all=is_small)
    num_least = len(fleet.nodes) if is_small else min_assessed
    found: list[Assessment] = []
    best: tuple[float | str, ...] = ()
    while (bound := candidates.bound()) is not None:
        if len(found) >= num_least and _is_settled(found, best, bound, origin):
            break
        found.append(assess(spec, candidates.pop(), fleet, now, origin=origin))
        key = preference(found[-1], fleet.placement)
        best = min(best, key) if best else key
    return decided(spec, fleet, now, origin, found, num_omitted=len(fleet.nodes) - len(found))


def may_fit(model_id: str, node: Node, fleet: Fleet, now: float, *, origin: Origin) -> bool:
    """Whether the model might be loadable on `node` now; false only if ruled out. Needs no assessment."""
    candidates = _Candidates(fleet.catalogue.spec(model_id), fleet, now, origin, only_on=node)
    bound = candidates.bound()
    return bound is not None and _is_start(bound[0])


def _is_settled(found: Sequence[Assessment], best: tuple[float | str, ...], bound: Bound, origin: Origin) -> bool:
    """Whether no node with this bound, or a worse one, changes the outcome."""
    rank = min(each.rank for each in found)
    if _is_start(rank):
        return best <= bound
    if origin == "background" and rank > RANK[Verdict.CROWDED] and bound[0] <= RANK[Verdict.HELD]:
        # Whether another request could load the model decides which error it gets.
        return rank <= bound[0] and any(each.waits_for_foreground for each in found)
    return bool(rank <= bound[0])


def _is_start(rank: int) -> bool:
    """Whether its verdict is one with which the model is served, woken or loaded."""
    return rank in START_RANKS


class _Candidates:
    """The nodes, in the order of their bounds. A bound is raised only when its turn comes."""

    def __init__(
        self,
        spec: ModelSpec,
        fleet: Fleet,
        now: float,
        origin: Origin,
        *,
        takes_all: bool = False,
        only_on: Node | None = None,
    ) -> None:
        """Without `takes_all`, nodes that do not list a running model are left out."""
        self._spec, self._fleet, self._now, self._origin = spec, fleet, now, origin
        self._packs = fleet.placement.strategy == "pack"
        self._elsewhere = need_of(spec, Node(name=""), fleet)
        """The model's need on nodes that do not list it."""
        self._is_plain = is_plain(spec, fleet, origin)
        self._full: list[int] = []
        """Nodes without enough free memory, considered only if no other node has it."""
        if only_on is not None:
            self._queue = [self._entry(fleet.index.positions[only_on.name])]
            return
        positions = fleet.index.listing.get(spec.id, ())
        self._queue = [self._entry(position) for position in positions]
        is_running = any(bound[0] <= RANK[Verdict.STARTING] for bound, _, _ in self._queue)
        if takes_all or not is_running:
            self._add_others(set(positions))
        heapq.heapify(self._queue)

    def _add_others(self, listing: Set[int]) -> None:
        """Add the nodes that do not list the model."""
        need = self._elsewhere if self._is_plain else None
        for position, node in enumerate(self._fleet.nodes):
            if position in listing:
                continue
            if need is not None and (memory := node_memory(node)).is_plain and not has_free(memory, need):
                self._full.append(position)
            else:
                self._queue.append(self._entry(position))

    def bound(self) -> Bound | None:
        """The bound of the next node; None if there is none."""
        while self._queue or self._full:
            if self._full and (not self._queue or self._queue[0][0][0] > _FITS):
                self._queue += map(self._entry, self._full)
                self._full.clear()
                heapq.heapify(self._queue)
            bound, position, is_final = self._queue[0]
            if is_final:
                return bound
            node = self._fleet.nodes[position]
            spec, fleet = self._spec, self._fleet
            raised = by_residents(spec, node, self._need(node), fleet, self._now, self._origin, bound)
            heapq.heapreplace(self._queue, (raised, position, True))
        return None

    def pop(self) -> Node:
        return self._fleet.nodes[heapq.heappop(self._queue)[1]]

    def _entry(self, position: int) -> tuple[Bound, int, bool]:
        node, spec = self._fleet.nodes[position], self._spec
        held = node.residencies.get(spec.id)
        if held is None and self._is_plain and (memory := node_memory(node)).is_plain:
            return self._entry_of(of_load(memory, self._elsewhere, packs=self._packs), position)
        if (found := without_memory(spec, node, held, self._fleet, self._now, self._origin)) is not None:
            return (RANK[found[0]],), position, True
        return self._entry_of(by_free_memory(spec, node, self._need(node), packs=self._packs), position)

    def _entry_of(self, bound: Bound, position: int) -> tuple[Bound, int, bool]:
        if len(bound) == _BEFORE_NAME:
            bound = (*bound, self._fleet.nodes[position].name)
        return bound, position, bound[0] != _AFTER_EVICTION

    def _need(self, node: Node) -> MemoryNeed | None:
        is_listed = self._spec.id in node.residencies
        need = need_of(self._spec, node, self._fleet) if is_listed else self._elsewhere
        return raised_need(self._spec, node, need)
