"""Who gets a seat in a model's engine, who waits, who is turned away. One per loaded model; no I/O.

Seats are what the engine works on at once; the queue is bounded. A free seat goes to the caller who holds
the fewest, so that nobody's batch shuts the others out; anonymous callers take what named ones leave.
Every admitted ticket ends in exactly one `release`, whatever ended it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

ANONYMOUS = ""
_RATE_WINDOW_S = 30.0
_FEW_ENDS = 8
_UNKNOWN_RETRY_S = 5.0
_NAMED_MEMORY_S = 600.0
"""Seats are kept clear of anonymous callers for this long after a named one was last seen."""
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request's place. `start` is called when it gets its seat, `refuse` when it loses its place in the queue."""

    principal: str
    start: Callable[[], None]
    refuse: Callable[[float], None]
    """Called with the seconds after which to try again."""
    has_slot: bool = field(default=False, init=False)


class QueueFull(Exception):
    """There is no place; `retry_after_s` is when there should be one, by the measured rate."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests are waiting already")
        self.waiting = waiting
        self.retry_after_s = retry_after_s


class Admission:
    """Belongs to one loop. Times are passed in."""

    def __init__(self, slots: int, max_queue: int) -> None:
        self._slots = slots
        self._max_queue = max_queue
        self._slots_held: Counter[str] = Counter()
        self._queue: list[QueuedRequest] = []
        self._finished_s: deque[float] = deque(maxlen=1024)
        self._named_seen_s = -math.inf

    @property
    def running(self) -> int:
        return self._slots_held.total()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def enter(self, queued: QueuedRequest, now_s: float) -> None:
        """Seats or queues `queued`. Raises QueueFull, unless somebody with a larger share of the queue must yield."""
        if queued.principal != ANONYMOUS:
            self._named_seen_s = now_s
        if self.running < self._slots and not self._queue and self._may_take_slot(queued.principal, now_s):
            self._give_slot(queued)
            return
        if len(self._queue) >= self._max_queue:
            self._displace_for(queued, now_s)
        self._queue.append(queued)
        self._fill(now_s)

    def release(self, queued: QueuedRequest, now_s: float, *, finished: bool) -> None:
        """The ticket's request is over. `finished`: it ran to its own end, which is what the rate counts."""
        if queued.has_slot:
            queued.has_slot = False
            self._slots_held[queued.principal] -= 1
            if finished:
                self._finished_s.append(now_s)
        elif queued in self._queue:
            self._queue.remove(queued)
        self._fill(now_s)

    def clear(self) -> Iterator[QueuedRequest]:
        """Empties the queue; the caller tells those who waited."""
        queue, self._queue = self._queue, []
        yield from queue

    def retry_after_s(self, now_s: float) -> float:
        """When a newcomer should find a place: the queue over the rate at which requests ended lately."""
        recent = [at_s for at_s in self._finished_s if now_s - at_s <= _RATE_WINDOW_S]
        since_s = now_s
        if len(recent) < 2:
            # Answers are long, or nobody asked for a while: the last few tell more than the last few seconds.
            recent = list(self._finished_s)[-_FEW_ENDS:]
            since_s = recent[-1] if recent else now_s
        if len(recent) < 2:
            return _UNKNOWN_RETRY_S
        rate = len(recent) / max(since_s - recent[0], 0.001)
        return min(max((len(self._queue) + 1) / rate, _MIN_RETRY_S), _MAX_RETRY_S)

    def _fill(self, now_s: float) -> None:
        while self.running < self._slots:
            candidates = [queued for queued in self._queue if self._may_take_slot(queued.principal, now_s)]
            if not candidates:
                return
            # The queue is in order of arrival and `min` keeps the first of equals.
            queued = min(candidates, key=lambda each: (each.principal == ANONYMOUS, self._slots_held[each.principal]))
            self._queue.remove(queued)
            self._give_slot(queued)

    def _give_slot(self, queued: QueuedRequest) -> None:
        queued.has_slot = True
        self._slots_held[queued.principal] += 1
        queued.start()

    def _may_take_slot(self, principal: str, now_s: float) -> bool:
        """A quarter of the seats is kept clear of anonymous callers while named ones are about."""
        if principal != ANONYMOUS or now_s - self._named_seen_s > _NAMED_MEMORY_S:
            return True
        return self._slots_held[ANONYMOUS] < max(1, self._slots - self._slots // 4)

    def _displace_for(self, newcomer: QueuedRequest, now_s: float) -> None:
        retry_after_s = self.retry_after_s(now_s)
        shares = Counter(queued.principal for queued in self._queue)
        largest = max(shares, key=lambda principal: (principal == ANONYMOUS, shares[principal]), default=None)
        if largest is None or largest == newcomer.principal or newcomer.principal == ANONYMOUS:
            raise QueueFull(len(self._queue), retry_after_s)
        if largest != ANONYMOUS and shares[largest] <= shares[newcomer.principal] + 1:
            raise QueueFull(len(self._queue), retry_after_s)
        loser = next(queued for queued in reversed(self._queue) if queued.principal == largest)
        self._queue.remove(loser)
        loser.refuse(retry_after_s)
