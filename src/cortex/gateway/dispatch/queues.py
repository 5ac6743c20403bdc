"""Requests that wait for a model, in order of arrival."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

from cortex.fleet.demand import Demand
from cortex.fleet.placement.decision import Origin
from cortex.fleet.queueing import Waiting
from cortex.gateway.dispatch.leases import PendingRequest
from cortex.wire.errors import Overloaded
from cortex.wire.words import plural


class Queues:
    """One first-in, first-out queue per model; it exists while requests wait. Owned by the dispatcher; delivers nothing
    itself."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self.max_waiting = 0
        """Requests that may wait for one model."""
        self.max_wait_s = 0.0
        self._pending: dict[str, deque[PendingRequest]] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def __contains__(self, model: str) -> bool:
        return model in self._pending

    @property
    def models(self) -> tuple[str, ...]:
        """The models that requests wait for."""
        return tuple(self._pending)

    @property
    def depths(self) -> dict[str, int]:
        return {model: len(queue) for model, queue in self._pending.items()}

    def join(self, pending: PendingRequest) -> bool:
        """Add a request; True if that may change what is decided for its model. Raises Overloaded when full."""
        queue = self._pending.get(pending.model, ())
        if len(queue) >= self.max_waiting:
            raise Overloaded(
                f"{plural(len(queue), 'request waits', 'requests wait')} for {pending.model}; "
                "try again later or raise gateway.max_waiting.",
                retry_after_s=10.0,
            )
        is_new_client = not self._demand.awaits(pending.client, pending.model)
        may_change_decision = is_new_client or all(other.origin == "background" for other in queue)
        self._pending.setdefault(pending.model, deque()).append(pending)
        self._demand.waits(pending.client, pending.model, pending.since)
        return may_change_decision

    def leave(self, pending: PendingRequest) -> None:
        """Remove a request, served or not; no-op for one that does not wait."""
        queue = self._pending.get(pending.model)
        if queue is not None and pending in queue:
            queue.remove(pending)
            self._demand.waits_no_more(pending.client, pending.model)
            if not queue:
                del self._pending[pending.model]

    def first(self, model: str) -> PendingRequest | None:
        """The request whose turn it is; it stays in the queue."""
        queue = self._pending.get(model)
        return queue[0] if queue else None

    def overdue(self, now: float) -> Iterator[PendingRequest]:
        """Remove, one by one, the requests that have waited for `max_wait_s`."""
        for model in self.models:
            while (pending := self.first(model)) is not None and now - pending.since >= self.max_wait_s:
                self.leave(pending)
                yield pending

    def remove_all(self, model: str, until: float = math.inf) -> Iterable[PendingRequest]:
        """Remove and return every request for `model` that began to wait at `until` or before."""
        found = [pending for pending in self._pending.get(model, ()) if pending.since <= until]
        for pending in found:
            self.leave(pending)
        return found

    def origin(self, model: str) -> Origin:
        """On whose behalf a decision for `model` is made; background where no request waits for it."""
        origins = {pending.origin for pending in self._pending.get(model, ())}
        return "operator" if "operator" in origins else "request" if "request" in origins else "background"

    def waiting(self) -> list[Waiting]:
        """The queues as input of a decision."""
        return [
            Waiting(model_id=model, since=queue[0].since, count=len(queue), origin=self.origin(model))
            for model, queue in self._pending.items()
        ]
