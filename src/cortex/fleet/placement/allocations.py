"""Sets of devices for a model on a node, and the models whose eviction frees enough memory.

Two things limit what a model may take: the memory of each device, and the operator's ceilings (`memory_mb`) for a
device and for the whole node. An unload on any device relieves the ceiling of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from cortex.fleet.memory import DeviceLedger
from cortex.fleet.rules import PlacementRules
from cortex.fleet.topology import Fleet
from cortex.formats.units import gib
from cortex.wire.node.device_choice import Division, choose_devices

from .eviction import HOST, WHOLE_NODE, Occupant, choose


def explained(division: Division, devices: Sequence[DeviceLedger], stage_layers: Sequence[int]) -> str:
    """The reason for the shares on `devices`, if they differ. `stage_layers`: those that the node knows."""
    if not division.by_layers:
        return smallest_share(devices)
    in_order = sorted(devices, key=lambda device: device.index)
    shares = division.shares({device.index: device.available_bytes for device in in_order})
    counts = stage_layers if len(stage_layers) == len(in_order) else ()
    parts = [f"{gib(shares[device.index])} on device {device.index}" for device in in_order]
    if counts:
        parts = [f"{count} layers, {part}" for count, part in zip(counts, parts, strict=True)]
    return f"; layers by memory: {'; '.join(parts)}"


class Allocation(msgspec.Struct, frozen=True):
    """The devices to use, and the models to evict from them or, because of the node's ceiling, from others."""

    devices: tuple[DeviceLedger, ...]
    victims: tuple[Occupant, ...] = ()
    by_layers: bool = False

    def freed_bytes(self, index: int) -> int:
        return sum(victim.frees(index) for victim in self.victims)

    def usable_bytes(self, device: DeviceLedger) -> int:
        """Bytes that a load may take of a device once the victims are unloaded."""
        freed_bytes = self.freed_bytes(device.index)
        usable_bytes = device.usable_bytes(device.balance_bytes + freed_bytes)
        if device.ceiling_bytes is None:
            return usable_bytes
        return max(0, min(usable_bytes, device.ceiling_bytes - device.committed_bytes + freed_bytes))

    @property
    def max_bytes(self) -> int | None:
        """Bytes that the ceilings permit a load here, over all devices, in equal shares. Layers are divided by the
        node, within the ceilings of its devices."""
        limits = [
            len(self.devices) * (device.ceiling_bytes - device.committed_bytes + self.freed_bytes(device.index))
            for device in self.devices
            if device.ceiling_bytes is not None and not self.by_layers
        ]
        limits += [
            device.node_left_bytes + self.freed_bytes(WHOLE_NODE)
            for device in self.devices[:1]
            if device.node_left_bytes is not None
        ]
        return max(1, min(limits)) if limits else None


def free_devices(
    eligible: Sequence[DeviceLedger], division: Division, rules: PlacementRules
) -> tuple[DeviceLedger, ...]:
    """The devices for the model, if it fits in free memory and under the node's ceiling; else empty."""
    left = [device.node_left_bytes for device in eligible if device.node_left_bytes is not None]
    if left and division.num_devices * division.share > min(left):
        return ()
    chosen = choose_devices(division, {device.index: device.available_bytes for device in eligible}, rules.strategy)
    return tuple(device for device in eligible if device.index in chosen)


def smallest_share(devices: Sequence[DeviceLedger]) -> str:
    """The device that limits the share of each, if they differ."""
    least, *others = sorted(devices, key=lambda device: device.available_bytes)
    if not others or gib(least.available_bytes) == gib(others[-1].available_bytes):
        return ""
    return f"; device {least.index} with {gib(least.available_bytes)} free decides the share of each"


def allocations(
    sets: Sequence[tuple[DeviceLedger, ...]],
    occupants: Sequence[Occupant],
    fleet: Fleet,
    division: Division,
    have: Callable[[DeviceLedger], int],
    host_missing_bytes: int = 0,
) -> Iterator[Allocation]:
    """The sets of devices on which evictions free enough, with their victims. `host_missing_bytes`: host memory that
    they must free as well."""
    for devices in sets:
        shares = division.shares({device.index: device.capacity_bytes for device in devices})
        missing = {device.index: _missing(device, shares[device.index], have(device)) for device in devices}
        missing[HOST] = host_missing_bytes
        if (left_bytes := devices[0].node_left_bytes) is not None:
            missing[WHOLE_NODE] = len(devices) * division.share - left_bytes
        shortfall = {index: num_bytes for index, num_bytes in missing.items() if num_bytes > 0}
        victims = choose(occupants, shortfall, fleet.rules)
        if victims is not None:
            yield Allocation(devices, victims, division.by_layers)


def _missing(device: DeviceLedger, share: int, have_bytes: int) -> int:
    """The bytes to free for `share`, of the device's memory and its ceiling."""
    missing = device.free_bytes_for(share) - have_bytes
    if device.ceiling_bytes is None:
        return missing
    return max(missing, device.committed_bytes + share - device.ceiling_bytes)


def harm(allocation: Allocation) -> tuple[float, ...]:
    """A sort key, best first: lowest cost, fewest evicted bytes, least recently used, lowest priority. Models that are
    already leaving do not count."""
    victims = [victim for victim in allocation.victims if not victim.is_leaving]
    return (
        sum(max(0.0, victim.evict_cost - 1) for victim in victims),
        sum(victim.whole_bytes * min(1.0, victim.evict_cost) for victim in victims),
        sum(victim.whole_bytes for victim in victims),
        max((victim.last_used for victim in victims), default=0.0),
        max((victim.priority for victim in victims), default=0),
        *(device.index for device in allocation.devices),
    )
