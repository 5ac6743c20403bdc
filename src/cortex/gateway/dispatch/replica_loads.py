"""How busy each replica is now, and how fast: nodes' reports, corrected by what this gateway has done since."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from cortex.fleet.topology import ModelOnNode, Residency
from cortex.routing.choice import PREFILL_TOKENS_PER_S, REQUEST_S, RESPONSE_TOKENS, Replica
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.protocol import ModelLoad

REPORT_AGE_S = 1.0
"""A report may still count requests that ended this long before it arrived."""
MAX_RELEASES = 256
MIN_MEASURED_TOKENS = 256
"""Shorter prompts say more about the network than about the rate."""
_NEWEST = 0.2
"""The weight of the newest measurement."""


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
        load = self._loads.setdefault(target, _ReplicaLoad())
        load.reported = held.status.load
        load.bench = held.status.bench
        load.num_released = 0
        own = in_flight + load.num_released_since(held.seen_at - REPORT_AGE_S)
        load.num_foreign = max(0, load.reported.running + load.reported.waiting - own)

    def forget(self, target: ModelOnNode) -> None:
        """The model is not ready there any more."""
        self._loads.pop(target, None)

    def sent(self, target: ModelOnNode, prefill_s: float) -> None:
        """A request goes there; its prompt takes about `prefill_s` to compute."""
        load = self._loads.setdefault(target, _ReplicaLoad())
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

    def replicas(self, model: str, nodes: list[str], in_flight: dict[ModelOnNode, int]) -> list[Replica]:
        """The replicas of `model` on `nodes` now. One whose speed is not known counts as fast as the others."""
        now = self._clock()
        targets = [ModelOnNode(node, model) for node in nodes]
        loads = [self._loads.get(target) or _ReplicaLoad() for target in targets]
        rate = max((load.prompt_rate or 0.0 for load in loads), default=0.0) or PREFILL_TOKENS_PER_S
        request_s = max((load.whole_s or 0.0 for load in loads), default=0.0) or REQUEST_S
        all_measured = all(load.bench is not None and load.bench.stream_rate for load in loads)
        return [
            _replica(target.node, load, in_flight.get(target, 0), now, rate, request_s, weighs_tokens=all_measured)
            for target, load in zip(targets, loads, strict=True)
        ]


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
    reported = load.reported.running + load.reported.waiting
    current = load.num_foreign + in_flight
    waiting = min(current, max(0, load.reported.waiting - load.num_released))
    return Replica(
        place=node,
        running=current - waiting,
        waiting=waiting,
        # The pages of requests that have ended since are free.
        kv_used_fraction=load.reported.kv_used_fraction * (min(1.0, current / reported) if reported else 1.0),
        backlog_s=max(0.0, load.backlog_until - now),
        prefill_tokens_per_s=load.prompt_rate or usual_rate,
        request_s=load.whole_s or usual_request_s,
        token_s=(load.token_s(current) or 0.0) if weighs_tokens else 0.0,
    )


def _averaged(before: float | None, newest: float) -> float:
    return newest if before is None else before + _NEWEST * (newest - before)
