"""Finds the nodes that could serve a model, for listings of many models."""

from __future__ import annotations

import msgspec

from cortex.fleet.memory import MemoryNeed, need_of
from cortex.fleet.topology import Fleet, Node

from .bounds import by_free_memory, by_residents, is_plain, node_memory
from .decision import RANK, Verdict
from .eviction import occupies
from .place import ACTIONS, assess, place
from .search import SMALL_FLEET

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
