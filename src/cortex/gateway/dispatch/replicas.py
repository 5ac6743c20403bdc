"""The replicas of each model that take requests, and how busy and fast each is: nodes' reports, corrected by what this
gateway has done since."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from cortex.fleet.index import remembered
from cortex.fleet.topology import ModelOnNode, Node, Residency
from cortex.gateway.dispatch.fleet_state import ChangedNode, FleetState
from cortex.routing.choice import PREFILL_TOKENS_PER_S, REQUEST_S, RESPONSE_TOKENS, Replica
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.protocol import Dialect, ModelLoad, ModelState

REPORT_AGE_S = 1.0
"""A report may still count requests that ended this long before it arrived."""
MAX_RELEASES = 256
MIN_MEASURED_TOKENS = 256
"""Shorter prompts say more about the network than about the rate."""
_NEWEST = 0.2
"""The weight of the newest measurement."""


class ReadyReplica(NamedTuple):
    """A ready model on a node that takes requests. It stays the same until a report changes one of these."""

    target: ModelOnNode
    dialects: tuple[Dialect, ...]
    has_lifecycle: bool
    """Whether the node loads the model on request, should it be gone."""
    reads_pictures: bool
    context_tokens: int | None


class ReadyReplicas:
    """Where each model takes requests: found when it is first asked for, and again after a report that changes it.
    Owned by the lease pool."""

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
        """The fleet was rebuilt: forget what these nodes have changed, which is nothing after most reports."""
        for before, after in changed:
            facts = _routing_facts(after)
            if facts.spans or facts != _routing_facts(before):
                for node in (before, after):
                    for model in (*ready_models(node), *(share.model_id for share in node.shares)):
                        self._found.pop(model, None)

    def clear(self) -> None:
        self._found.clear()


class _RoutingFacts(NamedTuple):
    """What of a node alone decides on the replicas there."""

    is_open: bool
    models: tuple[ReadyReplica, ...]
    spans: bool
    """Whether other nodes decide too, because they have parts of the models there, or the node has parts of theirs."""


@remembered
def _routing_facts(node: Node) -> _RoutingFacts:
    held = [node.residencies[model] for model in ready_models(node)]
    spans = bool(node.shares) or any(each.status.nodes for each in held)
    return _RoutingFacts(node.healthy and not node.draining, tuple(_ready_replica(node, each) for each in held), spans)


def _ready_replica(node: Node, held: Residency) -> ReadyReplica:
    status = held.status
    target = ModelOnNode(node.name, status.id)
    return ReadyReplica(target, node.dialects, node.has_lifecycle, status.capabilities.vision, status.context_tokens)


@remembered
def ready_models(node: Node) -> tuple[str, ...]:
    """The models that `node` has ready."""
    return tuple([held.model_id for held in node.active if held.status.state is ModelState.READY])


@dataclass(slots=True)
class _ReplicaLoad:
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
    """What the node measured: it holds until requests show more."""
    copied_tokens_per_s: float | None = None
    """How fast pages come back from host memory there."""

    @property
    def prompt_rate(self) -> float | None:
        """Tokens of prompts per second, as far as it is known."""
        return self.prefill_tokens_per_s or (self.bench.prompt_tokens_per_s if self.bench is not None else None)

    @property
    def whole_s(self) -> float | None:
        """Seconds of a request, as far as they are known."""
        if self.request_s is not None or self.bench is None or (token_s := self.bench.token_s(1)) is None:
            return self.request_s
        return RESPONSE_TOKENS * token_s

    def token_s(self, num_requests: int) -> float | None:
        """Seconds per token of one response more; None: not measured."""
        return None if self.bench is None else self.bench.token_s(num_requests + 1)

    def num_released_since(self, moment: float) -> int:
        return sum(1 for _ in takewhile(lambda released_at: released_at >= moment, reversed(self.releases)))


class ReplicaLoads:
    """Mutable; owned by the lease pool."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._loads: dict[ModelOnNode, _ReplicaLoad] = {}

    def observed(self, target: ModelOnNode, held: Residency, in_flight: int) -> None:
        """The node reported the model ready; `in_flight` requests of this gateway are there now."""
        load = self._load(target)
        load.reported = held.status.load
        load.bench = held.status.bench
        load.copied_tokens_per_s = None if held.status.kv_host is None else held.status.kv_host.tokens_per_s
        load.num_released = 0
        load.num_foreign = 0
        if num_reported := load.reported.running + load.reported.waiting:
            own = in_flight + load.num_released_since(held.seen_at - REPORT_AGE_S)
            load.num_foreign = max(0, num_reported - own)

    def forget(self, target: ModelOnNode) -> None:
        """The model is not ready there any more."""
        self._loads.pop(target, None)

    def sent(self, target: ModelOnNode, prefill_s: float) -> None:
        """A request goes there; its prompt takes about `prefill_s` to compute."""
        load = self._load(target)
        load.backlog_until = max(self._clock(), load.backlog_until) + prefill_s

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

    def replicas(self, ready: Iterable[ReadyReplica], in_flight: dict[ModelOnNode, int]) -> list[Replica]:
        """The replicas of one model now. One whose speed is not known counts as fast as the others."""
        now, rate, request_s = self._clock(), 0.0, 0.0
        loads, all_measured = [], True
        for each in ready:
            load = self._load(each.target)
            loads.append((each.target, load))
            rate = max(rate, load.prompt_rate or 0.0)
            request_s = max(request_s, load.whole_s or 0.0)
            all_measured = all_measured and load.bench is not None and bool(load.bench.stream_rate)
        rate, request_s = rate or PREFILL_TOKENS_PER_S, request_s or REQUEST_S
        return [
            _replica(target.node, load, in_flight.get(target, 0), now, rate, request_s, weighs_tokens=all_measured)
            for target, load in loads
        ]

    def _load(self, target: ModelOnNode) -> _ReplicaLoad:
        load = self._loads.get(target)
        if load is None:
            load = self._loads[target] = _ReplicaLoad()
        return load


def _replica(
    node: str,
    load: _ReplicaLoad,
    in_flight: int,
    now: float,
    usual_rate: float,
    usual_request_s: float,
    *,
    weighs_tokens: bool,
) -> Replica:
    reported, current = load.reported, load.num_foreign + in_flight
    waiting = min(current, max(0, reported.waiting - load.num_released)) if reported.waiting else 0
    kv_used_fraction = reported.kv_used_fraction
    if kv_used_fraction and (num_reported := reported.running + reported.waiting):
        # The pages of requests that have ended since are free.
        kv_used_fraction *= min(1.0, current / num_reported)
    return Replica(
        place=node,
        running=current - waiting,
        waiting=waiting,
        kv_used_fraction=kv_used_fraction,
        backlog_s=load.backlog_until - now if load.backlog_until > now else 0.0,
        prefill_tokens_per_s=load.prompt_rate or usual_rate,
        copied_tokens_per_s=load.copied_tokens_per_s,
        request_s=load.whole_s or usual_request_s,
        token_s=(load.token_s(current) or 0.0) if weighs_tokens else 0.0,
    )


def _averaged(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST * (newest - before)
