"""Decides which requests a loaded model runs, queues or rejects. No I/O; one per loaded model.

Only here are the slots of a model shared fairly: the engine runs what it is sent in order of arrival. So a
request is sent only when the engine has a slot and KV cache for it. A free slot goes to the principal that holds the
fewest, and anonymous requests come last. The queue is bounded; a full queue displaces the request of the principal
with the largest share of it, or rejects the new one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cortex.wire.words import plural

ANONYMOUS = ""
_RATE_WINDOW_S = 30.0
_MIN_RATE_SAMPLES = 8
_DEFAULT_RETRY_S = 5.0
_NAMED_MEMORY_S = 600.0
"""Slots are reserved for named principals until this long after the latest request of one."""
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request. `release` must follow `enter`, whatever ended the request."""

    principal: str
    cache_tokens: int
    """KV cache that it needs to start, in tokens."""
    start: Callable[[], None]
    """Called when the request gets its slot."""
    reject: Callable[[float], None]
    """Called when the request is displaced from the queue, with the seconds after which to retry."""
    has_slot: bool = field(default=False, init=False)
    has_output: bool = field(default=False, init=False)
    entered_s: float = field(default=0.0, init=False)
    number: int = field(default=0, init=False)
    """Its place in the order of arrival."""


class QueueFull(Exception):
    """The queue has no place; one should be free in `retry_after_s`, by the measured rate."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{plural(waiting, 'request is', 'requests are')} waiting already")
        self.waiting = waiting
        self.retry_after_s = retry_after_s


class Admission:
    """Belongs to one loop. Times are passed in."""

    def __init__(self, slots: int, max_queue: int) -> None:
        self.slots = slots
        """Requests that may run at once."""
        self._max_queue = max_queue
        self.running = 0
        self.waiting = 0
        self._num_entered = 0
        self._slots_held: Counter[str] = Counter()
        self._queues: dict[str, dict[QueuedRequest, None]] = {}
        """The waiting requests of each principal, in order of arrival. A decision looks at the first of each:
        its cost does not grow with the requests that wait."""
        self._free_cache_tokens = math.inf
        self._pending_cache_tokens = 0
        """Needed by requests that have a slot but no output yet: the engine's report may not include them."""
        self._finished_s: deque[float] = deque(maxlen=1024)
        self._named_seen_s = -math.inf

    def waited_s(self, now_s: float) -> float:
        """How long the first request of the queue has waited; 0 if there is none."""
        return now_s - min(map(_first, self._queues.values()), key=_number).entered_s if self._queues else 0.0

    def enter(self, queued: QueuedRequest, now_s: float) -> None:
        """Starts or queues `queued`. Raises QueueFull, unless another request is displaced for it."""
        self._num_entered += 1
        queued.entered_s, queued.number = now_s, self._num_entered
        if queued.principal != ANONYMOUS:
            self._named_seen_s = now_s
        if not self._queues and self._may_take_slot(queued.principal, now_s) and self._has_room_for(queued):
            self._give_slot(queued)
            return
        if self.waiting >= self._max_queue:
            self._displace_for(queued, now_s)
        self._queues.setdefault(queued.principal, {})[queued] = None
        self.waiting += 1
        self._fill_slots(now_s)

    def produced(self, queued: QueuedRequest, now_s: float) -> None:
        """The request produced output: from now on the engine's reports include its cache."""
        if queued.has_slot and not queued.has_output:
            queued.has_output = True
            self._pending_cache_tokens -= queued.cache_tokens
            self._fill_slots(now_s)

    def cache_reported(self, free_tokens: int, now_s: float) -> None:
        """The engine reported how much of its KV cache no sequence holds."""
        self._free_cache_tokens = free_tokens
        self._fill_slots(now_s)

    def release(self, queued: QueuedRequest, now_s: float, *, finished: bool) -> None:
        """The request ended. `finished`: it ran to its own end; only those count for the rate."""
        if queued.has_slot:
            queued.has_slot = False
            self.running -= 1
            self._slots_held[queued.principal] -= 1
            if not self._slots_held[queued.principal]:
                del self._slots_held[queued.principal]
            if queued.has_output:
                self._free_cache_tokens += queued.cache_tokens  # an estimate, until the next report
            else:
                self._pending_cache_tokens -= queued.cache_tokens
            if finished:
                self._finished_s.append(now_s)
        elif queued in self._queues.get(queued.principal, ()):
            self._leave_queue(queued)
        self._fill_slots(now_s)

    def clear(self) -> list[QueuedRequest]:
        """Empties the queue and returns what was in it."""
        queued = sorted((queued for queue in self._queues.values() for queued in queue), key=_number)
        self._queues.clear()
        self.waiting = 0
        return queued

    def retry_after_s(self, now_s: float) -> float:
        """When a new request should find a place: the queue's length over the recent rate of finished requests."""
        recent = [at_s for at_s in self._finished_s if now_s - at_s <= _RATE_WINDOW_S]
        since_s = now_s
        if len(recent) < 2:
            # Responses are long or the model was idle: the latest requests say more than the latest seconds.
            recent = list(self._finished_s)[-_MIN_RATE_SAMPLES:]
            since_s = recent[-1] if recent else now_s
        if len(recent) < 2:
            return _DEFAULT_RETRY_S
        rate = len(recent) / max(since_s - recent[0], 0.001)
        return min(max((self.waiting + 1) / rate, _MIN_RETRY_S), _MAX_RETRY_S)

    def _fill_slots(self, now_s: float) -> None:
        while self._queues and self.running < self.slots:
            principals = [each for each in self._queues if self._may_take_slot(each, now_s)]
            if not principals:
                return
            queued = min((_first(self._queues[each]) for each in principals), key=self._turn)
            if not self._has_room_for(queued):
                return  # requests behind it wait too, so that small ones do not starve a large one
            self._leave_queue(queued)
            self._give_slot(queued)

    def _turn(self, queued: QueuedRequest) -> tuple[bool, int, int]:
        """The lowest is next."""
        return queued.principal == ANONYMOUS, self._slots_held[queued.principal], queued.number

    def _leave_queue(self, queued: QueuedRequest) -> None:
        queue = self._queues[queued.principal]
        del queue[queued]
        self.waiting -= 1
        if not queue:
            del self._queues[queued.principal]

    def _give_slot(self, queued: QueuedRequest) -> None:
        queued.has_slot = True
        self.running += 1
        self._slots_held[queued.principal] += 1
        self._pending_cache_tokens += queued.cache_tokens
        queued.start()

    def _has_room_for(self, queued: QueuedRequest) -> bool:
        """Whether its cache fits next to what the engine holds. A request alone always starts."""
        return self.running == 0 or self._pending_cache_tokens + queued.cache_tokens <= self._free_cache_tokens

    def _may_take_slot(self, principal: str, now_s: float) -> bool:
        """Whether a slot is free. A quarter of them is reserved for named principals while there are any."""
        if self.running >= self.slots:
            return False
        if principal != ANONYMOUS or now_s - self._named_seen_s > _NAMED_MEMORY_S:
            return True
        return self._slots_held[ANONYMOUS] < max(1, self.slots - self.slots // 4)

    def _displace_for(self, newcomer: QueuedRequest, now_s: float) -> None:
        """Displaces the latest request of the principal with the largest share of the queue. Raises QueueFull."""
        retry_after_s = self.retry_after_s(now_s)
        queues = sorted(self._queues.values(), key=lambda queue: _first(queue).number)
        shares = {_first(queue).principal: len(queue) for queue in queues}
        largest = max(shares, key=lambda principal: (principal == ANONYMOUS, shares[principal]), default=None)
        if largest is None or largest == newcomer.principal or newcomer.principal == ANONYMOUS:
            raise QueueFull(self.waiting, retry_after_s)
        if largest != ANONYMOUS and shares[largest] <= shares.get(newcomer.principal, 0) + 1:
            raise QueueFull(self.waiting, retry_after_s)
        displaced = next(reversed(self._queues[largest]))
        self._leave_queue(displaced)
        displaced.reject(retry_after_s)


def _first(queue: Iterable[QueuedRequest]) -> QueuedRequest:
    return next(iter(queue))


def _number(queued: QueuedRequest) -> int:
    return queued.number
