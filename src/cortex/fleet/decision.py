"""What placement decided, and for every node considered why: the record behind errors, `explain` and the event log."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from cortex.wire.node import DeviceKind

from .eviction import Occupant

Origin = Literal["request", "background", "operator"]
"""Who asks: a client, a client through a background alias (never evicts), or a person (may load `manual` models)."""

Action = Literal["route", "join", "wake", "load", "wait", "refuse"]
"""`route`: ready there. `join`: starting there, wait for it. `wake`, `load`: start it there, victims first.
`wait`: it would fit once current work ends. `refuse`: waiting would not help."""


class Verdict(StrEnum):
    """What placement thinks of one node, best first."""

    RESIDENT = "resident"
    STARTING = "starting"
    ASLEEP = "asleep"
    """Its weights are in the node's host memory, and their device has room for them."""
    FITS = "fits"
    FITS_AFTER_EVICTION = "fits_after_eviction"
    BLOCKED = "blocked"
    """Would fit if models that are busy, young or changing were gone; waiting helps."""
    CROWDED = "crowded"
    """Would fit if other programs on the host used less memory; they may."""
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    FAILED = "failed"
    """Failed to load there a moment ago."""
    HELD = "held"
    """Only pinned or more important models could make room; waiting does not help."""
    TOO_SMALL = "too_small"
    TOO_FEW_DEVICES = "too_few_devices"
    CANNOT_SPAN = "cannot_span"
    """The model must span more devices (`min_devices`) than the node supports for one model."""
    WRONG_HARNESS = "wrong_harness"
    MANUAL = "manual"
    """Is loaded by hand only."""
    NOT_LISTED = "not_listed"
    """The node does not know the model."""


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """Need and have on one device."""

    index: int
    kind: DeviceKind
    name: str
    total_bytes: int
    foreign_bytes: int
    kept_free_bytes: int
    """Of what is free now, what the node leaves free at a load."""
    available_bytes: int
    need_bytes: int | None
    """The model's share on a device of this node; `None` when its size is not known."""
    chosen: bool = False


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """One node's verdict with its numbers."""

    node: str
    verdict: Verdict
    reason: str
    pinned: bool = False
    """The catalogue pins the model on this node."""
    asleep: bool = False
    """Its weights are in this node's host memory, beside the devices chosen: it wakes rather than loads."""
    need_bytes: int | None = None
    """What was looked for, over all its devices."""
    takes_bytes: int | None = None
    """What it will take there, over all its devices; more than the need where its cache grows with the room."""
    is_cut: bool = False
    """It will have less room for its cache there than it could use."""
    devices: tuple[int, ...] = ()
    victims: tuple[Occupant, ...] = ()
    rows: tuple[DeviceRow, ...] = ()
    occupants: tuple[Occupant, ...] = ()
    """Who holds memory there, and why each may or may not be displaced."""
    load: float = 0.0
    """How busy the model is there, where it is resident."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome, with every assessment, best node first."""

    model_id: str
    at: float
    origin: Origin
    action: Action
    assessments: tuple[Assessment, ...]

    @property
    def chosen(self) -> Assessment | None:
        """The node to use; `None` when the action is `wait` or `refuse`."""
        return self.assessments[0] if self.action in ("route", "join", "wake", "load") else None

    @property
    def node(self) -> str | None:
        return self.chosen.node if self.chosen else None

    @property
    def devices(self) -> tuple[int, ...]:
        return self.chosen.devices if self.chosen else ()

    @property
    def victims(self) -> tuple[str, ...]:
        """Models to unload on `node` before the load."""
        return tuple(victim.model_id for victim in self.chosen.victims) if self.chosen else ()

    @property
    def need_bytes(self) -> int | None:
        return self.chosen.need_bytes if self.chosen else None

    @property
    def takes_bytes(self) -> int | None:
        """What to reckon with until it has loaded."""
        return self.chosen.takes_bytes if self.chosen else None
