"""Requests that wait for a model, by class and in order of arrival."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

from cortex.fleet.demand import Demand
from cortex.fleet.placement.decision import Origin
from cortex.fleet.queueing import Waiting
from cortex.gateway.dispatch.leases import PendingRequest
from cortex.system.fair_turns import DEFAULT, aged
from cortex.wire.errors import Overloaded
from cortex.wire.fields.request_class import CLASSES
from cortex.wire.words import plural


class ModelQueue:
    """The requests that wait for one model, a queue for each class."""

    __slots__ = ("by_level",)

    def __init__(self) -> None:
        self.by_level: tuple[deque[PendingRequest], ...] = tuple(deque() for _ in CLASSES)

    def __len__(self) -> int:
        return sum(map(len, self.by_level))

    def __iter__(self) -> Iterator[PendingRequest]:
        return chain.from_iterable(self.by_level)

    @property
    def oldest(self) -> PendingRequest:
        return min((own[0] for own in self.by_level if own), key=_since)

    def next(self, now: float) -> PendingRequest:
        """The oldest of the highest class; one that has waited for long counts as one of a higher class."""
        return min(
            (own[0] for own in self.by_level if own), key=lambda each: (-aged(each.level, now - each.since), each.since)
        )

    def add(self, pending: PendingRequest) -> None:
        self.by_level[pending.level].append(pending)

    def remove(self, pending: PendingRequest) -> bool:
        """False if it did not wait."""
        own = self.by_level[pending.level]
        if pending not in own:
            return False
        own.remove(pending)
        return True


def _since(pending: PendingRequest) -> float:
    return pending.since


class Queues:
    """One queue per model, which exists while requests wait. Within a class, first come, first served. Owned by the
    dispatcher; delivers nothing itself."""

    def __init__(self, demand: Demand) -> None:
        self._demand = demand
        self.max_waiting = 0
        """Requests that may wait for one model."""
        self.max_wait_s = 0.0
        self._pending: dict[str, ModelQueue] = {}

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
        queue = self._pending.get(pending.model) or ModelQueue()
        # Work that can wait never fills the queue for the rest.
        most = self.max_waiting if pending.level >= DEFAULT else max(1, self.max_waiting * 3 // 4)
        if len(queue) >= most:
            raise Overloaded(
                f"{plural(len(queue), 'request waits', 'requests wait')} for {pending.model}; "
                "try again later or raise gateway.max_waiting.",
                retry_after_s=10.0,
            )
        is_new_client = not self._demand.awaits(pending.client, pending.model)
        may_change_decision = is_new_client or all(other.origin == "background" for other in queue)
        self._pending.setdefault(pending.model, queue).add(pending)
        self._demand.waits(pending.client, pending.model, pending.since)
        return may_change_decision

    def leave(self, pending: PendingRequest) -> None:
        """Remove a request, served or not; no-op for one that does not wait."""
        queue = self._pending.get(pending.model)
        if queue is not None and queue.remove(pending):
            self._demand.waits_no_more(pending.client, pending.model)
            if not queue:
                del self._pending[pending.model]

    def first(self, model: str, now: float) -> PendingRequest | None:
        """The request whose turn it is; it stays in the queue."""
        queue = self._pending.get(model)
        return queue.next(now) if queue else None

    def tell(self, model: str, wait_s: float) -> None:
        """Report to the requests that wait for `model`, once, how long a node takes to wake for it."""
        for pending in self._pending.get(model, ()):
            tell, pending.tell = pending.tell, None
            if tell is not None:
                tell(wait_s)

    def by_class(self, model: str) -> dict[str, int]:
        """How many of each class wait for `model`; only classes with any."""
        queue = self._pending.get(model)
        return {} if queue is None else {CLASSES[level]: len(own) for level, own in enumerate(queue.by_level) if own}

    def overdue(self, now: float) -> Iterator[PendingRequest]:
        """Remove, one by one, the requests that have waited for `max_wait_s`."""
        for model in self.models:
            while (queue := self._pending.get(model)) and now - (pending := queue.oldest).since >= self.max_wait_s:
                self.leave(pending)
                yield pending

    def remove_all(self, model: str, until: float = math.inf) -> Iterable[PendingRequest]:
        """Remove and return every request for `model` that began to wait at `until` or before."""
        found = [pending for pending in self._pending.get(model, ()) if pending.since <= until]
        for pending in found:
            self.leave(pending)
        return found

    def origin(self, model: str) -> Origin:
        """The origin of a decision for `model`; background if no request waits for it."""
        origins = {pending.origin for pending in self._pending.get(model, ())}
        return "operator" if "operator" in origins else "request" if "request" in origins else "background"

    def waiting(self) -> list[Waiting]:
        """The queues as input of a decision."""
        return [
            Waiting(model_id=model, since=queue.oldest.since, count=len(queue), origin=self.origin(model))
            for model, queue in self._pending.items()
        ]
