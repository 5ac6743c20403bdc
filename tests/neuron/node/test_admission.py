import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.node.admission import Admission, QueuedRequest, QueueFull
from cortex.system.fair_turns import DEFAULT, FLEX, IDLE, PRIORITY

from ...examples import MANY


class Callers:
    """Sends requests through an admission and records which were started and which were displaced."""

    def __init__(self, slots: int, max_queue: int, preempted_slots: int = 0) -> None:
        self.admission = Admission(slots, max_queue, preempted_slots=preempted_slots)
        self.started: list[QueuedRequest] = []
        self.displaced: list[QueuedRequest] = []

    def enter(
        self,
        principal: str,
        now_s: float = 0.0,
        cache_tokens: int = 10,
        level: int = DEFAULT,
        prompt_tokens: int = 0,
    ) -> QueuedRequest:
        queued = QueuedRequest(
            principal,
            cache_tokens,
            start=lambda: self.started.append(queued),
            reject=lambda _: self.displaced.append(queued),
            level=level,
            prompt_tokens=prompt_tokens,
        )
        self.admission.enter(queued, now_s)
        return queued

    def finish(self, queued: QueuedRequest, now_s: float = 0.0) -> None:
        self.admission.release(queued, now_s, finished=True)


def test_fills_the_slots_then_the_queue_then_rejects() -> None:
    callers = Callers(slots=2, max_queue=1)
    requests = [callers.enter("a") for _ in range(3)]
    assert callers.started == requests[:2]
    with pytest.raises(QueueFull) as full:
        callers.enter("a")
    assert full.value.waiting == 1
    callers.finish(requests[0])
    assert callers.started == requests


def test_gives_a_free_slot_to_the_principal_with_the_fewest() -> None:
    callers = Callers(slots=2, max_queue=10)
    first = callers.enter("batch")
    callers.enter("batch")
    callers.enter("batch")
    other = callers.enter("other")
    callers.finish(first)
    assert callers.started[-1] is other


def test_reserves_a_quarter_of_the_slots_for_named_principals_once_one_was_seen() -> None:
    callers = Callers(slots=4, max_queue=10)
    named = callers.enter("somebody")
    callers.finish(named)
    anonymous = [callers.enter("") for _ in range(4)]
    assert [queued.has_slot for queued in anonymous] == [True, True, True, False]
    newcomer = callers.enter("somebody")
    assert newcomer.has_slot


def test_gives_every_slot_to_anonymous_requests_where_no_named_one_was_seen() -> None:
    callers = Callers(slots=4, max_queue=10)
    assert all(callers.enter("").has_slot for _ in range(4))


def test_does_not_reserve_an_only_slot() -> None:
    callers = Callers(slots=1, max_queue=10)
    callers.finish(callers.enter("somebody"))
    assert callers.enter("").has_slot


def test_holds_requests_back_until_the_cache_has_room_for_them() -> None:
    callers = Callers(slots=8, max_queue=10)
    callers.admission.cache_reported(100, 0.0)
    first = callers.enter("a", cache_tokens=60)
    second = callers.enter("a", cache_tokens=60)
    assert (first.has_slot, second.has_slot) == (True, False)
    callers.admission.produced(first, 0.0)
    assert second.has_slot, "the reports include the first request from now on"
    callers.admission.cache_reported(40, 0.0)
    third = callers.enter("a", cache_tokens=60)
    callers.admission.produced(second, 0.0)
    assert not third.has_slot
    callers.finish(first)
    assert third.has_slot, "cache that a request gave back is used without waiting for the next report"


def test_starts_a_newcomer_before_the_rest_of_a_batch_when_cache_becomes_free() -> None:
    callers = Callers(slots=8, max_queue=10)
    callers.admission.cache_reported(100, 0.0)
    batch = [callers.enter("batch", cache_tokens=50) for _ in range(4)]
    newcomer = callers.enter("other", cache_tokens=50)
    assert callers.started == batch[:2]
    callers.finish(batch[0])
    assert callers.started == [*batch[:2], newcomer]


def test_small_requests_do_not_overtake_a_large_one_that_waits_for_cache() -> None:
    callers = Callers(slots=8, max_queue=10)
    callers.admission.cache_reported(100, 0.0)
    running = callers.enter("a", cache_tokens=80)
    large = callers.enter("a", cache_tokens=90)
    small = callers.enter("a", cache_tokens=5)
    assert callers.started == [running]
    callers.finish(running)
    assert callers.started == [running, large, small]


def test_starts_a_request_alone_however_large() -> None:
    callers = Callers(slots=8, max_queue=10)
    callers.admission.cache_reported(0, 0.0)
    assert callers.enter("a", cache_tokens=1000).has_slot


def test_displaces_a_request_of_the_largest_share_when_the_queue_is_full() -> None:
    callers = Callers(slots=1, max_queue=3)
    callers.enter("batch")
    waiting = [callers.enter("batch") for _ in range(3)]
    newcomer = callers.enter("other")
    assert callers.displaced == [waiting[-1]]
    assert callers.admission.waiting == 3
    assert not newcomer.has_slot
    with pytest.raises(QueueFull):
        callers.enter("batch")
    with pytest.raises(QueueFull):
        callers.enter("")


def test_retry_after_follows_the_measured_rate() -> None:
    callers = Callers(slots=1, max_queue=10)
    for second in range(10):
        callers.finish(callers.enter("a", float(second)), float(second))
    callers.enter("a", 10.0)
    for _ in range(4):
        callers.enter("a", 10.0)
    # Ten in ten seconds, four ahead of the newcomer.
    assert callers.admission.retry_after_s(10.0) == pytest.approx(5.0)
    # After a long pause: as before it.
    assert callers.admission.retry_after_s(1000.0) == pytest.approx(5.0, rel=0.2)


def test_retry_after_uses_the_latest_requests_when_responses_are_long() -> None:
    callers = Callers(slots=1, max_queue=10)
    assert callers.admission.retry_after_s(0.0) == 5.0
    for end_s in (40.0, 80.0, 120.0):
        callers.finish(callers.enter("a", end_s - 40), end_s)
    callers.enter("a", 150.0)
    assert callers.admission.retry_after_s(155.0) == pytest.approx(27.0, rel=0.1)


def test_cost_of_a_request_does_not_grow_with_the_requests_that_wait() -> None:
    def num_calls(waiting: int) -> int:
        callers = Callers(slots=1, max_queue=1000)
        callers.enter("a")
        for _ in range(waiting):
            callers.enter("a")
        calls: list[object] = []
        sys.setprofile(lambda frame, *_: calls.append(frame.f_code))
        try:
            callers.finish(callers.started[-1])
            callers.enter("b")
        finally:
            sys.setprofile(None)
        return len(calls)

    assert num_calls(500) == num_calls(5)


def test_what_waits_longest_is_first_among_equals() -> None:
    callers = Callers(slots=1, max_queue=10)
    running = callers.enter("a", 1.0)
    waiting = [callers.enter(principal, 2.0 + place) for place, principal in enumerate("cbcb")]
    assert callers.admission.waited_s(10.0) == 8.0
    callers.finish(running)
    assert callers.started[-1] is waiting[0]
    assert callers.admission.waited_s(10.0) == 7.0
    assert callers.admission.clear() == waiting[1:]
    assert callers.admission.waited_s(10.0) == 0.0


def test_higher_class_gets_the_free_slot_and_a_long_wait_raises_a_lower_one() -> None:
    callers = Callers(slots=1, max_queue=10)
    running = callers.enter("a")
    old = callers.enter("a", 1.0, level=FLEX)
    young = callers.enter("b", 2.0, level=FLEX)
    default = callers.enter("b", 3.0)
    assert callers.admission.waiting_at == [0, 2, 1, 0]
    callers.finish(running, 4.0)
    assert callers.started[-1] is default
    another = callers.enter("b", 60.0)
    callers.finish(default, 61.5)
    assert callers.started[-1] is old, "it has waited for a minute: equal, and of the principal that used less"
    callers.finish(old, 61.5)
    assert callers.started[-1] is another
    callers.finish(another, 62.5)
    assert callers.started[-1] is young


@given(st.integers(IDLE, PRIORITY), st.lists(st.sampled_from([FLEX, DEFAULT, PRIORITY]), min_size=1, max_size=4))
def test_no_class_starves_however_many_requests_of_others_come(level: int, others: list[int]) -> None:
    callers = Callers(slots=1, max_queue=10_000)
    running = callers.enter("other", level=PRIORITY, prompt_tokens=1)
    low = callers.enter("low", level=level, prompt_tokens=1)
    for second in range(1, 900):
        callers.enter("other", second, level=others[second % len(others)], prompt_tokens=1)
        callers.enter("third", second, level=others[second % len(others)], prompt_tokens=1)
        callers.finish(running, second)
        running = callers.started[-1]
        if running is low:
            return
    pytest.fail("it waits for ever")


def test_principals_share_tokens_and_not_slots() -> None:
    callers = Callers(slots=1, max_queue=100)
    running = callers.enter("short", prompt_tokens=100)
    for _ in range(20):
        callers.enter("long", prompt_tokens=400)
        callers.enter("short", prompt_tokens=100)
    for _ in range(20):
        callers.admission.spent(running, 10)
        callers.finish(running)
        running = callers.started[-1]
    used = {"short": 110, "long": 410}
    tokens = {name: each * sum(q.principal == name for q in callers.started) for name, each in used.items()}
    assert abs(tokens["short"] - tokens["long"]) <= 410


def test_returning_principal_gets_no_more_than_its_share() -> None:
    callers = Callers(slots=1, max_queue=100)
    running = callers.enter("busy", prompt_tokens=100)
    for _ in range(40):
        callers.enter("busy", prompt_tokens=100)
    for _ in range(10):
        callers.finish(running)
        running = callers.started[-1]
    for _ in range(20):
        callers.enter("back", prompt_tokens=100)
    num_before = len(callers.started)
    for _ in range(10):
        callers.finish(running)
        running = callers.started[-1]
    assert sum(queued.principal == "back" for queued in callers.started[num_before:]) == 5


def test_higher_class_starts_beyond_the_slots_as_far_as_a_lower_one_can_be_preempted() -> None:
    callers = Callers(slots=2, max_queue=10, preempted_slots=2)
    callers.admission.cache_reported(15, 0.0)
    low = [callers.enter("a", level=IDLE), callers.enter("a", cache_tokens=5, level=FLEX)]
    for queued in low:
        callers.admission.produced(queued, 0.0)
    callers.admission.cache_reported(0, 0.0)
    assert [callers.enter("b", level=PRIORITY).has_slot, callers.enter("b", cache_tokens=5).has_slot] == [True, True]
    assert not callers.enter("b", cache_tokens=1).has_slot, "only those of its own class and above run now"
    assert not callers.enter("b", cache_tokens=1, level=PRIORITY).has_slot, "no more than twice the slots"
    assert callers.admission.running == 4


def test_server_that_cannot_preempt_gets_no_more_than_its_slots() -> None:
    callers = Callers(slots=1, max_queue=10)
    callers.enter("a", level=IDLE)
    assert not callers.enter("b", level=PRIORITY).has_slot


def test_full_queue_displaces_a_lower_class_first() -> None:
    callers = Callers(slots=1, max_queue=2)
    callers.enter("a")
    idle = callers.enter("a", level=IDLE)
    callers.enter("a")
    callers.enter("a")
    assert callers.displaced == [idle]
    with pytest.raises(QueueFull):
        callers.enter("b", level=FLEX)


actions = st.lists(
    st.tuples(
        st.sampled_from(["enter", "produce", "report", "finish", "cancel", "clear"]),
        st.sampled_from(["", "a", "b"]),
        st.integers(0, 9),
    ),
    max_size=80,
)


@MANY
@given(st.integers(1, 5), st.integers(0, 4), actions)
def test_counters_match_the_live_requests_after_any_history(
    slots: int, max_queue: int, history: list[tuple[str, str, int]]
) -> None:
    callers = Callers(slots, max_queue)
    live: list[QueuedRequest] = []
    for now_s, (action, principal, pick) in enumerate(history):
        if action == "enter":
            try:
                live.append(callers.enter(principal, float(now_s), cache_tokens=1 + pick, level=pick % 4))
            except QueueFull:
                assert callers.admission.waiting >= max_queue
        elif action == "clear":
            cleared = callers.admission.clear()
            live = [queued for queued in live if queued not in cleared]
        elif action == "report":
            callers.admission.cache_reported(4 * pick, float(now_s))
        elif live and action == "produce":
            callers.admission.produced(live[pick % len(live)], float(now_s))
        elif live:
            queued = live.pop(pick % len(live))
            callers.admission.release(queued, float(now_s), finished=action == "finish")
        live = [queued for queued in live if queued not in callers.displaced]
        assert callers.admission.running == sum(queued.has_slot for queued in live) <= slots
        assert callers.admission.waiting == sum(not queued.has_slot for queued in live) <= max_queue
        assert callers.admission.running or not callers.admission.waiting, "requests wait for an idle engine"
    for queued in live:
        callers.admission.release(queued, 1000.0, finished=False)
    assert (callers.admission.running, callers.admission.waiting) == (0, 0)
    callers.admission.cache_reported(20, 1000.0)
    callers.enter("a", 1000.0, cache_tokens=19)
    if slots > 1:
        assert callers.enter("a", 1000.0, cache_tokens=1).has_slot, "cache of requests that ended is still counted"


def test_what_a_principal_used_while_nobody_waited_is_not_held_against_it() -> None:
    callers = Callers(slots=2, max_queue=10)
    for _ in range(3):
        alone = callers.enter("early", prompt_tokens=1000)
        callers.admission.spent(alone, 1_000_000)
        callers.finish(alone)
    running = [callers.enter("late", prompt_tokens=100) for _ in range(2)]
    waiting = [callers.enter(principal, prompt_tokens=100) for principal in ("late", "late", "early")]
    for each in running:
        callers.finish(each)
    assert [each.has_slot for each in waiting] == [True, False, True]
