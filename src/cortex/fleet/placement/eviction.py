"""Selects models to evict, with the reasons that protect others.

Never evicted: busy models, pinned ones, recently loaded ones that other clients use, and ones of higher priority than
the newcomer. Background requests evict nothing. Models of equal priority may evict each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.devices import ON_DEVICE, sleep_frees
from cortex.fleet.memory import DeviceLedger, whole_ledger
from cortex.fleet.rules import EvictionRules
from cortex.fleet.topology import Fleet, ModelOnNode, Node, Residency
from cortex.wire.node.protocol import ModelState
from cortex.wire.words import duration, plural

_AT_REST = (ModelState.READY, ModelState.ASLEEP)
_LOADS_WORTH = 5.0
"""A model serves for at least this many times the duration of its load, so that swaps take at most a sixth of the
time."""
WHOLE_NODE = -1
"""The key of a shortfall under the node's memory ceiling, which an unload on any of its devices relieves."""


HOST = -2
"""The key of a shortfall of the host's memory."""


class Protection(StrEnum):
    """Why a model must not be evicted."""

    BUSY = "busy"
    YOUNG = "young"
    CHANGING = "changing"
    """Loading, recovering or unloading: its memory cannot be reassigned now."""
    PINNED = "pinned"
    PRIORITY = "priority"
    BACKGROUND = "background"
    """The newcomer is a background request."""
    UNMANAGED = "unmanaged"
    """The node does not unload models on request."""
    PART = "part"
    """It is a part of a model that a node outside the fleet serves."""

    @property
    def is_temporary(self) -> bool:
        """Whether it ends by itself; the others last until the operator changes something."""
        return self in (Protection.BUSY, Protection.YOUNG, Protection.CHANGING)


class Occupant(msgspec.Struct, frozen=True, kw_only=True):
    """A model that holds memory on a node, as a possible victim."""

    model_id: str
    priority: int
    last_used: float
    evict_cost: float = 1.0
    device_bytes: dict[int, int]
    """Bytes that its unload would free, by device index."""
    host_bytes: int = 0
    """Host memory that it would free."""
    protection: Protection | None = None
    """`None` if it may be evicted."""
    reason: str | None = None
    """The protection in words, with its values."""
    leader: str | None = None
    """The node that serves it, where it must be unloaded, if this one has only a part."""
    num_nodes: int = 1
    """The nodes that run it together."""
    elsewhere_bytes: int = 0
    """Bytes that its unload would free on the others."""
    is_unloading: bool = False
    """Its memory will be free without an eviction."""
    is_leaving: bool = False
    """The same, or it is already being evicted for the same newcomer on another of its nodes."""

    @property
    def whole_bytes(self) -> int:
        """Bytes that its eviction frees on all of its nodes."""
        return self.num_bytes + self.elsewhere_bytes

    @property
    def num_bytes(self) -> int:
        return sum(self.device_bytes.values())

    def frees(self, index: int) -> int:
        """Bytes that its unload would free of a device, of the ceiling of the `WHOLE_NODE`, or of the `HOST`."""
        if index == HOST:
            return self.host_bytes
        return self.num_bytes if index == WHOLE_NODE else self.device_bytes.get(index, 0)


def protected(
    held: Residency, node: Node, newcomer: ModelSpec, fleet: Fleet, now: float, *, background: bool
) -> Protection | None:
    """Why `held` must not be evicted for `newcomer`; `None` when it may. Lasting reasons come before temporary ones."""
    if held.state is ModelState.UNLOADING:
        return None if is_leaving(held, node) else Protection.CHANGING
    if not node.takes_orders:
        return Protection.UNMANAGED
    spec = fleet.catalogue.spec(held.model_id)
    if held.pinned or spec.is_pinned_on(node.name) or fleet.catalogue.is_persistent_beside(held.model_id, newcomer.id):
        return Protection.PINNED
    if spec.priority > newcomer.priority:
        return Protection.PRIORITY
    if background:
        return Protection.BACKGROUND
    if held.state is ModelState.ASLEEP:
        return None
    if held.state is not ModelState.READY or held.closed:
        return Protection.CHANGING
    if held.is_busy:
        return Protection.BUSY
    is_protected = _kept_s(held.model_id, fleet, now) > 0 or _is_protected(held, node, newcomer, fleet, now)
    return Protection.YOUNG if is_protected else None


def _kept_s(model_id: str, fleet: Fleet, now: float) -> float:
    """How much longer the `keep_alive` of a request keeps the model."""
    until = 0.0 if fleet.demand is None else fleet.demand.kept_until.get(model_id, 0.0)
    return max(0.0, until - now)


def is_leaving(held: Residency, node: Node) -> bool:
    """Whether the model's device memory is already being freed: it is unloading, or falling asleep where that frees the
    device."""
    return held.state is ModelState.UNLOADING and (is_freed_by_sleep(node) or not node.can_sleep)


def _is_protected(held: Residency, node: Node, newcomer: ModelSpec, fleet: Fleet, now: float) -> bool:
    """Whether the model was loaded recently and is needed by clients other than the newcomer's."""
    if now - held.state_since >= residency_s(held, fleet.rules):
        return False
    since, used = held.state_since, held.last_used
    target = (node.name, held.model_id)
    demand = fleet.demand
    return demand is None or demand.is_shared(target, newcomer.id, ready_since=since, last_used=used, now=now)


def residency_s(held: Residency, rules: EvictionRules) -> float:
    """How long the model stays after its load while others need it, in proportion to the cost of its next load."""
    longest_s, load_s = rules.min_residency_s, held.status.load_s
    if not longest_s or load_s is None:
        return longest_s
    return min(_LOADS_WORTH * load_s, max(longest_s, load_s))


def protection(
    held: Residency, node: Node, newcomer: ModelSpec, fleet: Fleet, now: float, *, background: bool
) -> tuple[Protection, str] | None:
    """The result of `protected`, with its description."""
    kept = protected(held, node, newcomer, fleet, now, background=background)
    age_s = now - held.state_since
    match kept:
        case None:
            return None
        case Protection.CHANGING:
            state = f"{held.state} for {duration(age_s)}"
            return kept, "it makes room for a model that has waited for longer" if held.closed else state
        case Protection.UNMANAGED:
            return kept, "its node does not unload models on request"
        case Protection.PINNED:
            is_pinned = held.pinned or fleet.catalogue.spec(held.model_id).is_pinned_on(node.name)
            return kept, f"pinned on {node.name}" if is_pinned else "its group is persistent"
        case Protection.PRIORITY:
            priority = fleet.catalogue.spec(held.model_id).priority
            return kept, f"its priority {priority} is higher than {newcomer.priority}"
        case Protection.BACKGROUND:
            return kept, "background requests evict nothing"
        case Protection.BUSY:
            running = max(held.in_flight, held.status.load.running + held.status.load.waiting)
            return kept, f"busy with {plural(running, 'request')}"
        case _ if (wanted_s := _kept_s(held.model_id, fleet, now)) > 0:
            return kept, f"a request keeps it for another {duration(wanted_s)} (`keep_alive`)"
        case _:
            kept_s = residency_s(held, fleet.rules) - age_s
            return kept, f"loaded {duration(age_s)} ago, kept for another {duration(kept_s)} for its other clients"


def choose(
    occupants: Sequence[Occupant],
    shortfall: Mapping[int, int],
    rules: EvictionRules,
) -> tuple[Occupant, ...] | None:
    """The occupants to evict for `shortfall` (bytes by device, `WHOLE_NODE` or `HOST`), or `None` when they cannot
    cover it.

    Chooses the cheapest first (`evict_cost`), then the least recently used (`lru`), or by lowest priority before both,
    until it fits. Then unnecessary victims are dropped, the largest first, so that the result is minimal. Models that
    are already leaving are chosen first and stay in the result.
    """

    def order(occupant: Occupant) -> tuple[float, ...]:
        return (not occupant.is_leaving, *by_eviction(occupant, rules))

    victims: list[Occupant] = []
    for occupant in sorted(occupants, key=order):
        if _covers(victims, shortfall):
            break
        if occupant.protection is None and occupant not in victims and any(map(occupant.frees, shortfall)):
            victims.append(occupant)
    if not _covers(victims, shortfall):
        return None
    for victim in sorted(victims, key=lambda occupant: (occupant.is_leaving, -occupant.num_bytes)):
        others = [other for other in victims if other is not victim]
        if _covers(others, shortfall):
            victims = others
    return tuple(victims)


def by_eviction(occupant: Occupant, rules: EvictionRules) -> tuple[float, ...]:
    """A sort key, the model to evict first first."""
    by_use = (occupant.evict_cost, occupant.last_used, occupant.num_bytes)
    return (occupant.priority, *by_use) if rules.strategy == "priority" else by_use


def expired(fleet: Fleet, now: float) -> tuple[ModelOnNode, ...]:
    """The models whose `ttl_s` has passed: ready ones unused for that long, and those asleep for that long.

    Pinned models never expire.
    """
    found = []
    for node in fleet.nodes:
        if not (node.healthy and node.takes_orders):
            continue
        for held in node.active:
            left_s = ttl_left_s(held, node, fleet, now)
            if left_s is not None and left_s <= 0 and held.state in _AT_REST and not held.is_busy:
                found.append(ModelOnNode(node.name, held.model_id))
    return tuple(found)


def ttl_left_s(held: Residency, node: Node, fleet: Fleet, now: float) -> float | None:
    """Seconds until the model's `ttl_s` and the `keep_alive` of its requests have passed if no request comes; None:
    it has no `ttl_s`."""
    spec = fleet.catalogue.spec(held.model_id)
    ttl_s = fleet.rules.ttl_s if spec.ttl_s is None else spec.ttl_s
    if not ttl_s or held.pinned or spec.is_pinned_on(node.name):
        return None
    unused_s = 0.0 if held.is_busy else now - held.seen_at + min(held.status.idle_s, held.status.state_age_s)
    kept_s = _kept_s(held.model_id, fleet, now)
    return max(ttl_s - unused_s, kept_s) if kept_s else ttl_s - unused_s


def over_ceilings(fleet: Fleet, now: float) -> tuple[ModelOnNode, ...]:
    """The models to evict after models have grown beyond a memory ceiling (`memory_mb`): as few idle ones as needed, by
    the strategy. None if that would not suffice, because busy models must first become idle."""
    found: list[ModelOnNode] = []
    for node in fleet.nodes:
        if not (node.healthy and node.takes_orders and (excess := _excess(node))):
            continue
        if not node.reservations and not any(held.state is ModelState.UNLOADING for held in node.active):
            devices = whole_ledger(node)
            idle = [_idle_occupant(held, devices, fleet) for held in node.active if _may_go(held, node, fleet, now)]
            found += [ModelOnNode(node.name, each.model_id) for each in choose(idle, excess, fleet.rules) or ()]
    return tuple(found)


def _excess(node: Node) -> dict[int, int]:
    """Bytes beyond the ceiling of each device, and of the `WHOLE_NODE`."""
    if node.ceiling_bytes is None and all(device.ceiling_bytes is None for device in node.devices):
        return {}
    devices = whole_ledger(node)
    over = {each.index: each.committed_bytes - each.ceiling_bytes for each in devices if each.ceiling_bytes is not None}
    if devices and (left_bytes := devices[0].node_left_bytes) is not None:
        over[WHOLE_NODE] = -left_bytes
    return {index: num_bytes for index, num_bytes in over.items() if num_bytes > 0}


def _may_go(held: Residency, node: Node, fleet: Fleet, now: float) -> bool:
    is_pinned = held.pinned or fleet.catalogue.spec(held.model_id).is_pinned_on(node.name)
    is_young = now - held.state_since < residency_s(held, fleet.rules)
    return held.state is ModelState.READY and not (held.is_busy or is_pinned or is_young)


def _idle_occupant(held: Residency, devices: Sequence[DeviceLedger], fleet: Fleet) -> Occupant:
    return Occupant(
        model_id=held.model_id,
        priority=fleet.catalogue.spec(held.model_id).priority,
        last_used=held.last_used,
        evict_cost=fleet.catalogue.spec(held.model_id).evict_cost,
        device_bytes={device.index: taken for device in devices if (taken := device.held_by(held.model_id))},
    )


def due_for_recycling(node: Node, rules: EvictionRules) -> bool:
    """Whether the node's workers should be replaced: enough loads since the last time, and the node is idle."""
    return 0 < rules.defrag_after_cycles <= node.num_loads and node.takes_orders and node.healthy and node.is_idle


def occupies(held: Residency, node: Node) -> bool:
    """Whether it holds device memory of `node`, or is about to."""
    return held.state in ON_DEVICE or (held.state is ModelState.ASLEEP and not is_freed_by_sleep(node))


def is_freed_by_sleep(node: Node) -> bool:
    """Whether sleeping models free the devices of `node`. If not, models must be unloaded."""
    return all(sleep_frees(device.kind) for device in node.devices)


def _covers(victims: Sequence[Occupant], shortfall: Mapping[int, int]) -> bool:
    return all(sum(victim.frees(index) for victim in victims) >= missing for index, missing in shortfall.items())
