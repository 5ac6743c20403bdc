"""The replicas of each model that take requests, and how busy and fast each is: nodes' reports, corrected by what this
gateway has done since."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import msgspec

from cortex.fleet.index import remembered
from cortex.fleet.topology import Abilities, ModelOnNode, Node, Residency
from cortex.gateway.dispatch.fleet_state import ChangedNode, FleetState
from cortex.routing.choice import PREFILL_TOKENS_PER_S, REQUEST_S, RESPONSE_TOKENS, Replica, choose
from cortex.routing.prefixes import PrefixRecord
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.protocol import ModelLoad, ModelState

REPORT_AGE_S = 1.0
"""A report may still count requests that ended this long before it arrived."""
MAX_RELEASES = 256
MIN_MEASURED_TOKENS = 256
"""For shorter prompts, network delays dominate the measurement."""
_NEWEST = 0.2
"""The weight of the newest measurement."""


class ReadyReplica(msgspec.Struct, frozen=True):
    """A ready model on a node that takes requests. Replaced when a report changes one of these fields."""

    target: ModelOnNode
    abilities: Abilities
    """Those of the node."""
    reads_pictures: bool
    context_tokens: int | None


class ReadyReplicas:
    """Where each model takes requests, derived from each report so that requests need only a lookup. Owned by the lease
    pool."""

    def __init__(self, fleet_state: FleetState) -> None:
        self._fleet_state = fleet_state
        self._found: dict[str, tuple[ReadyReplica, ...]] = {}

    def of(self, model: str) -> tuple[ReadyReplica, ...]:
        found = self._found.get(model)
        if found is None:
            replicas = self._fleet_state.fleet.replicas(model)
            found = self._found[model] = tuple(_ready_replica(node, held) for node, held in replicas)
        return found

    def nodes_changed(self, changed: Iterable[ChangedNode]) -> None:
        """The fleet was rebuilt: derive again what these nodes changed, which after most reports is nothing."""
        models: set[str] = set()
        for before, after in changed:
            state = _routing_state(after)
            if state.spans or state != _routing_state(before):
                for node in (before, after):
                    models.update(ready_models(node), (member.id for member in node.members))
        for model in models:
            self._found.pop(model, None)
            self.of(model)

    def clear(self) -> None:
        self._found.clear()


class _RoutingState(NamedTuple):
    """The state of a node that decides on its replicas."""

    is_open: bool
    models: tuple[ReadyReplica, ...]
    spans: bool
    """Whether replicas also depend on other nodes, which share models with this one."""


@remembered
def _routing_state(node: Node) -> _RoutingState:
    held = [node.residencies[model] for model in ready_models(node)]
    spans = bool(node.members) or any(each.status.nodes for each in held)
    return _RoutingState(node.healthy and not node.draining, tuple(_ready_replica(node, each) for each in held), spans)


def _ready_replica(node: Node, held: Residency) -> ReadyReplica:
    status = held.status
    target = ModelOnNode(node.name, status.id)
    return ReadyReplica(target, node.abilities, status.capabilities.vision, status.context_tokens)


@remembered
def ready_models(node: Node) -> tuple[str, ...]:
    """The models that `node` has ready."""
    return tuple([held.model_id for held in node.active if held.status.state is ModelState.READY])


@dataclass(slots=True)
class _ReplicaLoad:
    """The known load and speed of one replica. The speed is derived when a report or a completed request changes it,
    not for every routed request."""

    reported: ModelLoad = field(default_factory=ModelLoad)
    num_foreign: int = 0
    """Requests of other clients of the node, by its last report."""
    releases: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RELEASES))
    """When requests of this gateway ended there."""
    num_released: int = 0
    """Requests of this gateway that ended there since the last report."""
    backlog_until: float = 0.0
    prefill_tokens_per_s: float | None = None
    request_s: float | None = None
    bench: BenchResult | None = None
    """Measured by the node; used until requests yield measurements."""
    copied_tokens_per_s: float | None = None
    """Rate at which pages are copied back from host memory there."""
    fetched_tokens_per_s: float | None = None
    """Rate at which pages arrive from other nodes."""
    prompt_rate: float = 0.0
    """Prompt tokens per second; 0 if not known."""
    whole_s: float = 0.0
    """Seconds per request; 0 if not known."""
    has_stream_rate: bool = False
    """Whether the node measured the speed of responses."""

    def derive_speed(self) -> None:
        """After every change of what was measured."""
        bench, token_s = self.bench, None if self.bench is None else self.bench.token_s(1)
        self.prompt_rate = self.prefill_tokens_per_s or (bench.prompt_tokens_per_s if bench is not None else 0.0)
        self.whole_s = self.request_s if self.request_s is not None else RESPONSE_TOKENS * (token_s or 0.0)
        self.has_stream_rate = bench is not None and bool(bench.stream_rate)

    def num_released_since(self, moment: float) -> int:
        return sum(1 for _ in takewhile(lambda released_at: released_at >= moment, reversed(self.releases)))

    def as_replica(
        self, node: str, in_flight: int, now: float, usual_rate: float, usual_request_s: float, weighs_tokens: bool
    ) -> Replica:
        """As a candidate for a request, with `in_flight` requests of this gateway there. The usual speed counts where
        its own is not known."""
        reported, current = self.reported, self.num_foreign + in_flight
        waiting = min(current, max(0, reported.waiting - self.num_released)) if reported.waiting else 0
        kv_used_fraction = reported.kv_used_fraction
        if kv_used_fraction and (num_reported := reported.running + reported.waiting):
            # The pages of requests that have ended since are free.
            kv_used_fraction *= min(1.0, current / num_reported)
        token_s = self.bench.token_s(current + 1) if weighs_tokens and self.bench is not None else None
        return Replica(
            place=node,
            running=current - waiting,
            waiting=waiting,
            kv_used_fraction=kv_used_fraction,
            backlog_s=self.backlog_until - now if self.backlog_until > now else 0.0,
            prefill_tokens_per_s=self.prompt_rate or usual_rate,
            copied_tokens_per_s=self.copied_tokens_per_s,
            fetched_tokens_per_s=self.fetched_tokens_per_s,
            request_s=self.whole_s or usual_request_s,
            token_s=token_s or 0.0,
        )


class RoutedRequest(NamedTuple):
    """Where a request goes."""

    replica: ReadyReplica
    is_alone: bool
    """Whether no other request is expected there."""
    copies: bool
    """Whether a part of the prompt is in host memory there."""
    source: str
    """The node that has computed more of the prompt; empty: none."""


class ReplicaLoads:
    """Mutable; owned by the lease pool."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loads: dict[ModelOnNode, _ReplicaLoad] = {}

    def observed(self, target: ModelOnNode, held: Residency, in_flight: int) -> None:
        """The node reported the model ready; `in_flight` requests of this gateway are there now."""
        load = self._load(target)
        load.reported = held.status.load
        if load.bench != held.status.bench:
            load.bench = held.status.bench
            load.derive_speed()
        load.copied_tokens_per_s = None if held.status.kv_host is None else held.status.kv_host.tokens_per_s
        load.fetched_tokens_per_s = load.reported.fetched_tokens_per_s
        load.num_released = 0
        load.num_foreign = 0
        if num_reported := load.reported.running + load.reported.waiting:
            own = in_flight + load.num_released_since(held.seen_at - REPORT_AGE_S)
            load.num_foreign = max(0, num_reported - own)

    def forget(self, target: ModelOnNode) -> None:
        """The model is not ready there any more."""
        self._loads.pop(target, None)

    def released(self, target: ModelOnNode, *, is_last: bool) -> None:
        """A request ended there; `is_last`: this gateway has no other there."""
        load = self._loads.get(target)
        if load is not None:
            load.releases.append(self._clock())
            load.num_released += 1
            if is_last:
                load.backlog_until = 0.0

    def measured(
        self, target: ModelOnNode, num_computed_tokens: int, prefill_s: float | None, request_s: float
    ) -> None:
        """A request was completed there. `prefill_s` is None if it says nothing about the prefill rate."""
        load = self._loads.get(target)
        if load is None:
            return
        load.request_s = _averaged(load.request_s, request_s)
        if prefill_s and num_computed_tokens >= MIN_MEASURED_TOKENS:
            load.prefill_tokens_per_s = _averaged(load.prefill_tokens_per_s, num_computed_tokens / prefill_s)
        load.derive_speed()

    def route(
        self,
        ready: Sequence[ReadyReplica],
        in_flight: Mapping[str, Mapping[str, int]],
        prompt: bytes,
        prefixes: PrefixRecord,
        is_source: Callable[[str], bool],
    ) -> RoutedRequest:
        """The replica of one model that a request goes to. Replicas of unknown speed count as fast as the others.
        `in_flight`: requests of this gateway, by node and model. `is_source`: whether a node can be asked for KV."""
        now, known = self._clock(), self._loads
        loads, rate, request_s, weighs_tokens = [], 0.0, 0.0, True
        for each in ready:
            load = known.get(each.target) or self._load(each.target)
            loads.append((each.target, load))
            if load.prompt_rate > rate:
                rate = load.prompt_rate
            if load.whole_s > request_s:
                request_s = load.whole_s
            if not load.has_stream_rate:
                weighs_tokens = False
        rate, request_s = rate or PREFILL_TOKENS_PER_S, request_s or REQUEST_S
        replicas = []
        for (node, model), load in loads:
            counts = in_flight.get(node)
            num_own = counts.get(model, 0) if counts else 0
            replicas.append(load.as_replica(node, num_own, now, rate, request_s, weighs_tokens))
        chosen = choose(replicas, prompt, prefixes, is_source)
        replica, (_, load) = replicas[chosen.position], loads[chosen.position]
        load.backlog_until = now + replica.backlog_s + chosen.prefill_s
        is_alone = not replica.running and not replica.waiting
        return RoutedRequest(ready[chosen.position], is_alone, chosen.cached.host_tokens > 0, chosen.source)

    def _load(self, target: ModelOnNode) -> _ReplicaLoad:
        load = self._loads.get(target)
        if load is None:
            load = self._loads[target] = _ReplicaLoad()
        return load


def _averaged(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST * (newest - before)
