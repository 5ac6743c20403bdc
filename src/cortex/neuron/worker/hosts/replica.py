"""The replicas of one model: routing of requests, their assignment, and the sum of counters."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from cortex.neuron.engine.request import EngineRequest, EngineStats, StepOutput
from cortex.neuron.worker.backoff import FaultHistory
from cortex.neuron.worker.faults import FaultKind
from cortex.neuron.worker.model_host import ModelHost, ModelSink, RelaySink
from cortex.routing.choice import Replica, choose
from cortex.routing.prefixes import PrefixRecord
from cortex.system.tasks import run_once

_numbers = itertools.count()


@dataclass(eq=False, slots=True)
class HostReplica:
    """One replica. A lost one is reloaded, unless it is an extra one."""

    host: ModelHost
    new_host: Callable[[], ModelHost] | None = None
    """Makes the host of the next load; None for an extra replica."""
    state: Literal["loading", "loaded", "ending", "lost", "given up"] = "loading"
    """`ending`: an extra one that is draining and gets no new requests. `given up`: lost too often, and not reloaded
    while the model serves."""
    live: set[str] = field(default_factory=set)
    backlog_until_s: float = 0.0
    """When its prompts are expected to be computed, on the loop's clock."""
    stats: EngineStats = field(default_factory=EngineStats)
    history: FaultHistory = field(default_factory=FaultHistory)
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it has no requests."""
    idle_since_s: float = 0.0
    unloading: asyncio.Task[None] | None = None
    """The task that unloads an extra replica."""
    place: str = field(default_factory=lambda: str(next(_numbers)))
    """Its name for routing."""

    @property
    def is_extra(self) -> bool:
        return self.new_host is None

    def as_candidate(self, now_s: float) -> Replica:
        return Replica(
            place=self.place,
            running=len(self.live),
            kv_used_fraction=self.stats.used_pages / self.stats.num_pages if self.stats.num_pages else 0.0,
            backlog_s=max(0.0, self.backlog_until_s - now_s),
        )


SharePrefix = Callable[[EngineRequest, HostReplica, HostReplica], Awaitable[None]]
"""Lets the second replica read what the first one has computed of a prompt, where that is worth it."""


class ReplicaSet:
    """Belongs to the daemon's loop."""

    def __init__(self, fixed: Iterable[HostReplica], share: SharePrefix | None = None) -> None:
        """`share`: None: each replica computes its own prefixes."""
        self.fixed = tuple(fixed)
        self._share = share
        self.extras: list[HostReplica] = []
        """Replicas that are loaded or being unloaded."""
        self._owners: dict[str, HostReplica] = {}
        """Request id → the replica that has it."""
        self._sharing: dict[str, tuple[EngineRequest, asyncio.Task[None]]] = {}
        """Requests that their replica gets once it can read what another one has computed."""
        self._prefixes = PrefixRecord()
        self._lost_stats: list[EngineStats] = []
        """The counters of lost replicas."""

    def __iter__(self) -> Iterator[HostReplica]:
        """Extra ones last."""
        return iter((*self.fixed, *self.extras))

    def loaded(self) -> list[HostReplica]:
        """Replicas that serve or sleep."""
        return [replica for replica in self if replica.state == "loaded"]

    # Requests

    def route(self, request: EngineRequest) -> None:
        """Sends a request to the replica where its first token is expected first. At least one exists unless the model
        was reported as lost."""
        now_s = asyncio.get_running_loop().time()
        loaded = self.loaded()
        if not loaded:
            return
        candidates = [replica.as_candidate(now_s) for replica in loaded]
        prompt = request.tenant + array("I", request.prompt).tobytes()
        chosen = choose(candidates, prompt, self._prefixes)
        replica = self._owners[request.id] = loaded[chosen.position]
        replica.backlog_until_s = max(now_s, replica.backlog_until_s) + chosen.prefill_s
        replica.live.add(request.id)
        replica.empty.clear()
        source = next((each for each in loaded if each.place == chosen.source), None)
        if source is None or self._share is None:
            replica.host.submit(request)
        else:
            shared = self._submit_after(self._share(request, source, replica), request, replica)
            self._sharing[request.id] = request, run_once(shared, "share a prefix between replicas")

    async def _submit_after(self, shared: Awaitable[None], request: EngineRequest, replica: HostReplica) -> None:
        """Submits the request also if sharing fails."""
        try:
            await shared
        finally:
            if self._sharing.pop(request.id, None) is not None:  # else it was cancelled, or its replica is lost
                replica.host.submit(request)

    def cancel(self, request_id: str) -> None:
        if (owner := self._owners.get(request_id)) is None:
            return
        if (sharing := self._sharing.pop(request_id, None)) is not None:
            request, task = sharing
            task.cancel()
            owner.host.submit(request)  # which reports its end
        owner.host.cancel(request_id)

    def request_ended(self, request_id: str) -> None:
        """It has its last output or its failure."""
        if (owner := self._owners.pop(request_id, None)) is not None:
            owner.live.discard(request_id)
            if not owner.live:
                owner.empty.set()
                owner.backlog_until_s = 0.0
                owner.idle_since_s = asyncio.get_running_loop().time()

    def take_requests(self, replica: HostReplica) -> set[str]:
        """The requests of a replica that ends; from now on it has none."""
        taken, replica.live = replica.live, set()
        replica.empty.set()
        replica.backlog_until_s = 0.0
        for request_id in taken:
            self._owners.pop(request_id, None)
            if (sharing := self._sharing.pop(request_id, None)) is not None:
                sharing[1].cancel()
        return taken

    # Counters

    def total_stats(self) -> EngineStats:
        """Stats of all replicas. Counters include lost replicas, because they must only grow."""
        return EngineStats.summed([*self._lost_stats, *(each.stats for each in self)])

    def keep_counters(self, replica: HostReplica) -> None:
        """The replica is lost or unloaded, together with its cache."""
        self._prefixes.forget(replica.place)
        self._lost_stats.append(
            replace(
                replica.stats, running=0, waiting=0, used_pages=0, cached_pages=0, num_pages=0, graphs=0, graph_bytes=0
            )
        )
        replica.stats = EngineStats()


class ReplicaSink(RelaySink):
    """The `ModelSink` of one replica: forwards its events and keeps the set up to date."""

    def __init__(
        self,
        replicas: ReplicaSet,
        replica: HostReplica,
        model: ModelSink,
        on_lost: Callable[[HostReplica, str], None],
        *,
        reports_progress: bool = False,
    ) -> None:
        """`reports_progress`: false if it is loaded while the model serves."""
        super().__init__(model)
        self._replicas = replicas
        self._replica = replica
        self._on_lost = on_lost
        self._reports_progress = reports_progress

    def on_progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self._reports_progress:
            super().on_progress(stage, done_bytes, total_bytes)

    def on_outputs(self, outputs: tuple[StepOutput, ...]) -> None:
        self._replica.history = self._replica.history.proved()
        for output in outputs:
            if output.finish is not None:
                self._replicas.request_ended(output.request_id)
        super().on_outputs(outputs)

    def on_request_failed(self, request_id: str, kind: FaultKind, message: str) -> None:
        self._replicas.request_ended(request_id)
        super().on_request_failed(request_id, kind, message)

    def on_stats(self, stats: EngineStats) -> None:
        self._replica.stats = stats
        super().on_stats(self._replicas.total_stats())

    def on_lost(self, reason: str) -> None:
        self._on_lost(self._replica, reason)
