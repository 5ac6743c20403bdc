import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.neuron.node.admission import Admission, QueueFull, Ticket


class Callers:
    """Tickets, and what became of them."""

    def __init__(self, seats, max_queue):
        self.admission = Admission(seats, max_queue)
        self.seated, self.refused = [], []

    def enter(self, principal, now_s=0.0):
        ticket = Ticket(principal, lambda: self.seated.append(ticket), lambda _: self.refused.append(ticket))
        self.admission.enter(ticket, now_s)
        return ticket

    def finish(self, ticket, now_s=0.0):
        self.admission.release(ticket, now_s, finished=True)


def test_seats_first_then_the_queue_then_a_refusal():
    callers = Callers(seats=2, max_queue=1)
    tickets = [callers.enter("a") for _ in range(3)]
    assert callers.seated == tickets[:2]
    with pytest.raises(QueueFull) as full:
        callers.enter("a")
    assert full.value.waiting == 1
    callers.finish(tickets[0])
    assert callers.seated == tickets


def test_a_free_seat_goes_to_who_holds_the_fewest():
    callers = Callers(seats=2, max_queue=10)
    first = callers.enter("batch")
    callers.enter("batch")
    callers.enter("batch")
    other = callers.enter("other")
    callers.finish(first)
    assert callers.seated[-1] is other


def test_anonymous_callers_take_what_is_left():
    callers = Callers(seats=4, max_queue=10)
    named = callers.enter("somebody")
    callers.finish(named)
    anonymous = [callers.enter("") for _ in range(4)]
    assert [ticket.seated for ticket in anonymous] == [True, True, True, False]
    newcomer = callers.enter("somebody")
    assert newcomer.seated


def test_where_nobody_has_a_name_anonymous_callers_take_everything():
    callers = Callers(seats=4, max_queue=10)
    assert all(callers.enter("").seated for _ in range(4))


def test_one_seat_is_enough_for_anybody():
    callers = Callers(seats=1, max_queue=10)
    callers.finish(callers.enter("somebody"))
    assert callers.enter("").seated


def test_a_full_queue_makes_room_at_the_expense_of_the_largest_share():
    callers = Callers(seats=1, max_queue=3)
    callers.enter("batch")
    waiting = [callers.enter("batch") for _ in range(3)]
    newcomer = callers.enter("other")
    assert callers.refused == [waiting[-1]]
    assert callers.admission.waiting == 3
    assert not newcomer.seated
    with pytest.raises(QueueFull):
        callers.enter("batch")
    with pytest.raises(QueueFull):
        callers.enter("")


def test_retry_after_follows_the_measured_rate():
    callers = Callers(seats=1, max_queue=10)
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
    callers = Callers(seats=1, max_queue=10)
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
def test_counters_roll_back_on_every_way_out(seats, max_queue, history):
    callers = Callers(seats, max_queue)
    live = []
    for now_s, (action, principal, pick) in enumerate(history):
        if action == "enter":
            try:
                live.append(callers.enter(principal, float(now_s)))
            except QueueFull:
                assert callers.admission.waiting >= max_queue
        elif action == "clear":
            cleared = list(callers.admission.clear())
            live = [ticket for ticket in live if ticket not in cleared]
        elif live:
            ticket = live.pop(pick % len(live))
            callers.admission.release(ticket, float(now_s), finished=action == "finish")
        live = [ticket for ticket in live if ticket not in callers.refused]
        assert callers.admission.running == sum(ticket.seated for ticket in live) <= seats
        assert callers.admission.waiting == sum(not ticket.seated for ticket in live) <= max_queue
    for ticket in live:
        callers.admission.release(ticket, 1000.0, finished=False)
    assert (callers.admission.running, callers.admission.waiting) == (0, 0)
