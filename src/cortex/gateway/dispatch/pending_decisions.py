"""Tracks what has changed since the last decision, so that only affected models are decided again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from cortex.fleet.placement import explain
from cortex.fleet.placement.decision import Decision, Origin
from cortex.fleet.placement.search import may_fit
from cortex.fleet.queueing import Plan, Waiting, plan
from cortex.fleet.topology import Fleet, ModelOnNode
from cortex.gateway.dispatch.leases import LeasePool
from cortex.gateway.dispatch.model_jobs import ModelJobs
from cortex.gateway.dispatch.queues import Queues
from cortex.wire.errors import CortexError, Overloaded
from cortex.wire.words import duration


class WaitingRequests:
    """Ends the wait of requests, with a lease or with an error. Owned by the dispatcher."""

    def __init__(self, queues: Queues, leases: LeasePool, jobs: ModelJobs, clock: Callable[[], float]) -> None:
        self._queues = queues
        self._leases = leases
        self._jobs = jobs
        self._clock = clock

    def serve(self) -> None:
        """Deliver the leases that are available now, by class and in order of arrival."""
        for model in self._queues.models:
            while (pending := self._queues.first(model, self._clock())) is not None:
                lease = self._leases.acquire_for(pending)
                if lease is None:
                    break
                lease.waited_s = self._clock() - pending.since
                lease.load_s = self._jobs.load_seconds(lease.target, pending.since)
                lease.reason = "the model was loaded there" if lease.load_s else "the first replica with room"
                self._queues.leave(pending)
                pending.deliver(lease)

    def fail(self, model: str, error: CortexError, until: float = math.inf) -> None:
        """Deliver `error` to every request for `model` that began to wait at `until` or before."""
        for pending in self._queues.remove_all(model, until):
            pending.deliver(error)

    def fail_overdue(self, explain_model: Callable[[str], Decision]) -> None:
        """Fail the requests that have waited for too long, each with what would be decided for its model now."""
        decide = cache(explain_model)
        for pending in self._queues.overdue(self._clock()):
            decision = decide(pending.model)
            pending.deliver(
                Overloaded(
                    f"{pending.model} did not become ready within {duration(self._queues.max_wait_s)}. "
                    f"{explain.outcome(decision)}",
                    retry_after_s=30.0,
                    details={"decision": explain.as_json(decision)},
                )
            )


class PendingDecisions:
    """Truthy while a decision is pending; time-based changes wait for the tick. Owned by the dispatcher."""

    def __init__(self) -> None:
        self.joined: set[str] = set()
        """Models that requests have begun to wait for."""
        self.awaited: frozenset[str] = frozenset()
        """Nodes where requests must end before a model that waits can be loaded."""
        self.closed: frozenset[ModelOnNode] = frozenset()
        """Ready models that must take no new requests."""
        self.is_all = True
        """Whether something has changed that may concern every model."""
        self.nodes: set[str] = set()
        """Nodes that have changed."""
        self._blocked: frozenset[str] = frozenset()
        self._partly_assessed: dict[str, Origin] = {}
        self._is_any_overdue = False
        self._last_rechecked = ""

    def __bool__(self) -> bool:
        return self.is_all or bool(self.nodes) or bool(self.joined)

    def request_ended(self, name: str, fleet: Callable[[], Fleet], clock: Callable[[], float]) -> bool:
        """The last request of a model has ended on a node. Returns whether a waiting model may get room there."""
        if not self.awaited and not self._partly_assessed:
            return False
        if name not in self.awaited and self._partly_assessed and (node := fleet().node(name)) is not None:
            idle = fleet().as_if_idle(node)
            quiet = idle.node(name) or node
            now = clock()
            if any(may_fit(each, quiet, idle, now, origin=origin) for each, origin in self._partly_assessed.items()):
                self.awaited |= {name}
        if name in self.awaited:
            self.nodes.add(name)
        return name in self.awaited

    def nobody_waits(self) -> None:
        self.awaited = frozenset()
        self._partly_assessed = {}

    def decide(self, waiting: Callable[[], Sequence[Waiting]], fleet: Fleet, now: float) -> Plan:
        """Decide for the affected models; for all of them if one is overdue, because its room is reserved before others
        get any."""
        groups = waiting()
        is_partial = not (self.is_all or self.nodes or self._is_any_overdue or self.closed)
        if is_partial:
            decided = plan([group for group in groups if group.model_id in self.joined], fleet, now)
            self.awaited |= decided.awaited
            self._partly_assessed |= decided.partly_assessed
            self._blocked |= decided.blocked
        else:
            names = {*self.nodes, *(fleet.nodes[position].name for position in fleet.index.sharing)}
            # A model that ends on its serving node frees its parts on others.
            news = [node for name in names if (node := fleet.node(name)) is not None]
            decided = plan(
                groups,
                fleet,
                now,
                blocked=self._blocked - self.joined,
                news=None if self.is_all else news,
                last_rechecked=self._last_rechecked,
            )
            is_any_skipped = bool(decided.blocked & self._blocked)
            self.awaited = (self.awaited if is_any_skipped else frozenset()) | decided.awaited
            still = {each: origin for each, origin in self._partly_assessed.items() if each in decided.blocked}
            self._partly_assessed = still | decided.partly_assessed
            self._blocked, self.closed = decided.blocked, decided.closed
            self._is_any_overdue = decided.is_any_overdue
            self._last_rechecked = decided.last_rechecked
        self.is_all = False
        self.nodes.clear()
        self.joined.clear()
        return decided
