"""Decides which requests a loaded model runs, queues or rejects. No I/O; one per loaded model.

Only here are the slots of a model shared fairly: the engine runs what it is sent in order of arrival. So a
request is sent only when the engine has a slot and KV cache for it. A free slot goes to the principal that holds the
fewest, and anonymous requests come last. The queue is bounded; a full queue displaces the request of the principal
with the largest share of it, or rejects the new one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
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
        self._slots_held: Counter[str] = Counter()
        self._queue: list[QueuedRequest] = []
        self._free_cache_tokens = math.inf
        self._pending_cache_tokens = 0
        """Needed by requests that have a slot but no output yet: the engine's report may not include them."""
        self._finished_s: deque[float] = deque(maxlen=1024)
        self._named_seen_s = -math.inf

    @property
    def running(self) -> int:
        return self._slots_held.total()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def waited_s(self, now_s: float) -> float:
        """How long the first request of the queue has waited; 0 if there is none."""
        return now_s - self._queue[0].entered_s if self._queue else 0.0

    def enter(self, queued: QueuedRequest, now_s: float) -> None:
        """Starts or queues `queued`. Raises QueueFull, unless another request is displaced for it."""
        queued.entered_s = now_s
        if queued.principal != ANONYMOUS:
            self._named_seen_s = now_s
        if not self._queue and self._may_take_slot(queued.principal, now_s) and self._has_room_for(queued):
            self._give_slot(queued)
            return
        if len(self._queue) >= self._max_queue:
            self._displace_for(queued, now_s)
        self._queue.append(queued)
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
            self._slots_held[queued.principal] -= 1
            if queued.has_output:
                self._free_cache_tokens += queued.cache_tokens  # an estimate, until the next report
            else:
                self._pending_cache_tokens -= queued.cache_tokens
            if finished:
                self._finished_s.append(now_s)
        elif queued in self._queue:
            self._queue.remove(queued)
        self._fill_slots(now_s)

    def clear(self) -> list[QueuedRequest]:
        """Empties the queue and returns what was in it."""
        queue, self._queue = self._queue, []
        return queue

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
        return min(max((len(self._queue) + 1) / rate, _MIN_RETRY_S), _MAX_RETRY_S)

    def _fill_slots(self, now_s: float) -> None:
        while candidates := [queued for queued in self._queue if self._may_take_slot(queued.principal, now_s)]:
            # The queue is in order of arrival and `min` returns the first of equals.
            queued = min(candidates, key=lambda each: (each.principal == ANONYMOUS, self._slots_held[each.principal]))
            if not self._has_room_for(queued):
                return  # requests behind it wait too, so that small ones do not starve a large one
            self._queue.remove(queued)
            self._give_slot(queued)

    def _give_slot(self, queued: QueuedRequest) -> None:
        queued.has_slot = True
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
        shares = Counter(queued.principal for queued in self._queue)
        largest = max(shares, key=lambda principal: (principal == ANONYMOUS, shares[principal]), default=None)
        if largest is None or largest == newcomer.principal or newcomer.principal == ANONYMOUS:
            raise QueueFull(len(self._queue), retry_after_s)
        if largest != ANONYMOUS and shares[largest] <= shares[newcomer.principal] + 1:
            raise QueueFull(len(self._queue), retry_after_s)
        displaced = next(queued for queued in reversed(self._queue) if queued.principal == largest)
        self._queue.remove(displaced)
        displaced.reject(retry_after_s)
