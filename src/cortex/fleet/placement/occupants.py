"""The models that hold memory on a node, and why each may or may not be evicted for another."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.memory import DeviceLedger, whole_measured_bytes
from cortex.fleet.topology import Fleet, ModelOnNode, Node, Residency
from cortex.wire.node.protocol import ModelState, ModelStatus

from .decision import Origin
from .eviction import Occupant, Protection, is_freed_by_sleep, is_leaving, occupies, protection


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
            continue  # what it holds is a part of what it needs
        known = fleet.catalogue.spec(model_id)
        held, lead = node.residencies.get(model_id), None
        if (member := members.get(model_id)) is not None:
            lead = fleet.leader_of(member)
            held = None if lead is None else lead[1]
        kept: tuple[Protection, str] | None
        if model_id in reserved:
            kept = Protection.CHANGING, "load ordered"
            num_nodes = known.num_nodes
        elif member is not None:
            kept = _protection_of_member(member, lead, spec, fleet, now, origin)
            num_nodes = len(member.nodes)
        elif held is not None and occupies(held, node):
            kept = protection(held, node, spec, fleet, now, background=origin == "background")
            num_nodes = max(1, len(held.status.nodes))
        else:
            continue
        serving = node.name if lead is None else lead[0].name
        is_unloading = kept is None and held is not None and is_leaving(held, node if lead is None else lead[0])
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
                lead=None if lead is None else serving,
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
    member: ModelStatus, lead: tuple[Node, Residency] | None, spec: ModelSpec, fleet: Fleet, now: float, origin: Origin
) -> tuple[Protection, str] | None:
    """Why the model of a member must not be evicted, on the node that serves it."""
    if lead is None:
        return Protection.PART, f"a part of it; {member.nodes[0]} serves it, which is not in this fleet"
    node, held = lead
    if not node.healthy:
        return Protection.CHANGING, f"a part of it; {node.name}, which serves it, is down"
    if not occupies(held, node):
        return Protection.CHANGING, f"a part of it, which is being freed; {node.name} has unloaded it"
    kept = protection(held, node, spec, fleet, now, background=origin == "background")
    return kept and (kept[0], f"a part of it; on {node.name}: {kept[1]}")
