import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.neuron.node.admission import Admission, QueuedRequest, QueueFull


class Callers:
    """Tickets, and what became of them."""

    def __init__(self, slots, max_queue):
        self.admission = Admission(slots, max_queue)
        self.has_slot, self.refused = [], []

    def enter(self, principal, now_s=0.0):
        queued = QueuedRequest(principal, lambda: self.has_slot.append(queued), lambda _: self.refused.append(queued))
        self.admission.enter(queued, now_s)
        return queued

    def finish(self, queued, now_s=0.0):
        self.admission.release(queued, now_s, finished=True)


def test_seats_first_then_the_queue_then_a_refusal():
    callers = Callers(slots=2, max_queue=1)
    tickets = [callers.enter("a") for _ in range(3)]
    assert callers.has_slot == tickets[:2]
    with pytest.raises(QueueFull) as full:
        callers.enter("a")
    assert full.value.waiting == 1
    callers.finish(tickets[0])
    assert callers.has_slot == tickets


def test_a_free_seat_goes_to_who_holds_the_fewest():
    callers = Callers(slots=2, max_queue=10)
    first = callers.enter("batch")
    callers.enter("batch")
    callers.enter("batch")
    other = callers.enter("other")
    callers.finish(first)
    assert callers.has_slot[-1] is other


def test_anonymous_callers_take_what_is_left():
    callers = Callers(slots=4, max_queue=10)
    named = callers.enter("somebody")
    callers.finish(named)
    anonymous = [callers.enter("") for _ in range(4)]
    assert [queued.has_slot for queued in anonymous] == [True, True, True, False]
    newcomer = callers.enter("somebody")
    assert newcomer.has_slot


def test_where_nobody_has_a_name_anonymous_callers_take_everything():
    callers = Callers(slots=4, max_queue=10)
    assert all(callers.enter("").has_slot for _ in range(4))


def test_one_seat_is_enough_for_anybody():
    callers = Callers(slots=1, max_queue=10)
    callers.finish(callers.enter("somebody"))
    assert callers.enter("").has_slot


def test_a_full_queue_makes_room_at_the_expense_of_the_largest_share():
    callers = Callers(slots=1, max_queue=3)
    callers.enter("batch")
    waiting = [callers.enter("batch") for _ in range(3)]
    newcomer = callers.enter("other")
    assert callers.refused == [waiting[-1]]
    assert callers.admission.waiting == 3
    assert not newcomer.has_slot
    with pytest.raises(QueueFull):
        callers.enter("batch")
    with pytest.raises(QueueFull):
        callers.enter("")


def test_retry_after_follows_the_measured_rate():
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


def test_retry_after_knows_long_answers_from_no_answers():
    callers = Callers(slots=1, max_queue=10)
    assert callers.admission.retry_after_s(0.0) == 5.0
    for end_s in (40.0, 80.0, 120.0):
        callers.finish(callers.enter("a", end_s - 40), end_s)
    callers.enter("a", 150.0)
    assert callers.admission.retry_after_s(155.0) == pytest.approx(27.0, rel=0.1)


actions = st.lists(
    st.tuples(
        st.sampled_from(["enter", "finish", "leave", "clear"]), st.sampled_from(["", "a", "b"]), st.integers(0, 9)
    ),
    max_size=80,
)


@settings(max_examples=300)
@given(st.integers(1, 5), st.integers(0, 4), actions)
def test_counters_roll_back_on_every_way_out(slots, max_queue, history):
    callers = Callers(slots, max_queue)
    live = []
    for now_s, (action, principal, pick) in enumerate(history):
        if action == "enter":
            try:
                live.append(callers.enter(principal, float(now_s)))
            except QueueFull:
                assert callers.admission.waiting >= max_queue
        elif action == "clear":
            cleared = list(callers.admission.clear())
            live = [queued for queued in live if queued not in cleared]
        elif live:
            queued = live.pop(pick % len(live))
            callers.admission.release(queued, float(now_s), finished=action == "finish")
        live = [queued for queued in live if queued not in callers.refused]
        assert callers.admission.running == sum(queued.has_slot for queued in live) <= slots
        assert callers.admission.waiting == sum(not queued.has_slot for queued in live) <= max_queue
    for queued in live:
        callers.admission.release(queued, 1000.0, finished=False)
    assert (callers.admission.running, callers.admission.waiting) == (0, 0)
