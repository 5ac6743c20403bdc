"""What models held of each device over time. Pure.

It changes only when models come and go, so that changes are kept instead of samples: a day of a large fleet is small.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from cortex.fleet.holdings import as_model, bytes_held
from cortex.fleet.topology import Fleet
from cortex.wire.node.protocol import ModelState

MAX_CHANGES = 20_000
"""Changes that are kept of all devices together; the oldest are dropped."""


class DeviceKey(NamedTuple):
    node: str
    device: int


class Holdings(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What was on a device from a moment on."""

    at: float
    node: str
    index: int
    total_bytes: int
    used_bytes: int
    """By anything, other programs included; as of that moment."""
    models: tuple[tuple[str, int], ...]

    @property
    def key(self) -> DeviceKey:
        return DeviceKey(self.node, self.index)


class DeviceMemory:
    """The changes of a day, oldest first."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._changes: deque[Holdings] = deque()
        self._latest: dict[DeviceKey, Holdings] = {}

    def sample(self, fleet: Fleet, now: float) -> None:
        """Record the devices that hold other models than before. One whose node is down or gone holds none."""
        found = list(holdings_of(fleet, now))
        unknown = {node.name for node in fleet.nodes if not node.healthy and node.problem is None}
        for key in self._latest.keys() - {each.key for each in found}:
            latest = self._latest[key]
            if latest.models and key.node not in unknown:
                found.append(msgspec.structs.replace(latest, at=now, used_bytes=0, models=()))
            elif not latest.models and latest.at < now - self._keep_s:
                del self._latest[key]
        for holdings in found:
            before = self._latest.get(holdings.key)
            if before is None or before.models != holdings.models or before.total_bytes != holdings.total_bytes:
                self._add(holdings)
        while self._changes and (self._changes[0].at < now - self._keep_s or len(self._changes) > MAX_CHANGES):
            self._changes.popleft()

    def restore(self, changes: list[Holdings], now: float) -> None:
        for holdings in sorted(changes, key=lambda each: each.at):
            if now - self._keep_s <= holdings.at <= now:
                self._add(holdings)

    def since(self, at: float) -> list[Holdings]:
        """The changes at `at` or later, and for each device what held before."""
        before: dict[DeviceKey, Holdings] = {}
        later: list[Holdings] = []
        for holdings in self._changes:
            if holdings.at < at:
                before[holdings.key] = holdings
            else:
                later.append(holdings)
        missing = {key: latest for key, latest in self._latest.items() if latest.at < at and key not in before}
        return [*before.values(), *missing.values(), *later]

    def _add(self, holdings: Holdings) -> None:
        self._changes.append(holdings)
        self._latest[holdings.key] = holdings


def holdings_of(fleet: Fleet, now: float) -> Iterator[Holdings]:
    """What each device holds now; nothing of a node that is down."""
    for node in fleet.nodes:
        if not node.healthy:
            continue
        statuses = [held.status for held in node.residencies.values() if held.state is not ModelState.COLD]
        statuses += map(as_model, node.shares)
        for device in node.devices:
            sizes = ((status.id, bytes_held(device.index, device.kind, status)) for status in statuses)
            yield Holdings(
                at=now,
                node=node.name,
                index=device.index,
                total_bytes=device.total_bytes,
                used_bytes=device.total_bytes - device.free_bytes,
                models=tuple(sorted((model, num_bytes) for model, num_bytes in sizes if num_bytes)),
            )
