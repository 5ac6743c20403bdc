"""Which models must leave a node before another is loaded there, whatever the memory: `swap_groups`, `together`, and
`placement.max_loaded`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.topology import Fleet

from .eviction import Occupant, Protection, by_eviction

_NEVER = float("inf")


def rivals(spec: ModelSpec, occupants: Sequence[Occupant], fleet: Fleet) -> dict[str, str]:
    """The models among `occupants` that cannot be on a node together with `spec`, each with the reason."""
    catalogue = fleet.catalogue
    others = [each for each in occupants if each.model_id != spec.id]
    found = _of_groups(spec.id, others, catalogue)
    if catalogue.together:
        found |= _outside_of_set(spec.id, others, catalogue)
    if fleet.placement.max_loaded:
        found |= _beyond_limit(others, found, fleet)
    return found


def _of_groups(model_id: str, others: Sequence[Occupant], catalogue: Catalogue) -> dict[str, str]:
    name = catalogue.swap_group_of.get(model_id)
    if name is None:
        return {}
    group = catalogue.swap_groups[name]
    found = {}
    for other in others:
        own = catalogue.swap_group_of.get(other.model_id)
        if own == name:
            if group.swap:
                found[other.model_id] = f"of the same group {name}"
        elif group.exclusive and other.protection is not Protection.PINNED:
            found[other.model_id] = f"outside the exclusive group {name}"
    return found


def _outside_of_set(model_id: str, others: Sequence[Occupant], catalogue: Catalogue) -> dict[str, str]:
    """Those outside the set with the model that costs the least evictions; the first of equal ones."""

    def cost(allowed: Sequence[str]) -> float:
        leaving = [other for other in others if other.model_id not in allowed]
        return sum(_NEVER if _stays(other) else 0 if other.is_leaving else other.evict_cost for other in leaving)

    allowed = min((each for each in catalogue.together if model_id in each), key=cost, default=(model_id,))
    return {other.model_id: "not in one set (`together`)" for other in others if other.model_id not in allowed}


def _beyond_limit(others: Sequence[Occupant], leaving: dict[str, str], fleet: Fleet) -> dict[str, str]:
    staying = [other for other in others if other.model_id not in leaving and not other.is_leaving]
    num_excess = len(staying) + 1 - (fleet.placement.max_loaded or 0)
    if num_excess <= 0:
        return {}

    def order(other: Occupant) -> tuple[float, ...]:
        return (_stays(other), other.protection is not None, *by_eviction(other, fleet.rules))

    limit = f"beyond the limit of {fleet.placement.max_loaded} models (`placement.max_loaded`)"
    return {other.model_id: limit for other in sorted(staying, key=order)[:num_excess]}


def _stays(other: Occupant) -> bool:
    """Whether nothing but the operator makes it leave."""
    return other.protection is not None and not other.protection.is_temporary
