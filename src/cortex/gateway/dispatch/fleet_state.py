"""The fleet as this gateway sees it: the nodes' last reports, overlaid with the jobs that this gateway has started.

A report is always a little old. A model that is being unloaded must not be routed to because an earlier poll still
shows it ready, and a load that was ordered holds its bytes before the node shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from cortex.fleet import memory, topology
from cortex.fleet.catalogue import Catalogue, Resolution
from cortex.fleet.placement.decision import Origin
from cortex.fleet.rules import EvictionRules, PlacementRules
from cortex.fleet.topology import Fleet, MemoryReservation, ModelOnNode, Node, Residency
from cortex.gateway.config import Config, NeuronSection
from cortex.wire.node.protocol import Discovery, Health, ModelState, ModelStatus

MAX_RESOLVED_NAMES = 1024
_ABSENT = frozenset({ModelState.COLD, ModelState.FAILED, ModelState.ASLEEP})


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """The part of the configuration that decisions depend on."""

    catalogue: Catalogue
    rules: EvictionRules
    neurons: tuple[NeuronSection, ...]
    max_wait_s: float
    max_waiting: int
    missed_polls: int
    placement: PlacementRules = field(default_factory=PlacementRules)

    @classmethod
    def of(cls, config: Config, catalogue: Catalogue) -> DispatchSettings:
        gateway = config.gateway
        return cls(
            catalogue,
            config.eviction,
            config.neurons,
            gateway.max_wait_s,
            gateway.max_waiting,
            gateway.missed_polls,
            config.placement,
        )


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A load that this gateway has ordered, or will order once its victims are unloaded."""

    target: ModelOnNode
    reservation: MemoryReservation
    """What it is counted as until it has loaded."""
    need_bytes: int
    """What the decision found free, or freed by the victims, over all its nodes."""
    begun_at: float
    origin: Origin
    max_bytes: tuple[int | None, ...] = ()
    """What memory ceilings let it take of each of its nodes."""
    victims: frozenset[ModelOnNode] = frozenset()
    """Still to be unloaded before it can begin."""
    parts: tuple[tuple[str, MemoryReservation], ...] = ()
    """What a model that spans nodes takes on the other nodes, by their names."""


@dataclass(frozen=True, slots=True)
class LoadFailure:
    at: float
    reason: str
    code: str


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A load ran out of memory: the model needs more than there was, and may be tried once more with that."""

    at: float
    need_bytes: int


@dataclass(slots=True)
class FleetState:
    """Mutable; owned by the dispatcher, which calls `rebuild` after every change. Iterates over the nodes' names."""

    settings: DispatchSettings
    fleet: Fleet = field(default_factory=Fleet)
    """As of the last `rebuild`; never changed in place."""
    loads: dict[ModelOnNode, LoadJob] = field(default_factory=dict)
    unloads: dict[ModelOnNode, float] = field(default_factory=dict)
    """When each was ordered."""
    failures: dict[ModelOnNode, LoadFailure] = field(default_factory=dict)
    shortfalls: dict[ModelOnNode, Shortfall] = field(default_factory=dict)
    pins: set[ModelOnNode] = field(default_factory=set)
    """Set by the operator."""
    drained: set[str] = field(default_factory=set)
    """Nodes that the operator drained."""
    _reported: dict[str, Node] = field(default_factory=dict)
    _resolved: dict[str, Resolution] = field(default_factory=dict)

    def __contains__(self, node: str) -> bool:
        return node in self._reported

    def __iter__(self) -> Iterator[str]:
        return iter(self._reported)

    def reconfigure(self, settings: DispatchSettings) -> None:
        """Use new settings; nodes that they do not name are forgotten."""
        self.settings = settings
        self._reported = {
            neuron.name: msgspec.structs.replace(
                self._reported.get(neuron.name, Node(name=neuron.name)),
                has_lifecycle=neuron.kind == "neuron",
                ceilings=neuron.ceilings,
            )
            for neuron in settings.neurons
        }
        for entries in (self.loads, self.unloads, self.failures, self.shortfalls):
            for target in [target for target in entries if target.node not in self]:
                del entries[target]

    def resolve(self, name: str) -> Resolution:
        """The model that a client means. Raises ModelNotFound with near misses."""
        resolution = self._resolved.get(name)
        if resolution is None:
            resolution = self.settings.catalogue.resolve(name, self.fleet.live_models())
            if len(self._resolved) >= MAX_RESOLVED_NAMES:
                self._resolved.clear()
            self._resolved[name] = resolution
        return resolution

    def observed(self, name: str, discovery: Discovery, health: Health, now: float) -> None:
        self._reported[name] = topology.after_poll(self._reported[name], discovery, health, now)

    def missed(self, name: str, why: str) -> None:
        self._reported[name] = topology.after_missed_poll(self._reported[name], why, limit=self.settings.missed_polls)

    def reported(self, name: str) -> Node:
        """The node's last report, without this gateway's jobs."""
        return self._reported[name]

    def is_up(self, name: str) -> bool:
        return self._reported[name].healthy

    def is_asleep(self, target: ModelOnNode) -> bool:
        """By the node's last report."""
        held = self._residency(target)
        return held is not None and held.state is ModelState.ASLEEP

    def is_absent(self, target: ModelOnNode) -> bool:
        """Whether the node is up and neither has the model ready nor is loading it."""
        node = self.fleet.node(target.node)
        if node is None or not node.healthy or target in self.loads or target in self.unloads:
            return False
        held = node.residencies.get(target.model)
        return held is None or held.state in _ABSENT

    def is_starting(self, target: ModelOnNode) -> bool:
        """Whether the node reports that it loads the model."""
        held = self._residency(target)
        return held is not None and held.state in topology.STARTING

    def update_model(self, node: str, status: ModelStatus, now: float) -> None:
        """Take over what a node reported about one model, ahead of its next poll."""
        if (reported := self._reported.get(node)) is not None:
            residencies = {**reported.residencies, status.id: Residency(status=status, seen_at=now)}
            self._reported[node] = msgspec.structs.replace(reported, residencies=residencies)

    def forget_ready(self, target: ModelOnNode, state: ModelState, now: float) -> None:
        """The node does not have the model ready any more, it is in this `state`. One that is asleep stays so."""
        held = self._residency(target)
        if held is not None and held.state is not ModelState.ASLEEP:
            self.update_model(target.node, msgspec.structs.replace(held.status, state=state, state_age_s=0.0), now)

    def count_load(self, node: str) -> None:
        if (reported := self._reported.get(node)) is not None:
            self._reported[node] = msgspec.structs.replace(reported, num_loads=reported.num_loads + 1)

    def reset_loads(self, node: str) -> None:
        """The node's workers are new: its loads count from zero."""
        if (reported := self._reported.get(node)) is not None:
            self._reported[node] = msgspec.structs.replace(reported, num_loads=0)

    def rebuild(self, now: float) -> None:
        """Compute `fleet` from reports and jobs. Failures older than `retry_failed_after_s` are dropped."""
        self._resolved.clear()
        for past in (self.failures, self.shortfalls):
            for target in [
                each for each, it in past.items() if now - it.at >= self.settings.rules.retry_failed_after_s
            ]:
                del past[target]
        before = self.fleet
        self.fleet = Fleet(
            nodes=tuple(self._overlaid(node, now) for node in self._reported.values()),
            catalogue=self.settings.catalogue,
            rules=self.settings.rules,
            placement=self.settings.placement,
            measured=before.measured,
        )
        measured = memory.measurements(self.fleet)
        if measured != before.measured:
            self.fleet = msgspec.structs.replace(self.fleet, measured=measured)

    def _residency(self, target: ModelOnNode) -> Residency | None:
        reported = self._reported.get(target.node)
        return None if reported is None else reported.residencies.get(target.model)

    def _overlaid(self, node: Node, now: float) -> Node:
        """What the node reported, with this gateway's jobs, failures and pins on top."""
        models = dict(node.residencies)

        def overlay(model: str, state: ModelState, age_s: float, **reason: str) -> None:
            held = models.get(model) or Residency(status=ModelStatus(id=model, state=ModelState.COLD), seen_at=now)
            status = msgspec.structs.replace(held.status, state=state, state_age_s=age_s, **reason)
            models[model] = msgspec.structs.replace(held, status=status, seen_at=now)

        def is_absent(model: str) -> bool:
            return model not in models or models[model].state in _ABSENT

        for (name, model), since in self.unloads.items():
            if name == node.name and not is_absent(model):
                overlay(model, ModelState.UNLOADING, now - since)
        raised = {model: short.need_bytes for (name, model), short in self.shortfalls.items() if name == node.name}
        for model in raised.keys() & models.keys():
            if models[model].state is ModelState.FAILED:  # by the load that is to be tried again
                overlay(model, ModelState.COLD, 0.0)
        for (name, model), failure in self.failures.items():
            if name == node.name and is_absent(model):
                overlay(model, ModelState.FAILED, now - failure.at, reason=failure.reason, reason_code=failure.code)
        for (name, model), job in self.loads.items():
            if name == node.name and is_absent(model):
                overlay(model, ModelState.LOADING, now - job.begun_at)
        for name, model in self.pins:
            if name == node.name and model in models:
                models[model] = msgspec.structs.replace(models[model], pinned=True)
        reservations = tuple(
            job.reservation
            for (name, model), job in self.loads.items()
            if name == node.name and not _holds_its_bytes(models[model])
        )
        held_here = {share.model_id for share in node.shares if share.state == "ready"}
        reservations += tuple(
            reservation
            for job in self.loads.values()
            for name, reservation in job.parts
            if name == node.name and reservation.model_id not in held_here
        )
        return msgspec.structs.replace(
            node,
            residencies=models,
            reservations=reservations,
            raised_needs=raised,
            draining=node.draining or node.name in self.drained,
            drained=node.name in self.drained,
        )


def _holds_its_bytes(held: Residency) -> bool:
    return held.state is ModelState.READY and held.status.measured_bytes is not None
