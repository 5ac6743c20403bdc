"""Finds the best node for a model among many, assessing only candidates; and the nodes that could serve it, for
listings of many models."""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Set

import msgspec

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.memory import MemoryNeed, need_of
from cortex.fleet.placement.bounds import Bound, by_free_memory, by_residents, has_free, is_plain, node_memory, of_load
from cortex.fleet.placement.decision import RANK, START_RANKS, Assessment, Decision, Origin, Verdict
from cortex.fleet.placement.eviction import occupies
from cortex.fleet.placement.place import ACTIONS, assess, decided, place, preference, raised_need, without_memory
from cortex.fleet.topology import Fleet, Node

_FITS, _AFTER_EVICTION = RANK[Verdict.FITS], RANK[Verdict.FITS_AFTER_EVICTION]
_BEFORE_NAME = 12
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


MAX_NAMED = 32
"""A listing names this many of the nodes that could serve a model."""
_WORST_FEASIBLE = max(RANK[verdict] for verdict in ACTIONS)


class Feasibility:
    """The nodes that could serve a model, now or after evictions, if the operator loads it.

    For one snapshot of the fleet and many models: only the models that hold memory on a node matter for another one,
    and these are found once.
    """

    def __init__(self, fleet: Fleet, now: float, *, small_fleet: int = SMALL_FLEET) -> None:
        self._fleet = fleet
        self._now = now
        self._is_small = len(fleet.nodes) <= small_fleet
        self._slim = tuple(
            msgspec.structs.replace(
                node,
                residencies={model_id: held for model_id, held in node.residencies.items() if occupies(held, node)},
            )
            for node in fleet.nodes
        )

    def nodes(self, model_id: str) -> tuple[str, ...]:
        """The names of the nodes that could serve it. In a small fleet all, best first; in a large one at most
        `MAX_NAMED`, those that list the model first."""
        listing = self._fleet.index.listing.get(model_id, ())
        nodes = list(self._slim)
        unable = set()
        for position in listing:
            slim, held = nodes[position], self._fleet.nodes[position].residencies[model_id]
            if held.is_absent or held.is_unsupported:  # a load by the operator tries again; until then it is not there
                unable.add(slim.name)
            nodes[position] = msgspec.structs.replace(slim, residencies=slim.residencies | {model_id: held})
        fleet = msgspec.structs.replace(self._fleet, nodes=tuple(nodes))
        if self._is_small:
            decision = place(model_id, fleet, self._now, origin="operator")
            feasible = (each.node for each in decision.assessments if each.verdict in ACTIONS)
            return tuple(name for name in feasible if name not in unable)
        if not self._fleet.index.sharing:  # else the models that were left out may be requested
            fleet.__dict__["index"] = self._fleet.index
        spec = fleet.catalogue.spec(model_id)
        elsewhere = need_of(spec, Node(name=""), fleet)
        is_simple = is_plain(spec, fleet, "operator") and not spec.min_device_vram_mb
        is_simple &= elsewhere is not None and elsewhere.splits is None
        is_simple &= not (fleet.catalogue.together or fleet.catalogue.swap_groups or fleet.placement.max_loaded)
        order = [*listing, *(each for each in range(len(nodes)) if each not in set(listing))]
        found: list[str] = []
        for position in order:
            node = nodes[position]
            if is_simple and elsewhere is not None and model_id not in node.residencies and _is_simple(node):
                is_feasible = self._fits(model_id, node, elsewhere)
            else:
                is_feasible = assess(spec, node, fleet, self._now, origin="operator").verdict in ACTIONS
            if is_feasible and node.name not in unable:
                found.append(node.name)
            if len(found) == MAX_NAMED:
                break
        return tuple(found)

    def _fits(self, model_id: str, node: Node, need: MemoryNeed) -> bool:
        """Whether the model fits on a node where bounds are exact, now or after evictions."""
        spec = self._fleet.catalogue.spec(model_id)
        bound = by_free_memory(spec, node, need, packs=True)
        if bound[0] == RANK[Verdict.FITS_AFTER_EVICTION]:
            bound = by_residents(spec, node, need, self._fleet, self._now, "operator", bound)
        return bool(bound[0] <= _WORST_FEASIBLE)


def _is_simple(node: Node) -> bool:
    memory = node_memory(node)
    return memory.is_plain and not memory.has_ceilings and not memory.may_divide
