"""A snapshot of the fleet: nodes, devices and models as reported, with the gateway's additions.

Snapshots are immutable; every change makes a new one. All times are on the caller's monotonic clock. A snapshot informs
a decision; the node itself is the authority on its state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from cortex.wire.errors import FilesDamaged, ModelUnsupported, SourceNotFound
from cortex.wire.node.load_options import is_path
from cortex.wire.node.protocol import (
    DiskUse,
    HostHealth,
    ModelLoad,
    ModelState,
    ModelStatus,
    PullStatus,
)

from .catalogue import Catalogue, ModelSpec
from .demand import Demand
from .devices import Ceilings, DeviceState, MemoryReservation, bytes_held
from .index import FleetIndex, carry, remembered
from .rules import EvictionRules, PlacementRules

STARTING = frozenset({ModelState.DOWNLOADING, ModelState.LOADING, ModelState.RECOVERING})
"""States that lead to `ready` without another order."""


class ModelOnNode(NamedTuple):
    """One model on one node, as a key."""

    node: str
    model: str


class Residency(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One model on one node: the node's report, with this gateway's additions."""

    status: ModelStatus
    seen_at: float
    in_flight: int = 0
    """Requests this gateway has there now. Fresher than the node's last report."""
    pinned: bool = False
    """Pinned by the operator, beyond the catalogue."""
    closed: bool = False
    """It takes no new requests, and is unloaded for an overdue model once its running requests have ended."""

    @property
    def model_id(self) -> str:
        return self.status.id

    @property
    def state(self) -> ModelState:
        return self.status.state

    @property
    def is_unusable(self) -> bool:
        """Whether the node has read its files and cannot use them: they are damaged or unsupported. It reads them again
        when they change. (A load that was unsupported may have had other options.)"""
        if self.state is not ModelState.COLD:
            return False
        is_unsupported = self.is_unsupported and self.status.state_age_s == 0  # never asked for
        return is_unsupported or self.status.reason_code == FilesDamaged.code

    @property
    def is_unsupported(self) -> bool:
        """Whether the node last reported it as unsupported."""
        is_out = self.state in (ModelState.COLD, ModelState.FAILED)
        return is_out and self.status.reason_code == ModelUnsupported.code

    @property
    def is_absent(self) -> bool:
        """Whether the node has no usable files of it."""
        if self.is_unusable:
            return True
        is_named_by_path = is_path(self.status.source or "")
        return is_named_by_path and self.state is ModelState.COLD and self.status.reason_code == SourceNotFound.code

    @property
    def failure(self) -> str | None:
        """Why the last load failed, or why the node lost the model. None if it has the model or was never asked to load
        it: unused damaged files are not a failure."""
        is_out = self.state in (ModelState.COLD, ModelState.FAILED) and not self.is_absent
        return self.status.reason if is_out and self.status.state_age_s > 0 else None

    @property
    def is_busy(self) -> bool:
        return self.in_flight > 0 or self.status.load.running > 0 or self.status.load.waiting > 0

    @property
    def last_used(self) -> float:
        return self.seen_at - self.status.idle_s

    @property
    def state_since(self) -> float:
        return self.seen_at - self.status.state_age_s

    @property
    def num_bytes(self) -> int | None:
        """Size over all its devices: measured, else estimated."""
        return self.status.measured_bytes if self.status.measured_bytes is not None else self.status.estimate_bytes


class Abilities(msgspec.Struct, frozen=True):
    """What a gateway may ask of a node. All differences between neurons and foreign servers follow from these."""

    takes_orders: bool = True
    """It loads, unloads, downloads and measures models on order, and reports about them."""
    reads_headers: bool = True
    """It reads our headers, such as budgets and tenants, and reports usage and errors in headers. Others get limits in
    the body and nothing else."""
    reads_salt: bool = False
    """It separates cached prefixes by the field `cache_salt` of requests."""
    dialects: tuple[str, ...] = ("openai_chat",)
    set_params: dict[str, Any] = {}
    """Fields set in every request to it, overriding those of the client."""
    strip_params: tuple[str, ...] = ()
    """Fields of the client that are removed."""


class PlacementState(NamedTuple):
    """The facts of a node that affect decisions for waiting models, apart from requests and time."""

    is_open: bool
    is_undecided: bool
    free_bytes: tuple[int, ...]
    """In units of 256 MiB."""
    models: tuple[tuple[str, ModelState], ...]
    """The models that are not cold."""
    num_listed: int
    reservations: tuple[MemoryReservation, ...]
    members: tuple[tuple[str, ModelState, tuple[int, ...], int | None], ...]
    host_bytes: int
    """The rest of the host memory budget, in the same units."""


Sleep = Literal["awake", "suspending", "asleep", "waking", "lost"]
RESERVES: tuple[Sleep, ...] = ("suspending", "asleep", "waking")
"""The reason for nodes that serve nothing now but will when needed."""


class Node(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One host, or one foreign server, as of its last report. `remembered` values are cached in it."""

    name: str
    devices: tuple[DeviceState, ...] = ()
    residencies: dict[str, Residency] = msgspec.field(default_factory=dict)
    """By model id, cold and failed models included."""
    ceilings: Ceilings = Ceilings()
    ceiling_bytes: int | None = None
    """Ceiling for models over all devices: the smaller of `ceilings` and the node's own."""
    host: HostHealth | None = None
    """The memory of the host; None if not reported."""
    abilities: Abilities = Abilities()
    max_devices_per_model: int = 1
    can_sleep: bool = True
    """Whether models that it unloads may sleep."""
    harnesses: tuple[str, ...] = ("torch",)
    group_harnesses: tuple[str, ...] = ()
    """The harnesses that run a model on several nodes."""
    healthy: bool = False
    draining: bool = False
    """It gets no new requests or loads, because it is shutting down or drained."""
    drained: bool = False
    """Drained by the operator."""
    missed_polls: int = 0
    sleep: Sleep = "awake"
    """Whether this gateway has suspended or woken it; `lost`: it did not come back."""
    problem: str | None = None
    """Why it is not healthy, or why its devices cannot be used."""
    reservations: tuple[MemoryReservation, ...] = ()
    num_loads: int = 0
    """Loads since its workers were last recycled."""
    disk: DiskUse | None = None
    watts: float | None = None
    """Total power draw of its devices and processor packages that can be read."""
    pulls: tuple[PullStatus, ...] = ()
    """Downloads without a load."""
    members: tuple[ModelStatus, ...] = ()
    """Group members that it runs but does not serve: `rank` is 1 or more."""
    raised_needs: dict[str, int] = {}
    """Minimum bytes by model that it serves, raised after a load ran out of memory."""

    @property
    def takes_orders(self) -> bool:
        """Whether it loads and unloads models; foreign servers do not."""
        return self.abilities.takes_orders

    @property
    def why_draining(self) -> str:
        return f"drained by the operator: run `cortex undrain {self.name}`" if self.drained else "shutting down"

    def harness_of(self, spec: ModelSpec) -> str:
        """The harness that runs the model here: from the catalogue, else from the node's configuration, else the
        engine."""
        held = self.residencies.get(spec.id)
        return spec.harness or (held.status.harness if held is not None else "torch")

    def num_nodes_of(self, spec: ModelSpec) -> int:
        """How many nodes run a model that this one serves: as loaded, else from the catalogue."""
        held = self.residencies.get(spec.id)
        return len(held.status.nodes) if held is not None and held.status.nodes else spec.num_nodes

    def shown_state(self, held: Residency) -> ModelState:
        """That of one of its models for people: what it reported last says little while it does not respond."""
        if self.healthy:
            return held.state
        return ModelState.SUSPENDED if self.sleep in RESERVES else ModelState.UNREACHABLE

    @cached_property
    def active(self) -> tuple[Residency, ...]:
        """The models that are not cold: few of the many that a node lists."""
        return tuple([self.residencies[model_id] for model_id in _active_ids(self)])

    @cached_property
    def placement_state(self) -> PlacementState:
        return PlacementState(
            self.healthy and not self.draining,
            not self.healthy and self.problem is None,
            tuple(device.free_bytes >> 28 for device in self.devices),
            tuple([(held.status.id, held.status.state) for held in self.active]),
            len(self.residencies),
            self.reservations,
            tuple([(each.id, each.state, each.devices, each.measured_bytes) for each in self.members]),
            0 if self.host is None else (self.host.budget_bytes - self.host.weight_bytes) >> 28,
        )

    @cached_property
    def is_idle(self) -> bool:
        """No request runs, and no model loads or unloads there."""
        return not self.reservations and not any(
            held.is_busy or held.state in STARTING or held.state is ModelState.UNLOADING for held in self.active
        )


@remembered
def _active_ids(node: Node) -> tuple[str, ...]:
    return tuple([id for id, held in node.residencies.items() if held.status.state is not ModelState.COLD])


Measured = dict[tuple[str, str | None, int | None], int]
"""Bytes by model id, quant and context."""


class Fleet(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The input of every decision. `with_nodes` derives a fleet that differs in a few nodes and keeps what those do not
    change."""

    nodes: tuple[Node, ...] = ()
    catalogue: Catalogue = Catalogue()
    rules: EvictionRules = EvictionRules()
    placement: PlacementRules = PlacementRules()
    measured: Measured = msgspec.field(default_factory=dict)
    """Measured bytes of models, by id, quant and context; kept by the gateway across restarts."""
    demand: Demand | None = None
    """Which clients use and await models; None if unknown."""

    @cached_property
    def index(self) -> FleetIndex:
        """Where each node and each model is."""
        return FleetIndex.of(self.nodes)

    @cached_property
    def estimates(self) -> dict[str, int | None]:
        """Nodes' size estimates of models, filled on demand."""
        return {}

    def node(self, name: str) -> Node | None:
        position = self.index.positions.get(name)
        return None if position is None else self.nodes[position]

    def live_models(self) -> Set[str]:
        """Every model id that some node lists."""
        return self.index.listing.keys()

    def listing(self, model_id: str) -> list[Node]:
        """The nodes that list `model_id`, in any state."""
        return [self.nodes[position] for position in self.index.listing.get(model_id, ())]

    def replicas(self, model_id: str) -> Iterator[tuple[Node, Residency]]:
        """The nodes that take requests and have `model_id` ready."""
        for node in self.listing(model_id):
            held = node.residencies[model_id]
            if held.state is not ModelState.READY or not node.healthy or node.draining:
                continue
            if self.draining_member(held) is None:
                yield node, held

    def leader_of(self, member: ModelStatus) -> tuple[Node, Residency] | None:
        """The node that serves the model of a member, and the model there. `None` if it is not in this fleet or no
        longer lists the model."""
        node = self.node(member.nodes[0])
        held = None if node is None else node.residencies.get(member.id)
        return None if node is None or held is None else (node, held)

    def members(self, leader: str, model_id: str) -> tuple[tuple[Node, ModelStatus], ...]:
        """The other nodes of the group that `leader` serves, each with its member."""
        having = (self.nodes[position] for position in self.index.sharing)
        return tuple(
            (node, member)
            for node in having
            for member in node.members
            if member.id == model_id and member.nodes[0] == leader
        )

    def draining_member(self, held: Residency) -> Node | None:
        """A draining node of the model's group, with which the model drains."""
        named = (self.node(name) for name in held.status.nodes[1:])
        return next((node for node in named if node is not None and node.draining), None)

    def with_node(self, changed: Node) -> Fleet:
        """This fleet with one node replaced, or added."""
        if self.node(changed.name) is None:
            return msgspec.structs.replace(self, nodes=(*self.nodes, changed))
        return self.with_nodes((changed,))

    def with_nodes(
        self, changed: Collection[Node], *, measured: Measured | None = None, index: FleetIndex | None = None
    ) -> Fleet:
        """This fleet with these nodes replaced and with these measured sizes. The index is derived, not rebuilt, unless
        `index` has it already."""
        measured = self.measured if measured is None else measured
        if not changed and measured is self.measured:
            return self
        nodes = list(self.nodes)
        for node in changed:
            nodes[self.index.positions[node.name]] = node
        fleet = msgspec.structs.replace(self, nodes=tuple(nodes), measured=measured)
        fleet.__dict__["index"] = index or self.index.changed(self.nodes, changed)
        return fleet

    def without(self, gone: Collection[ModelOnNode]) -> Fleet:
        """This fleet once these models are unloaded, each with all members of its group."""
        return msgspec.structs.replace(self, nodes=tuple(self._freed(node, gone) for node in self.nodes))

    def _freed(self, node: Node, gone: Collection[ModelOnNode]) -> Node:
        members = [member for member in node.members if ModelOnNode(member.nodes[0], member.id) in gone]
        models = [held for model, held in node.residencies.items() if ModelOnNode(node.name, model) in gone]
        statuses = [*(held.status for held in models), *members]

        def freed(device: DeviceState) -> DeviceState:
            here = [bytes_held(device.index, device.kind, status) for status in statuses]
            return msgspec.structs.replace(device, free_bytes=min(device.total_bytes, device.free_bytes + sum(here)))

        return msgspec.structs.replace(
            node,
            devices=tuple(map(freed, node.devices)),
            residencies={model: held for model, held in node.residencies.items() if held not in models},
            members=tuple(member for member in node.members if member not in members),
        )

    def with_in_flight(self, counts: Mapping[ModelOnNode, int]) -> Fleet:
        """This fleet, which has no requests in flight yet, with the gateway's own request counts."""
        by_node: dict[str, dict[str, int]] = {node.name: {} for node in self.nodes}
        for (name, model_id), count in counts.items():
            if name in by_node:
                by_node[name][model_id] = count
        return self.with_nodes([counted_node(node, by_node[node.name]) for node in self.nodes])

    def as_if_idle(self, only: Node | None = None) -> Fleet:
        """This fleet as if every request had ended, to show what could be evicted then. `only`: as if those of one node
        had."""
        nodes = self.nodes if only is None else (only,)
        return self.with_nodes([quiet for node in nodes if (quiet := _quiet(node)) is not node])


def counted_node(node: Node, counts: Mapping[str, int]) -> Node:
    """`node`, which has no requests in flight yet, with those of `counts`, by model."""
    if not counts:
        return node
    changed = {
        model_id: msgspec.structs.replace(held, in_flight=count)
        for model_id, count in counts.items()
        if (held := node.residencies.get(model_id)) is not None
    }
    return _with_requests(node, changed)


def _quiet(node: Node) -> Node:
    changed = {
        model_id: msgspec.structs.replace(
            held, in_flight=0, status=msgspec.structs.replace(held.status, load=ModelLoad())
        )
        for model_id, held in node.residencies.items()
        if held.is_busy
    }
    return _with_requests(node, changed) if changed else node


def _with_requests(node: Node, changed: dict[str, Residency]) -> Node:
    """`node` with other requests in flight at some of its models."""
    counted = msgspec.structs.replace(node, residencies=node.residencies | changed)
    carry(node, counted)
    return counted
