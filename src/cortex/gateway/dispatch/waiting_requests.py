"""Serves and fails the requests in the queues. What is loaded for them is decided elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from cortex.fleet.placement import explain
from cortex.fleet.placement.decision import Decision
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
        """Deliver the leases that are available now, in order of arrival."""
        for model in self._queues.models:
            while (pending := self._queues.first(model)) is not None:
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
