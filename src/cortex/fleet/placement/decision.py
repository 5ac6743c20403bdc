"""The outcome of placement, with the reason for every node: the source of errors, `explain` and the event log."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from cortex.fleet.devices import MemoryReservation
from cortex.fleet.topology import ModelOnNode
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.contexts import missing_sixteenths
from cortex.wire.node.host_splits import HostSplit
from cortex.wire.node.protocol import DeviceKind, HostKV

from .eviction import Occupant, Protection

Origin = Literal["request", "background", "operator", "pin"]
"""A client, a client through a background alias (never evicts), the operator, or a pin (both load `manual` models)."""

Action = Literal["route", "join", "wake", "load", "wait", "reject"]
"""`route`: ready there. `join`: starting there, wait for it. `wake`, `load`: start it there, victims first.
`wait`: it will fit once current requests end. `reject`: waiting would not help."""


class Verdict(StrEnum):
    """The result of placement for one node, best first."""

    RESIDENT = "resident"
    STARTING = "starting"
    ASLEEP = "asleep"
    """Its weights are in the node's host memory, and its device has room for them."""
    FITS = "fits"
    FITS_SOON = "fits_soon"
    """Fits once models that are already unloading are gone; its load waits for that."""
    FITS_AFTER_EVICTION = "fits_after_eviction"
    BLOCKED = "blocked"
    """Would fit without models that are busy, recently loaded or changing state; waiting helps."""
    CROWDED = "crowded"
    """Would fit if other programs on the host used less memory; waiting may help."""
    DRAINING = "draining"
    STANDBY = "standby"
    """The node is suspended, or on its way there or back; a request that needs it wakes it."""
    UNHEALTHY = "unhealthy"
    FAILED = "failed"
    """Failed to load there within `retry_failed_after_s`."""
    UNSUPPORTED = "unsupported"
    """Failed because the node does not support the model."""
    HELD = "held"
    """Only pinned or more important models could make room; waiting does not help."""
    TOO_SMALL = "too_small"
    TOO_FEW_DEVICES = "too_few_devices"
    CANNOT_SPAN = "cannot_span"
    """The model needs more devices (`tensor_parallel`) than the node supports for one model."""
    WRONG_HARNESS = "wrong_harness"
    MANUAL = "manual"
    """Loaded only by order of the operator."""
    EXCLUDED = "excluded"
    """The catalogue keeps the model on other nodes (`only_on`)."""
    NOT_LISTED = "not_listed"
    """The node does not list the model."""


_STARTS = (Verdict.FITS, Verdict.FITS_SOON, Verdict.FITS_AFTER_EVICTION)
_WORSE = (*_STARTS, Verdict.BLOCKED)
"""Verdicts that rank lower if part of the model's weights is in host memory, or if it gets less context than wanted: it
waits for a better node."""
_FORMS = ("whole", "split", "short", "split and short")
_ORDER = [
    (verdict, form)
    for each in Verdict
    for verdict, form in [
        (each, "whole"),
        *([(worse, form) for form in _FORMS[1:] for worse in _WORSE] if each is Verdict.BLOCKED else ()),
    ]
]
RANK = {verdict: rank for rank, (verdict, form) in enumerate(_ORDER) if form == "whole"}
"""The order of verdicts, best first."""


def _ranks(wanted: str) -> dict[Verdict, int]:
    return RANK | {verdict: rank for rank, (verdict, form) in enumerate(_ORDER) if form == wanted}


SPLIT_RANK = _ranks("split")
"""The same if part of the weights is in host memory."""
SHORT_RANK = _ranks("short")
"""The same if the context is short."""
_SPLIT_SHORT_RANK = _ranks("split and short")
START_RANKS = frozenset(
    [RANK[verdict] for verdict in (Verdict.RESIDENT, Verdict.STARTING, Verdict.ASLEEP)]
    + [ranks[verdict] for ranks in (RANK, SPLIT_RANK, SHORT_RANK, _SPLIT_SHORT_RANK) for verdict in _STARTS]
)
"""Verdicts with which a model is served, woken or loaded."""


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """Needed and available memory on one device."""

    index: int
    kind: DeviceKind
    name: str
    total_bytes: int
    foreign_bytes: int
    kept_free_bytes: int
    """The part of the free memory that the node keeps free at a load."""
    ceiling_bytes: int | None = None
    """The most that models may hold there, where the operator limits it."""
    available_bytes: int
    need_bytes: int | None
    """The model's share on each device; `None` when its size is unknown."""
    chosen: bool = False


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """One node's verdict with the bytes behind it."""

    node: str
    verdict: Verdict
    reason: str
    pinned: bool = False
    """The catalogue pins the model on this node."""
    asleep: bool = False
    """Its weights are in this node's host memory: it wakes instead of loading from disk."""
    need_bytes: int | None = None
    """The bytes needed over all its devices."""
    takes_bytes: int | None = None
    """The bytes that it will take over all its devices; more than the need if there is room for more KV cache."""
    max_bytes: int | None = None
    """The bytes that ceilings permit it over all its devices; `None` without a ceiling."""
    is_cut: bool = False
    """Whether its KV cache will be smaller than possible."""
    context_tokens: int | None = None
    """The context that it has or will approximately get there; `None` if unknown."""
    full_context_tokens: int | None = None
    """The full context of the model, or of its entry."""
    min_context_tokens: int = 1
    """The minimum that was decided; the node rejects the load with less."""
    is_short: bool = False
    """Whether the context will be less than wanted, which happens only if no eviction could give it more."""
    devices: tuple[int, ...] = ()
    victims: tuple[Occupant, ...] = ()
    rows: tuple[DeviceRow, ...] = ()
    held_by: frozenset[Protection] = frozenset()
    """The lasting protections that block the model, if the verdict is `held`."""
    ceiling_bytes: int | None = None
    """The most that models may hold on the node, where the operator limits it."""
    occupants: tuple[Occupant, ...] = ()
    """The models that hold memory there, and why each may or may not be evicted."""
    load: float = 0.0
    """How busy the model is there, if resident."""
    bench: BenchResult | None = None
    """How fast it is there, as measured."""
    slower_by: float = 0.0
    """How much slower than the fastest measured node, as a fraction; 0 if not measured."""
    kv_host: HostKV | None = None
    """Bytes of its KV cache in the node's host memory: conversations that a load there continues."""
    split: HostSplit | None = None
    """Its weights in host memory there and the resulting speed; `None` if all are on devices."""
    is_split_measured: bool = False
    """Whether its speed follows from measured rates."""
    host_left_bytes: int | None = None
    """Host memory available to a load there; `None` if irrelevant."""
    kv_elsewhere: float = 0.0
    """The fraction that is missing compared with the node that keeps the most; 0 if no node keeps any."""
    parts: tuple[Assessment, ...] = ()
    """The assessments of the other members of a model that several nodes run together."""

    @property
    def rank(self) -> int:
        """The order of its verdict, best first."""
        if self.split is not None:
            return (_SPLIT_SHORT_RANK if self.is_short else SPLIT_RANK)[self.verdict]
        return (SHORT_RANK if self.is_short else RANK)[self.verdict]

    @property
    def missing_context(self) -> int:
        """The sixteenths of the full context that it lacks there; 0 if unknown."""
        if self.context_tokens is None or not self.full_context_tokens:
            return 0
        return missing_sixteenths(self.context_tokens, self.full_context_tokens)

    @property
    def evictions(self) -> tuple[ModelOnNode, ...]:
        """The victims, each on the node that serves it."""
        return tuple(ModelOnNode(victim.leader or self.node, victim.model_id) for victim in self.victims)

    @property
    def waits_for_foreground(self) -> bool:
        """Whether the model is blocked only because the request is in the background; another request could load it."""
        return self.verdict is Verdict.HELD and self.held_by == {Protection.BACKGROUND}

    @property
    def waits_for_itself(self) -> bool:
        """Whether only the model's own unload is pending."""
        return self.verdict is Verdict.BLOCKED and not self.occupants

    def reservation(self, model_id: str) -> MemoryReservation:
        """The memory reserved for a load of the model there until it ends."""
        if self.need_bytes is None and self.takes_bytes is None:  # unknown until it is measured: all that is left
            rest = tuple(
                row.available_bytes + sum(victim.frees(row.index) for victim in self.victims)
                for index in self.devices
                for row in self.rows
                if row.index == index
            )
            return MemoryReservation(model_id=model_id, devices=self.devices, num_bytes=sum(rest), device_bytes=rest)
        takes_bytes = self.takes_bytes or 0
        needs = {row.index: row.need_bytes or 0 for row in self.rows if row.chosen}
        total = sum(needs.values())
        parts = tuple(-(-takes_bytes * needs.get(index, 0) // total) for index in self.devices) if total else ()
        return MemoryReservation(
            model_id=model_id,
            devices=self.devices,
            num_bytes=takes_bytes,
            device_bytes=parts,
            host_bytes=0 if self.split is None else self.split.host_bytes,
        )


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome, with the assessments behind it, best node first."""

    model_id: str
    at: float
    origin: Origin
    action: Action
    assessments: tuple[Assessment, ...]
    num_omitted: int = 0
    """The nodes not assessed, because none can be better than the first."""

    @property
    def chosen(self) -> Assessment | None:
        """The node to use; `None` when the action is `wait` or `reject`."""
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
    def evictions(self) -> tuple[ModelOnNode, ...]:
        """The victims, including those on the other nodes of its group; each once, on the node that serves it."""
        places = (self.chosen, *self.chosen.parts) if self.chosen else ()
        return tuple(dict.fromkeys(eviction for place in places for eviction in place.evictions))

    @property
    def parts(self) -> tuple[Assessment, ...]:
        return self.chosen.parts if self.chosen else ()

    @property
    def need_bytes(self) -> int | None:
        return self.chosen.need_bytes if self.chosen else None

    @property
    def max_bytes(self) -> tuple[int | None, ...]:
        """The maximum bytes that the load may take of each of its nodes."""
        return tuple(place.max_bytes for place in (self.chosen, *self.chosen.parts)) if self.chosen else ()

    @property
    def takes_bytes(self) -> int | None:
        """The bytes reserved for the load until it ends."""
        return self.chosen.takes_bytes if self.chosen else None
