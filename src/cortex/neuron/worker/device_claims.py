"""Which devices of a node have a rank of a divided model, and which of these models span nodes.

Divided models of one node take turns on shared devices through locks (`step_link.py`), which do not reach other hosts.
So a device with a rank of a model that spans nodes has no rank of another divided model. Models that are whole on a
device wait for no one, and are not concerned.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class DeviceClaims:
    """Belongs to the daemon's loop."""

    _taken: list[DeviceClaim] = field(default_factory=list)

    def new(self, model_id: str, devices: Collection[int], *, spans: bool) -> DeviceClaim:
        return DeviceClaim(model_id, frozenset(devices), spans, self._taken)

    def conflicts(self, *, spans: bool) -> dict[int, str]:
        """The devices that a divided model must not use, and why. `spans`: whether it spans nodes."""
        return {
            index: f"it has a part of {claim.model_id}"
            + (", which spans nodes" if claim.spans else ", and a model that spans nodes shares no device with it")
            for claim in self._taken
            if spans or claim.spans
            for index in claim.devices
        }


@dataclass(eq=False, slots=True)
class DeviceClaim:
    """The claim of one load. Taking and releasing are idempotent."""

    model_id: str
    devices: frozenset[int]
    spans: bool
    _taken: list[DeviceClaim]

    def conflict(self) -> str | None:
        """Why the model must not be loaded on these devices now; None: it may."""
        for other in self._taken:
            if other is not self and other.devices & self.devices and (self.spans or other.spans):
                return f"its devices have a part of {other.model_id}, and a model that spans nodes shares none"
        return None

    def take(self) -> None:
        if self not in self._taken:
            self._taken.append(self)

    def release(self) -> None:
        if self in self._taken:
            self._taken.remove(self)
