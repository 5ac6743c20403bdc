"""Adds replicas of a model and removes extra ones: a pure decision, and the task that carries it out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from cortex.neuron.config import Limits
from cortex.neuron.node.instance import Instance
from cortex.neuron.node.library import KnownModel
from cortex.neuron.worker.hosts.replicated import ReplicatedHost
from cortex.neuron.worker.model_host import LoadRejected
from cortex.neuron.worker.process import WorkerLost
from cortex.system.tasks import run_once
from cortex.wire.words import plural

log = logging.getLogger(__name__)

_RETRY_PERIODS = 6
"""Factor of the delay after a failed attempt."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The state that the decision about a model's replicas depends on."""

    num_replicas: int
    max_replicas: int
    waited_s: float = 0.0
    """How long the first request of the queue has waited; 0 without a queue."""
    idle_s: float | None = None
    """Seconds that the least recently used extra replica has been idle; None if all have requests."""
    since_change_s: float = float("inf")
    """Seconds since a replica was added or removed."""
    since_failure_s: float = float("inf")
    """Seconds since a replica was lost or could not be added."""


@dataclass(frozen=True, slots=True)
class ReplicaRules:
    add_after_s: float
    remove_after_s: float

    @classmethod
    def of(cls, limits: Limits) -> ReplicaRules:
        return cls(limits.add_replica_after_s, limits.remove_replica_after_s)

    def decide(self, demand: Demand) -> Literal["add", "remove"] | None:
        """Adds a replica if requests still wait after the latest change; removes an idle one."""
        if demand.waited_s >= self.add_after_s and demand.num_replicas < demand.max_replicas:
            has_settled = demand.since_change_s >= self.add_after_s
            may_retry = demand.since_failure_s >= _RETRY_PERIODS * self.add_after_s
            return "add" if has_settled and may_retry else None
        if demand.waited_s == 0 and demand.idle_s is not None and demand.idle_s >= self.remove_after_s:
            return "remove"
        return None


class ReplicaDemand:
    """Belongs to the daemon's loop."""

    def __init__(
        self,
        rules: ReplicaRules,
        growing: Callable[[], Iterable[tuple[KnownModel, Instance]]],
        add: Callable[[KnownModel, ReplicatedHost], Awaitable[bool]],
        on_changed: Callable[[str], None],
    ) -> None:
        """`growing`: the ready models that may have extra replicas. `add` loads another one and returns False if it is
        no longer needed or no device has room. `on_changed`: called with the id of a model whose number of replicas
        changed."""
        self._rules = rules
        self._growing = growing
        self._add_to = add
        self._on_changed = on_changed
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._num_replicas: dict[str, int] = {}
        """Model id → number of replicas, as published."""
        self._failed_s: dict[str, float] = {}
        """Model id → when adding a replica failed, on the loop's clock."""

    async def run(self) -> None:
        period_s = min(1.0, self._rules.add_after_s / 2, self._rules.remove_after_s / 2)
        try:
            while True:
                growing = list(self._growing())
                ids = {model.id for model, _ in growing}
                self._num_replicas = {key: count for key, count in self._num_replicas.items() if key in ids}
                for model, instance in growing:
                    if isinstance(instance.host, ReplicatedHost):
                        self._publish(model, len(instance.host.replica_devices))
                        if model.id not in self._changes:
                            self._adjust(model, instance, instance.host)
                await asyncio.sleep(period_s)
        finally:
            for change in self._changes.values():
                change.cancel()
            await asyncio.gather(*self._changes.values(), return_exceptions=True)

    def _publish(self, model: KnownModel, num_replicas: int) -> None:
        before, self._num_replicas[model.id] = self._num_replicas.get(model.id, model.replicas), num_replicas
        if num_replicas != before:  # added, idle, lost, or unloaded because another load needed the memory
            log.info("%s: %s instead of %d", model.id, plural(num_replicas, "replica"), before)
            self._on_changed(model.id)

    def _adjust(self, model: KnownModel, instance: Instance, replicas: ReplicatedHost) -> None:
        now_s = asyncio.get_running_loop().time()
        idle = replicas.extras.idle()
        demand = Demand(
            len(replicas.replica_devices),
            model.max_replicas,
            instance.waited_s,
            idle[0][0] if idle else None,
            now_s - replicas.extras.changed_at_s,
            now_s - max(replicas.lost_at_s, self._failed_s.get(model.id, replicas.lost_at_s)),
        )
        match self._rules.decide(demand):
            case "add":
                self._start(model.id, self._add(model, replicas))
            case "remove":
                self._start(model.id, replicas.extras.remove(idle[0][1], 0.0))

    def _start(self, model_id: str, change: Coroutine[Any, Any, None]) -> None:
        task = self._changes[model_id] = run_once(change, f"change the replicas of {model_id}")
        task.add_done_callback(lambda _: self._changes.pop(model_id, None))

    async def _add(self, model: KnownModel, replicas: ReplicatedHost) -> None:
        is_added, reason = False, "no device has room for it, or another load needs it"
        try:
            is_added = await self._add_to(model, replicas)
        except (LoadRejected, WorkerLost) as error:
            reason = str(error)
        if is_added:
            self._failed_s.pop(model.id, None)
        else:
            level = logging.DEBUG if model.id in self._failed_s else logging.INFO  # of a series, the first one
            log.log(level, "%s: requests wait, but no replica was added: %s", model.id, reason)
            self._failed_s[model.id] = asyncio.get_running_loop().time()
