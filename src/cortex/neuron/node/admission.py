"""Decides which requests a loaded model runs, queues or rejects. No I/O; one per loaded model.

Fairness between principals is enforced only here: the engine runs requests by class and order of arrival. So a request
is sent only when the engine has a slot and KV cache for it, or can take them from a request of a lower class. A free
slot goes to the highest class; within a class, to the principal that has used the fewest tokens, and among equals to
the one that holds the fewest slots. Anonymous requests come last. The queue is bounded; a full queue displaces a
request of a lower class, or that of the principal with the largest share of it, or rejects the new one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cortex.system.fair_turns import DEFAULT, PRIORITY, VirtualTime, aged
from cortex.wire.words import plural

ANONYMOUS = ""
_RATE_WINDOW_S = 30.0
_MIN_RATE_SAMPLES = 8
_DEFAULT_RETRY_S = 5.0
_NAMED_MEMORY_S = 600.0
"""Slots are reserved for named principals until this long after the latest request of one."""
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


Owner = tuple[str, int]
"""A principal, and the level of some of its requests."""


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """One request. `release` must follow `enter`, whatever ended the request."""

    principal: str
    cache_tokens: int
    """KV cache that it needs to start, in tokens."""
    start: Callable[[], None]
    """Called when the request gets its slot."""
    reject: Callable[[float], None]
    """Called when the request is displaced from the queue, with the retry delay in seconds."""
    level: int = DEFAULT
    """Of its class: see `fair_turns`."""
    prompt_tokens: int = 0
    """Tokens charged to its principal at the start."""
    has_slot: bool = field(default=False, init=False)
    has_output: bool = field(default=False, init=False)
    entered_s: float = field(default=0.0, init=False)
    number: int = field(default=0, init=False)
    """Its place in the order of arrival."""
    served_level: int = field(default=DEFAULT, init=False)
    """Its level when it got its slot; higher than `level` after a long wait."""

    @property
    def owner(self) -> Owner:
        return self.principal, self.level


class QueueFull(Exception):
    """The queue has no place; one should be free in `retry_after_s`, by the measured rate."""

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{plural(waiting, 'request is', 'requests are')} waiting already")
        self.waiting = waiting
        self.retry_after_s = retry_after_s


class Admission:
    """Belongs to one loop. Times are passed in."""

    def __init__(self, slots: int, max_queue: int, *, preempted_slots: int = 0) -> None:
        """`preempted_slots`: additional requests that may start, each preempting one of a lower class."""
        self.slots = slots
        """Requests that may run at once."""
        self.preempted_slots = preempted_slots
        self._max_queue = max_queue
        self.running = 0
        self.waiting = 0
        self._num_entered = 0
        self._slots_held: Counter[str] = Counter()
        self._running_at = [0] * (PRIORITY + 1)
        """Requests that run, by level."""
        self._cache_at = [0] * (PRIORITY + 1)
        """The KV cache, in tokens, that these need to start."""
        self.waiting_at = [0] * (PRIORITY + 1)
        """Requests that wait, by level."""
        self._used: list[VirtualTime[str]] = [VirtualTime() for _ in range(PRIORITY + 1)]
        """Tokens used by principals at each level: usage at the idle level does not count against other work."""
        self._queues: dict[Owner, dict[QueuedRequest, None]] = {}
        """The waiting requests of each principal and level, in order of arrival. A decision looks only at the first of
        each, so its cost is independent of the queue's length."""
        self._free_cache_tokens = math.inf
        self._pending_cache_tokens = 0
        """KV cache of requests with a slot but no output yet, which the engine's report may not include."""
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
        if not self._queues and self._may_take_slot(queued.owner, now_s) and self._has_room_for(queued):
            self._give_slot(queued, now_s)
            return
        if self.waiting >= self._max_queue:
            self._displace_for(queued, now_s)
        self._queues.setdefault(queued.owner, {})[queued] = None
        self.waiting += 1
        self.waiting_at[queued.level] += 1
        self._used[queued.level].joins(queued.principal)
        self._fill_slots(now_s)

    def produced(self, queued: QueuedRequest, now_s: float) -> None:
        """The request produced output: from now on the engine's reports include its cache."""
        if queued.has_slot and not queued.has_output:
            queued.has_output = True
            self._pending_cache_tokens -= queued.cache_tokens
            self._fill_slots(now_s)

    def spent(self, queued: QueuedRequest, num_tokens: int) -> None:
        """The request used this many tokens beyond its prompt; negative: a part of that was cached."""
        self._used[queued.served_level].charge(queued.principal, num_tokens)

    def cache_reported(self, free_tokens: int, now_s: float) -> None:
        """The engine reported how much of its KV cache no sequence holds."""
        self._free_cache_tokens = free_tokens
        self._fill_slots(now_s)

    def release(self, queued: QueuedRequest, now_s: float, *, finished: bool) -> None:
        """The request ended. `finished`: it ran to its own end; only those count for the rate."""
        if queued.has_slot:
            queued.has_slot = False
            self.running -= 1
            self._running_at[queued.level] -= 1
            self._cache_at[queued.level] -= queued.cache_tokens
            self._slots_held[queued.principal] -= 1
            if not self._slots_held[queued.principal]:
                del self._slots_held[queued.principal]
            if queued.has_output:
                self._free_cache_tokens += queued.cache_tokens  # an estimate, until the next report
            else:
                self._pending_cache_tokens -= queued.cache_tokens
            if finished:
                self._finished_s.append(now_s)
        elif queued in self._queues.get(queued.owner, ()):
            self._leave_queue(queued)
        self._fill_slots(now_s)

    def clear(self) -> list[QueuedRequest]:
        """Empties the queue and returns what was in it."""
        queued = sorted((queued for queue in self._queues.values() for queued in queue), key=_number)
        for each in queued:
            self._leave_queue(each)
        return queued

    def retry_after_s(self, now_s: float) -> float:
        """Seconds until a new request should find a place: the queue's length over the recent rate of finished
        requests."""
        recent = [at_s for at_s in self._finished_s if now_s - at_s <= _RATE_WINDOW_S]
        since_s = now_s
        if len(recent) < 2:
            # Responses are long or the model was idle: the latest requests tell more than the latest seconds.
            recent = list(self._finished_s)[-_MIN_RATE_SAMPLES:]
            since_s = recent[-1] if recent else now_s
        if len(recent) < 2:
            return _DEFAULT_RETRY_S
        rate = len(recent) / max(since_s - recent[0], 0.001)
        return min(max((self.waiting + 1) / rate, _MIN_RETRY_S), _MAX_RETRY_S)

    def _fill_slots(self, now_s: float) -> None:
        while owners := [each for each in self._queues if self._may_take_slot(each, now_s)]:
            queued = min((_first(self._queues[each]) for each in owners), key=lambda each: self._turn(each, now_s))
            if not self._has_room_for(queued):
                return  # requests behind it wait too, so that small ones do not starve a large one
            self._leave_queue(queued)
            self._give_slot(queued, now_s)

    def _turn(self, queued: QueuedRequest, now_s: float) -> tuple[bool, int, float, int, int]:
        """The lowest is next."""
        principal, level = queued.principal, aged(queued.level, now_s - queued.entered_s)
        held = self._slots_held[principal]
        return principal == ANONYMOUS, -level, self._used[level].used(principal), held, queued.number

    def _leave_queue(self, queued: QueuedRequest) -> None:
        queue = self._queues[queued.owner]
        del queue[queued]
        self.waiting -= 1
        self.waiting_at[queued.level] -= 1
        self._used[queued.level].leaves(queued.principal)
        if not queue:
            del self._queues[queued.owner]

    def _give_slot(self, queued: QueuedRequest, now_s: float) -> None:
        queued.has_slot = True
        self.running += 1
        self._running_at[queued.level] += 1
        self._cache_at[queued.level] += queued.cache_tokens
        queued.served_level = aged(queued.level, now_s - queued.entered_s)
        self._used[queued.served_level].charge(queued.principal, queued.prompt_tokens)
        self._slots_held[queued.principal] += 1
        self._pending_cache_tokens += queued.cache_tokens
        queued.start()

    def _has_room_for(self, queued: QueuedRequest) -> bool:
        """Whether its cache fits into what the engine has free or can preempt. A request alone always starts."""
        preempted = sum(self._cache_at[: queued.level]) if self.preempted_slots else 0
        needed = self._pending_cache_tokens + queued.cache_tokens
        return self.running == 0 or needed <= self._free_cache_tokens + preempted

    def _may_take_slot(self, owner: Owner, now_s: float) -> bool:
        """Whether a slot is free, or one of a lower class can be preempted. A quarter of them is reserved for named
        principals while there are any."""
        principal, level = owner
        if self.running >= self.slots + self.preempted_slots:
            return False
        if self.running >= self.slots and sum(self._running_at[level:]) >= self.slots:
            return False
        if principal != ANONYMOUS or now_s - self._named_seen_s > _NAMED_MEMORY_S:
            return True
        return self._slots_held[ANONYMOUS] < max(1, self.slots - self.slots // 4)

    def _displace_for(self, newcomer: QueuedRequest, now_s: float) -> None:
        """Displaces the latest request of the lowest class, if that is below the newcomer's, or of the principal with
        the largest share of the queue. Raises QueueFull."""
        retry_after_s = self.retry_after_s(now_s)
        queues = sorted(self._queues.values(), key=lambda queue: _first(queue).number)
        shares = {_first(queue).owner: len(queue) for queue in queues}

        def displaced_first(owner: Owner) -> tuple[bool, int, int]:
            return owner[0] == ANONYMOUS, -owner[1], shares[owner]

        largest = max(shares, key=displaced_first, default=None)
        if largest is None or largest == newcomer.owner or newcomer.principal == ANONYMOUS:
            raise QueueFull(self.waiting, retry_after_s)
        is_named, is_equal = largest[0] != ANONYMOUS, largest[1] == newcomer.level
        is_fair = is_equal and shares[largest] <= shares.get(newcomer.owner, 0) + 1
        if is_named and (is_fair or largest[1] > newcomer.level):
            raise QueueFull(self.waiting, retry_after_s)
        displaced = next(reversed(self._queues[largest]))
        self._leave_queue(displaced)
        displaced.reject(retry_after_s)


def _first(queue: Iterable[QueuedRequest]) -> QueuedRequest:
    return next(iter(queue))


def _number(queued: QueuedRequest) -> int:
    return queued.number
