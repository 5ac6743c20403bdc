"""The replicas of one model: which of them has which request, and what all of them have counted.

A request goes to the replica with the least work before its first token, where a cached prefix is work saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

from cortex.neuron.engine.request import EngineRequest, EngineStats, StepOutput
from cortex.neuron.worker.backoff import FaultHistory
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import ModelHost, ModelSink, Resident
from cortex.neuron.worker.replicas.prefix_memory import PrefixMemory

REQUEST_TOKENS = 1500
"""A request ahead costs about as much as to compute this many prompt tokens; the gateway counts the same."""


@dataclass(eq=False, slots=True)
class Replica:
    """One replica. Without a resident it is lost: being loaded again, given up, or, if it is an extra one, gone."""

    new_host: Callable[[], ModelHost]
    host: ModelHost
    resident: Resident | None = None
    live: set[str] = field(default_factory=set)
    stats: EngineStats = field(default_factory=EngineStats)
    prefixes: PrefixMemory = field(default_factory=PrefixMemory)
    history: FaultHistory = field(default_factory=FaultHistory)
    is_extra: bool = False
    is_lost: bool = False
    """Of an extra one."""
    is_given_up: bool = False
    """Of a fixed one: it was lost too often, and is not loaded again while the model serves."""
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it has no requests."""
    idle_since_s: float = 0.0
    unloading: asyncio.Task[None] | None = None
    """Of an extra one, from its drain on: it gets no new requests."""

    def work(self, prompt: Sequence[int]) -> int:
        """Prompt tokens to compute before the first token of a new request, with the requests ahead converted."""
        return len(prompt) - self.prefixes.num_known_tokens(prompt) + REQUEST_TOKENS * len(self.live)


class ReplicaSet:
    """Belongs to the daemon's loop."""

    def __init__(self, fixed: Iterable[Replica]) -> None:
        self.fixed = tuple(fixed)
        self.extras: list[Replica] = []
        """Those that are loaded, or being unloaded."""
        self._owners: dict[str, Replica] = {}
        """Request id → the replica that has it."""
        self._lost_stats: list[EngineStats] = []
        """The counters of lost replicas."""

    def __iter__(self) -> Iterator[Replica]:
        """Extra ones last."""
        return iter((*self.fixed, *self.extras))

    def present(self) -> list[tuple[Replica, Resident]]:
        """Those in memory, without extra ones."""
        return [(replica, replica.resident) for replica in self.fixed if replica.resident is not None]

    def serving(self) -> list[tuple[Replica, Resident]]:
        extras = [(each, each.resident) for each in self.extras if each.resident is not None and each.unloading is None]
        return [*self.present(), *extras]

    # Requests

    def submit(self, request: EngineRequest) -> None:
        """Sends a request to the replica with the least work. There is one, unless the model was reported as lost."""
        if serving := self.serving():
            replica, part = min(serving, key=lambda each: each[0].work(request.prompt))
            replica.live.add(request.id)
            replica.empty.clear()
            replica.prefixes.add(request.prompt)
            self._owners[request.id] = replica
            replica.host.submit(part, request)

    def cancel(self, request_id: str) -> None:
        owner = self._owners.get(request_id)
        if owner is not None and owner.resident is not None:
            owner.host.cancel(owner.resident, request_id)

    def request_ended(self, request_id: str) -> None:
        """It has its last output or its failure."""
        if (owner := self._owners.pop(request_id, None)) is not None:
            owner.live.discard(request_id)
            if not owner.live:
                owner.empty.set()
                owner.idle_since_s = asyncio.get_running_loop().time()

    def take_requests(self, replica: Replica) -> set[str]:
        """The requests of a replica that ends; from now on it has none."""
        taken, replica.live = replica.live, set()
        replica.empty.set()
        for request_id in taken:
            self._owners.pop(request_id, None)
        return taken

    # Counters

    def total_stats(self) -> EngineStats:
        """All replicas together. The counters include those of lost ones, because they only grow."""
        parts = [*self._lost_stats, *(each.stats for each in self)]
        names = [each.name for each in fields(EngineStats)]
        return EngineStats(**{name: sum(getattr(part, name) for part in parts) for name in names})

    def keep_counters(self, replica: Replica) -> None:
        """The replica is lost, or unloaded."""
        self._lost_stats.append(replace(replica.stats, running=0, waiting=0, used_pages=0, cached_pages=0, num_pages=0))
        replica.stats = EngineStats()


class ReplicaSink:
    """The `ModelSink` of one replica: passes its events on, and keeps the set up to date."""

    def __init__(
        self,
        replicas: ReplicaSet,
        replica: Replica,
        model: ModelSink,
        on_lost: Callable[[Replica, str], None],
        *,
        reports_progress: bool = False,
    ) -> None:
        """`reports_progress`: not if it is loaded while the model serves."""
        self._replicas = replicas
        self._replica = replica
        self._model = model
        self._on_lost = on_lost
        self._reports_progress = reports_progress

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._reports_progress:
            self._model.on_progress(stage, done_bytes, total_bytes)

    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None:
        self._replica.history = self._replica.history.proved()
        for output in outputs:
            if output.finish is not None:
                self._replicas.request_ended(output.request_id)
        self._model.on_outputs(outputs)

    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None:
        self._replicas.request_ended(request_id)
        self._model.on_request_failed(request_id, kind, message)

    def on_stats(self, stats: EngineStats) -> None:
        self._replica.stats = stats
        self._model.on_stats(self._replicas.total_stats())

    def on_lost(self, reason: str) -> None:
        self._on_lost(self._replica, reason)

    def on_ending(self, reason: str, then: Callable[[], None]) -> None:
        pass  # only parts on other nodes are announced to end, and replicas have none
