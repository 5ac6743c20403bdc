"""The models that hold memory on a node: why each may or may not be evicted for another, and which must leave first
regardless of memory (`swap_groups`, `together`, `placement.max_loaded`). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.fleet.catalogue import Catalogue, ModelSpec
from cortex.fleet.memory import DeviceLedger, whole_measured_bytes
from cortex.fleet.topology import Fleet, ModelOnNode, Node, Residency
from cortex.wire.node.protocol import ModelState, ModelStatus

from .decision import Origin
from .eviction import Occupant, Protection, by_eviction, is_freed_by_sleep, is_leaving, occupies, protection


def occupants_of(
    spec: ModelSpec,
    node: Node,
    devices: Sequence[DeviceLedger],
    fleet: Fleet,
    now: float,
    origin: Origin,
    leaving: frozenset[ModelOnNode],
) -> tuple[Occupant, ...]:
    """Every model that holds memory on `node`, or has reserved some, whole or in part."""
    found = []
    reserved = {reservation.model_id: reservation for reservation in node.reservations}
    members = {
        member.id: member
        for member in node.members
        if member.state is not ModelState.ASLEEP or not is_freed_by_sleep(node)
    }
    is_any_held_back = reserved or members
    for model_id in {**node.residencies, **reserved, **members} if is_any_held_back else _ids(node.active):
        if model_id == spec.id and model_id not in reserved and _sleeps(model_id, node):
            continue  # its held bytes are part of its need
        known = fleet.catalogue.spec(model_id)
        held, leader = node.residencies.get(model_id), None
        if (member := members.get(model_id)) is not None:
            leader = fleet.leader_of(member)
            held = None if leader is None else leader[1]
        kept: tuple[Protection, str] | None
        if model_id in reserved:
            kept = Protection.CHANGING, "load ordered"
            num_nodes = known.num_nodes
        elif member is not None:
            kept = _protection_of_member(member, leader, spec, fleet, now, origin)
            num_nodes = len(member.nodes)
        elif held is not None and occupies(held, node):
            kept = protection(held, node, spec, fleet, now, background=origin == "background")
            num_nodes = max(1, len(held.status.nodes))
        else:
            continue
        serving = node.name if leader is None else leader[0].name
        is_unloading = kept is None and held is not None and is_leaving(held, node if leader is None else leader[0])
        device_bytes = {device.index: taken for device in devices if (taken := device.held_by(model_id))}
        here_bytes = sum(device_bytes.values())
        whole_bytes = None if held is None else whole_measured_bytes(held.status)
        found.append(
            Occupant(
                model_id=model_id,
                priority=known.priority,
                last_used=now if held is None else held.last_used,
                evict_cost=known.evict_cost,
                device_bytes=device_bytes,
                host_bytes=0 if held is None or held.state is ModelState.ASLEEP else held.status.host_bytes,
                protection=kept[0] if kept else None,
                reason=kept[1] if kept else None,
                leader=None if leader is None else serving,
                num_nodes=num_nodes,
                elsewhere_bytes=max(0, (whole_bytes or here_bytes * num_nodes) - here_bytes) if num_nodes > 1 else 0,
                is_unloading=is_unloading,
                is_leaving=is_unloading or ModelOnNode(serving, model_id) in leaving,
            )
        )
    return tuple(found)


def _ids(models: Sequence[Residency]) -> list[str]:
    return [held.model_id for held in models]


def _sleeps(model_id: str, node: Node) -> bool:
    held = node.residencies.get(model_id)
    here = [member.state for member in node.members if member.id == model_id]
    return ModelState.ASLEEP in here or (held is not None and held.state is ModelState.ASLEEP)


def _protection_of_member(
    member: ModelStatus,
    leader: tuple[Node, Residency] | None,
    spec: ModelSpec,
    fleet: Fleet,
    now: float,
    origin: Origin,
) -> tuple[Protection, str] | None:
    """Why the model of a member must not be evicted, on the node that serves it."""
    if leader is None:
        return Protection.PART, f"a part of it; {member.nodes[0]} serves it, which is not in this fleet"
    node, held = leader
    if not node.healthy:
        return Protection.CHANGING, f"a part of it; {node.name}, which serves it, is down"
    if not occupies(held, node):
        return Protection.CHANGING, f"a part of it, which is being freed; {node.name} has unloaded it"
    kept = protection(held, node, spec, fleet, now, background=origin == "background")
    return kept and (kept[0], f"a part of it; on {node.name}: {kept[1]}")


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
    """The models outside the set that needs the fewest evictions; of equal sets, the first."""

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
    """Whether only the operator can make it leave."""
    return other.protection is not None and not other.protection.is_temporary
