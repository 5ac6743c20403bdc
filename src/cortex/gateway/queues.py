"""Requests that wait for a model, in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from cortex.fleet.decision import Origin
from cortex.fleet.queueing import Waiting
from cortex.gateway.tickets import Ticket
from cortex.wire.errors import Overloaded


class Queues:
    """First come, first served, for each model by itself. Owned by the dispatcher; delivers nothing itself.

    A model has a queue while somebody waits for it.
    """

    def __init__(self) -> None:
        self.max_waiting = 0
        """Requests that may wait for one model."""
        self.max_wait_s = 0.0
        self._tickets: dict[str, deque[Ticket]] = {}

    def __bool__(self) -> bool:
        return bool(self._tickets)

    def __contains__(self, model: str) -> bool:
        return model in self._tickets

    @property
    def models(self) -> tuple[str, ...]:
        """Those that somebody waits for."""
        return tuple(self._tickets)

    @property
    def depths(self) -> dict[str, int]:
        return {model: len(queue) for model, queue in self._tickets.items()}

    def join(self, ticket: Ticket) -> bool:
        """Wait; True where that may change what is decided for the model. Raises Overloaded when too many do."""
        queue = self._tickets.get(ticket.model, ())
        if len(queue) >= self.max_waiting:
            raise Overloaded(
                f"{len(queue)} requests already wait for {ticket.model}; try again later, or raise max_waiting.",
                retry_after_s=10.0,
            )
        is_news = all(other.origin == "background" for other in queue)
        self._tickets.setdefault(ticket.model, deque()).append(ticket)
        return is_news

    def leave(self, ticket: Ticket) -> None:
        """Wait no more, served or not; no-op for one that does not wait."""
        queue = self._tickets.get(ticket.model)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            if not queue:
                del self._tickets[ticket.model]

    def first(self, model: str) -> Ticket | None:
        """Whose turn it is; it goes on waiting."""
        queue = self._tickets.get(model)
        return queue[0] if queue else None

    def overdue(self, now: float) -> Iterator[Ticket]:
        """Take out, one by one, those who have waited too long."""
        for model in self.models:
            while (ticket := self.first(model)) is not None and now - ticket.since >= self.max_wait_s:
                self.leave(ticket)
                yield ticket

    def dismiss(self, model: str) -> Iterable[Ticket]:
        """Take out everybody who waits for `model`."""
        return self._tickets.pop(model, ())

    def waiting(self) -> list[Waiting]:
        """The queues as they count in a decision."""
        return [_waiting(model, queue) for model, queue in self._tickets.items()]


def _waiting(model: str, queue: deque[Ticket]) -> Waiting:
    origins: set[Origin] = {ticket.origin for ticket in queue}
    origin: Origin = "operator" if "operator" in origins else "request" if "request" in origins else "background"
    return Waiting(model_id=model, since=queue[0].since, count=len(queue), origin=origin)
