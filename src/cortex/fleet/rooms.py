"""Room for a model on a node: sets of devices, and the models whose eviction frees enough of them.

Two things limit what a model may take: the memory of each device, and the operator's ceilings (`memory_mb`) for a
device and for the whole node. An unload on any device relieves the ceiling of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from .eviction import WHOLE_NODE, Occupant, choose
from .memory import DeviceLedger
from .rules import PlacementRules
from .topology import Fleet
from .units import gib


class Room(msgspec.Struct, frozen=True):
    """Devices to use, and the models to evict from them or, for the node's ceiling, from others."""

    devices: tuple[DeviceLedger, ...]
    victims: tuple[Occupant, ...] = ()

    def freed_bytes(self, index: int) -> int:
        return sum(victim.frees(index) for victim in self.victims)

    @property
    def max_bytes(self) -> int | None:
        """What the ceilings let a load take here, over all devices; all of them get the same share."""
        limits = [
            len(self.devices) * (device.ceiling_bytes - device.committed_bytes + self.freed_bytes(device.index))
            for device in self.devices
            if device.ceiling_bytes is not None
        ]
        limits += [
            device.node_left_bytes + self.freed_bytes(WHOLE_NODE)
            for device in self.devices[:1]
            if device.node_left_bytes is not None
        ]
        return max(1, min(limits)) if limits else None


def free_devices(
    eligible: Sequence[DeviceLedger], count: int, share: int, rules: PlacementRules
) -> tuple[DeviceLedger, ...]:
    """`count` devices with room for `share`: the fullest, or to spread the emptiest. Empty when there are fewer."""
    sign = -1 if rules.strategy == "spread" else 1
    roomy = sorted(
        (device for device in eligible if device.available_bytes >= share and _fits_node(device, count * share)),
        key=lambda device: (sign * device.available_bytes, device.index),
    )
    return tuple(roomy[:count]) if len(roomy) >= count else ()


def _fits_node(device: DeviceLedger, num_bytes: int) -> bool:
    return device.node_left_bytes is None or num_bytes <= device.node_left_bytes


def smallest_share(devices: Sequence[DeviceLedger]) -> str:
    """Which of a model's devices decides how much each of them takes, if they differ."""
    least, *others = sorted(devices, key=lambda device: device.available_bytes)
    if not others or gib(least.available_bytes) == gib(others[-1].available_bytes):
        return ""
    return f"; device {least.index} with {gib(least.available_bytes)} free decides the share of each"


def rooms(
    sets: Sequence[tuple[DeviceLedger, ...]],
    occupants: Sequence[Occupant],
    fleet: Fleet,
    share: int,
    have: Callable[[DeviceLedger], int],
) -> Iterator[Room]:
    for devices in sets:
        missing = {device.index: _missing(device, share, have(device)) for device in devices}
        if (left_bytes := devices[0].node_left_bytes) is not None:
            missing[WHOLE_NODE] = len(devices) * share - left_bytes
        shortfall = {index: num_bytes for index, num_bytes in missing.items() if num_bytes > 0}
        victims = choose(occupants, shortfall, fleet.rules)
        if victims is not None:
            yield Room(devices, victims)


def _missing(device: DeviceLedger, share: int, have_bytes: int) -> int:
    """What must be freed for `share`, of the device's memory and of its ceiling."""
    missing = device.free_bytes_for(share) - have_bytes
    if device.ceiling_bytes is None:
        return missing
    return max(missing, device.committed_bytes + share - device.ceiling_bytes)


def harm(room: Room) -> tuple[float, ...]:
    """The order of preference: fewest bytes, least recently used, lowest priority."""
    return (
        sum(victim.num_bytes for victim in room.victims),
        max((victim.last_used for victim in room.victims), default=0.0),
        max((victim.priority for victim in room.victims), default=0),
        *(device.index for device in room.devices),
    )
