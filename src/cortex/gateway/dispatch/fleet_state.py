"""The fleet as this gateway sees it: the nodes' last reports, overlaid with the jobs that this gateway has started.

A report is always a little old. A model that is being unloaded must not be routed to because an earlier poll still
shows it ready, and a load that was ordered holds its bytes before the node shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import msgspec

from cortex.fleet import memory, reports, topology
from cortex.fleet.catalogue import Catalogue, Resolution
from cortex.fleet.devices import MemoryReservation
from cortex.fleet.placement.bounds import node_memory
from cortex.fleet.placement.decision import Origin
from cortex.fleet.rules import EvictionRules, PlacementRules
from cortex.fleet.sleeping import SleepingNodes
from cortex.fleet.topology import Fleet, ModelOnNode, Node, Residency
from cortex.gateway.config import Config, NeuronSection
from cortex.wire.errors import InsufficientCapacity
from cortex.wire.node.protocol import Discovery, Health, ModelState, ModelStatus

T = TypeVar("T")


class NodeEntries(MutableMapping[ModelOnNode, T]):
    """By model and node, in order of arrival; also those of one node. Every change adds its nodes to `stale`."""

    def __init__(self, stale: set[str], also: Callable[[T], Iterable[str]] = lambda _: ()) -> None:
        """`also`: the other nodes that an entry concerns."""
        self._stale = stale
        self._also = also
        self._entries: dict[ModelOnNode, T] = {}
        self._by_node: dict[str, dict[str, T]] = {}

    def __getitem__(self, target: ModelOnNode) -> T:
        return self._entries[target]

    def __setitem__(self, target: ModelOnNode, entry: T) -> None:
        if target in self._entries:
            self._stale.update(self._also(self._entries[target]))
        self._entries[target] = entry
        self._by_node.setdefault(target.node, {})[target.model] = entry
        self._stale.add(target.node)
        self._stale.update(self._also(entry))

    def __delitem__(self, target: ModelOnNode) -> None:
        entry = self._entries.pop(target)
        here = self._by_node[target.node]
        del here[target.model]
        if not here:
            del self._by_node[target.node]
        self._stale.add(target.node)
        self._stale.update(self._also(entry))

    def __contains__(self, target: object) -> bool:
        return target in self._entries

    def __iter__(self) -> Iterator[ModelOnNode]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that have any."""
        return tuple(self._by_node)

    def on(self, node: str) -> Iterable[tuple[str, T]]:
        """The models of `node` that have an entry, each with it."""
        return self._by_node.get(node, {}).items()

    def drop_node(self, node: str) -> None:
        """Remove all entries of `node`."""
        for model in [*self._by_node.get(node, ())]:
            del self[ModelOnNode(node, model)]


MAX_RESOLVED_NAMES = 1024
_ABSENT = frozenset({ModelState.COLD, ModelState.FAILED, ModelState.ASLEEP})
_NO_MEMORY = InsufficientCapacity.code
_MORE_BYTES = 1 << 28
"""A load that lacked memory is tried again when the node's available memory has grown by this much."""
_SETTLE_S = 3.0
"""Memory freed within this time after a failed load may be what that load had taken."""


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
    """The size that it counts as until it is loaded."""
    need_bytes: int
    """What the decision found free, or freed by the victims, over all its nodes."""
    begun_at: float
    origin: Origin
    min_context_tokens: int = 1
    """The node rejects the load if it gets less context than this."""
    max_bytes: tuple[int | None, ...] = ()
    """What memory ceilings permit it on each of its nodes."""
    victims: frozenset[ModelOnNode] = frozenset()
    """Still to be unloaded before it can begin."""
    wakes: bool = False
    """Whether it is asleep there."""
    parts: tuple[tuple[str, MemoryReservation], ...] = ()
    """What the other members of its group take, by the names of their nodes."""


@dataclass(frozen=True, slots=True)
class LoadFailure:
    at: float
    reason: str
    code: str
    is_over: bool = False
    """Whether the load may be tried again. The reason is shown until the model is loaded, or another load ends."""
    have_bytes: int | None = None
    """What the node could give once the memory of the failed load was free again; the load is retried when it can give
    more. None if the load failed for another reason."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A load ran out of memory: the model needs more than there was, and may be tried once more with that."""

    at: float
    need_bytes: int


class ChangedNode(NamedTuple):
    """A node before and after events."""

    before: Node
    after: Node


class FleetState:
    """Owned by the dispatcher, which calls `rebuild` after every change. Iterates over the nodes' names.

    Every change marks the nodes that it concerns; `rebuild` derives those again, and no others.
    """

    def __init__(self, settings: DispatchSettings, fleet: Fleet) -> None:
        self.settings = settings
        self.fleet = fleet
        """As of the last `rebuild`; never changed in place."""
        self._stale: set[str] = set()
        """The nodes that `rebuild` derives again."""
        self.loads: NodeEntries[LoadJob] = NodeEntries(self._stale, lambda job: [name for name, _ in job.parts])
        self.unloads: NodeEntries[float] = NodeEntries(self._stale)
        """When each was ordered."""
        self.failures: NodeEntries[LoadFailure] = NodeEntries(self._stale)
        self.shortfalls: NodeEntries[Shortfall] = NodeEntries(self._stale)
        self.rejected_sources: NodeEntries[ModelStatus] = NodeEntries(self._stale)
        """Models of the catalogue that a node does not list, because it may not read their path, or cannot."""
        self.pins: NodeEntries[bool] = NodeEntries(self._stale)
        """Pins set by the operator."""
        self.drained: frozenset[str] = frozenset()
        """Nodes that the operator drained."""
        self.sleeping = SleepingNodes()
        """Call `changed` for a node whose sleep state changes."""
        self._reported: dict[str, Node] = {}
        self._unheard: dict[str, float] = {}
        """Nodes that have never reported, with the time when the configuration named each."""
        self._resolved: dict[str, Resolution] = {}
        self._resized: frozenset[str] | None = None
        """Since a new configuration, those models whose size it may have changed; None: none is new."""

    def __contains__(self, node: str) -> bool:
        return node in self._reported

    def __iter__(self) -> Iterator[str]:
        return iter(self._reported)

    def reconfigure(self, settings: DispatchSettings, now: float) -> None:
        """Use new settings; nodes that they do not name are forgotten."""
        old, new = self.settings.catalogue, settings.catalogue
        self.settings = settings
        self.sleeping.reconfigure({each.name: each.wake for each in settings.neurons if each.wake is not None})
        self._resolved.clear()
        changed = (each for each in old.ids | new.ids if old.spec(each).sized_by_node != new.spec(each).sized_by_node)
        self._resized = frozenset(changed) | (self._resized or frozenset())
        before, self._reported = self._reported, {}
        for neuron in settings.neurons:
            known = before.get(neuron.name, Node(name=neuron.name))
            abilities = msgspec.structs.replace(neuron.abilities, dialects=known.abilities.dialects)
            self._reported[neuron.name] = msgspec.structs.replace(known, abilities=abilities, ceilings=neuron.ceilings)
        for entries in (self.loads, self.unloads, self.failures, self.shortfalls, self.rejected_sources):
            for node in [node for node in entries.nodes if node not in self]:
                entries.drop_node(node)
        names = self._reported.keys()
        self._unheard = {
            each: self._unheard.get(each, now) for each in names if each in self._unheard or each not in before
        }
        self._stale.clear()
        self._stale.update(names)
        kept = tuple(self.fleet.node(name) or Node(name=name) for name in names)
        facts = {"catalogue": settings.catalogue, "rules": settings.rules, "placement": settings.placement}
        self.fleet = msgspec.structs.replace(self.fleet, nodes=kept, **facts)
        for model in self._resized:
            self.forget_size(model)

    def change_pins(self, *, added: Iterable[ModelOnNode], removed: Iterable[ModelOnNode]) -> None:
        self.pins.update(dict.fromkeys(added, True))
        for pin in removed:
            self.pins.pop(pin, None)

    def forget_size(self, model: str) -> None:
        measured = {key: size for key, size in self.fleet.measured.items() if key[0] != model}
        self.fleet = self.fleet.with_nodes((), measured=measured)
        for target in [each for each in self.shortfalls if each.model == model]:
            del self.shortfalls[target]
        for target in [each for each, it in self.failures.items() if each.model == model and it.have_bytes is not None]:
            del self.failures[target]

    def drain(self, node: str, *, drained: bool) -> None:
        self.drained = self.drained | {node} if drained else self.drained - {node}
        self._stale.add(node)

    def changed(self, node: str) -> None:
        """Something outside of the reports has changed."""
        self._stale.add(node)

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
        self._unheard.pop(name, None)
        self._report(reports.after_poll(self._reported[name], discovery, health, now))

    def missed(self, name: str, why: str) -> None:
        self._report(reports.after_missed_poll(self._reported[name], why, limit=self.settings.missed_polls))

    def reported(self, name: str) -> Node:
        """The node's last report, without this gateway's jobs."""
        return self._reported[name]

    def is_up(self, name: str) -> bool:
        return self._reported[name].healthy

    def starting(self, now: float) -> list[str]:
        """Nodes that have not reported yet, shortly after the configuration named them; their models are unknown."""
        limit_s = self.settings.rules.fair_wait_s
        return [name for name, since in self._unheard.items() if now - since < limit_s]

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
        """Apply a node's report about one model that it serves (not a group member), ahead of the next poll."""
        if (reported := self._reported.get(node)) is not None and not status.rank:
            residencies = {**reported.residencies, status.id: Residency(status=status, seen_at=now)}
            self._report(msgspec.structs.replace(reported, residencies=residencies))

    def forget_ready(self, target: ModelOnNode, state: ModelState, now: float) -> None:
        """The model is no longer ready there but in this `state`. A sleeping model stays asleep."""
        held = self._residency(target)
        if held is not None and held.state is not ModelState.ASLEEP:
            self.update_model(target.node, msgspec.structs.replace(held.status, state=state, state_age_s=0.0), now)

    def count_load(self, node: str) -> None:
        if (reported := self._reported.get(node)) is not None:
            self._report(msgspec.structs.replace(reported, num_loads=reported.num_loads + 1))

    def reset_loads(self, node: str) -> None:
        """The node's workers are new: its loads count from zero."""
        if (reported := self._reported.get(node)) is not None:
            self._report(msgspec.structs.replace(reported, num_loads=0))

    def rebuild(self, now: float) -> list[ChangedNode]:
        """Derive `fleet` from the reports and jobs that changed; returns the nodes that differ now. Failures expire
        after `retry_failed_after_s`."""
        over_at = now - self.settings.rules.retry_failed_after_s
        for target in [target for target, short in self.shortfalls.items() if short.at <= over_at]:
            del self.shortfalls[target]
        for target in [target for target, it in self.failures.items() if it.at <= over_at and not it.is_over]:
            self.failures[target] = replace(self.failures[target], is_over=True)
        for target in [target for name in self._stale for target in self._disproved_failures(name)]:
            del self.failures[target]
        for name in self._stale & self._reported.keys():
            self._end_shortages(name, now)
        names = self._stale & self._reported.keys()
        self._stale.clear()
        before = self.fleet
        changed = [
            ChangedNode(before.nodes[before.index.positions[name]], self._overlaid(self._reported[name], now))
            for name in names
        ]
        self.fleet = before.with_nodes([each.after for each in changed])
        for _, node in changed:
            node_memory(node)  # now, one by one, instead of for all nodes with the next decision
        if self.fleet.index.listing is not before.index.listing:
            self._resolved.clear()
        remeasured = {model for each in changed for model in memory.remeasured(*each)}
        # Those that are loaded have their earlier options.
        models = remeasured if self._resized is None else self.fleet.live_models() - self._resized
        self._resized = None
        measured = memory.measurements(self.fleet, models)
        self.fleet = self.fleet.with_nodes((), measured=measured)
        return changed

    def _disproved_failures(self, name: str) -> Iterator[ModelOnNode]:
        """Failed loads of models that were loaded since, by any gateway. A sleeping model keeps its failure, which may
        be a failed wake."""
        for model, failure in self.failures.on(name):
            held = self._residency(target := ModelOnNode(name, model))
            if held is not None and (
                held.state is ModelState.READY or (held.state is ModelState.ASLEEP and failure.is_over)
            ):
                yield target

    def _end_shortages(self, name: str, now: float) -> None:
        """Failures for lack of memory end when the node has more."""
        short = [
            (ModelOnNode(name, model), failure, failure.have_bytes)
            for model, failure in self.failures.on(name)
            if failure.have_bytes is not None and not failure.is_over
        ]
        if not short:
            return
        have_bytes = memory.available_bytes(self._overlaid(self._reported[name], now))
        for target, failure, before_bytes in short:
            if now - failure.at < _SETTLE_S:
                self.failures[target] = replace(failure, have_bytes=max(before_bytes, have_bytes))
            elif have_bytes >= before_bytes + _MORE_BYTES:
                self.failures[target] = replace(failure, is_over=True)

    def _report(self, node: Node) -> None:
        self._reported[node.name] = node
        self._stale.add(node.name)

    def _residency(self, target: ModelOnNode) -> Residency | None:
        reported = self._reported.get(target.node)
        return None if reported is None else reported.residencies.get(target.model)

    def _overlaid(self, node: Node, now: float) -> Node:
        """What the node reported, with this gateway's jobs, failures and pins on top."""
        rejected = self.rejected_sources.on(node.name)
        models = {model: Residency(status=status, seen_at=now) for model, status in rejected} | node.residencies

        def overlay(model: str, state: ModelState, age_s: float, **reason: str) -> None:
            held = models.get(model) or Residency(status=ModelStatus(id=model, state=ModelState.COLD), seen_at=now)
            status = msgspec.structs.replace(held.status, state=state, state_age_s=age_s, **reason)
            models[model] = msgspec.structs.replace(held, status=status, seen_at=now)

        def is_absent(model: str) -> bool:
            return model not in models or models[model].state in _ABSENT

        for model, since in self.unloads.on(node.name):
            if not is_absent(model):
                overlay(model, ModelState.UNLOADING, now - since)
        raised = {model: short.need_bytes for model, short in self.shortfalls.on(node.name)}
        for model in raised.keys() & models.keys():
            if models[model].state is ModelState.FAILED:  # by the load to retry
                overlay(model, ModelState.COLD, 0.0)
        for model, failure in self.failures.on(node.name):
            if failure.is_over:
                if model in models and models[model].state is ModelState.COLD and models[model].status.reason is None:
                    overlay(model, ModelState.COLD, now - failure.at, reason=failure.reason)
            elif is_absent(model):
                overlay(model, ModelState.FAILED, now - failure.at, reason=failure.reason, reason_code=failure.code)
        failed = {model for model, failure in self.failures.on(node.name) if not failure.is_over}
        for model, held in list(models.items()):
            if model not in failed and held.state is ModelState.FAILED and held.status.reason_code == _NO_MEMORY:
                overlay(model, ModelState.COLD, held.status.state_age_s)  # free memory may have changed
        for model, job in self.loads.on(node.name):
            if is_absent(model):
                overlay(model, ModelState.LOADING, now - job.begun_at)
        for model, _ in self.pins.on(node.name):
            if model in models:
                models[model] = msgspec.structs.replace(models[model], pinned=True)
        reservations = tuple(
            job.reservation for model, job in self.loads.on(node.name) if not _holds_its_bytes(models[model])
        )
        held_here = {member.id for member in node.members if member.state is ModelState.READY}
        reservations += tuple(
            reservation
            for job in self.loads.values()
            for name, reservation in job.parts
            if name == node.name and reservation.model_id not in held_here
        )
        why_away = self.sleeping.problem(node.name, now)
        return msgspec.structs.replace(
            node,
            healthy=node.healthy and why_away is None,
            problem=why_away or node.problem,
            sleep=self.sleeping.state(node.name),
            residencies=models,
            reservations=reservations,
            raised_needs=raised,
            draining=node.draining or node.name in self.drained,
            drained=node.name in self.drained,
        )


def _holds_its_bytes(held: Residency) -> bool:
    return held.state is ModelState.READY and held.status.measured_bytes is not None
