"""What the scheduler does when pages run out, and how sequences give theirs back: preempted, dropped, retracted."""

from __future__ import annotations

import pytest

from cortex.neuron.engine.scheduling.sequence import NO_ROW, PREEMPTIONS_PER_LEVEL
from cortex.system.fair_turns import DEFAULT, FLEX, IDLE

from .planned_steps import PAGE, collect, other, planned, request, run_to_the_end, scheduler_of, spans


def test_preempts_the_lowest_class_before_the_youngest_sequence() -> None:
    scheduler = scheduler_of(pages=5)
    low = scheduler.add(request("low", PAGE - 1, max_tokens=9, level=FLEX))
    first = planned(scheduler)
    high = scheduler.add(other("high", PAGE - 1, 100, max_tokens=13))
    collect(scheduler, first)
    run_to_the_end(scheduler)
    assert (low.preemptions, high.preemptions) != (0, 0)
    assert high.preemptions == 0
    assert (len(low.tokens), len(high.tokens)) == (PAGE - 1 + 9, PAGE - 1 + 13)


def test_waiting_sequence_of_a_higher_class_takes_the_row_of_a_lower_one_and_gives_it_back() -> None:
    scheduler = scheduler_of(rows=1)
    low = scheduler.add(request("low", PAGE, max_tokens=8, level=IDLE))
    collect(scheduler, planned(scheduler))
    high = scheduler.add(other("high", PAGE, 100, max_tokens=2))
    collect(scheduler, planned(scheduler))
    assert (low.row, high.row) == (NO_ROW, 0)
    run_to_the_end(scheduler)
    assert (len(low.tokens), len(high.tokens)) == (PAGE + 8, PAGE + 2)
    assert low.preemptions == 1


def test_sequence_is_not_preempted_for_one_of_its_own_class() -> None:
    scheduler = scheduler_of(rows=1)
    scheduler.add(request("one", PAGE, max_tokens=8))
    collect(scheduler, planned(scheduler))
    scheduler.add(other("two", PAGE, 100, max_tokens=2))
    run_to_the_end(scheduler)
    assert scheduler.preemptions == 0


def test_sequence_that_loses_its_row_again_and_again_rises_and_keeps_it() -> None:
    scheduler = scheduler_of(rows=1)
    low = scheduler.add(request("low", PAGE, max_tokens=40, level=FLEX))
    for number in range(3 * PREEMPTIONS_PER_LEVEL):
        collect(scheduler, planned(scheduler))
        scheduler.add(other(f"high{number}", PAGE, 100 * (number + 1), max_tokens=1))
        collect(scheduler, planned(scheduler))
    assert low.preemptions == PREEMPTIONS_PER_LEVEL
    assert low.level == DEFAULT


def test_preempts_the_youngest_sequence_when_pages_run_out() -> None:
    scheduler = scheduler_of(pages=5)
    old = scheduler.add(request("old", PAGE - 1, max_tokens=13))
    young = scheduler.add(other("young", PAGE - 1, 100, max_tokens=9))
    plans = run_to_the_end(scheduler)
    assert scheduler.preemptions >= 1
    assert len(old.tokens) == PAGE - 1 + 13
    assert len(young.tokens) == PAGE - 1 + 9
    rows_of_young = [new for plan in plans for new in plan.new_rows if new[1].id == "young"]
    assert [len(drawn) for _, _, drawn in rows_of_young] == sorted(len(drawn) for _, _, drawn in rows_of_young)
    assert len(rows_of_young[-1][2]) > 0, "its new row gets what it had drawn"
    assert scheduler.pages.num_held == 0


def test_oldest_prompt_takes_what_is_free_where_those_it_would_preempt_have_their_rows() -> None:
    """The response of the younger has grown past what was reserved for it."""
    scheduler = scheduler_of(pages=53, step_tokens=32, mixed=20)
    old = scheduler.add(request("old", 200, max_tokens=1, principal="old"))
    young = scheduler.add(other("young", PAGE, 1000, max_tokens=20, principal="young"))
    chunks = []
    while len(old.tokens) == 200:
        num_free = scheduler.pages.num_pages - scheduler.pages.num_held
        plan = planned(scheduler)
        chunks += [(row.start, row.count) for row in plan.rows if row.row == old.row]
        assert num_free == 0 or old.row in [row.row for row in plan.rows]
        collect(scheduler, plan)
    assert (188, 2 * PAGE) in chunks, "three pages were lacking, and two were free"
    run_to_the_end(scheduler)
    assert len(young.tokens) == PAGE + 20


def test_preempted_sequence_reuses_its_own_pages() -> None:
    scheduler = scheduler_of(pages=6)
    scheduler.add(request("old", PAGE, max_tokens=9))
    young = scheduler.add(other("young", 2 * PAGE, 100, max_tokens=8))
    computed = 0
    while (plan := scheduler.plan()) is not None:
        computed += sum(row.count for row in plan.rows if young.row == row.row and row.inputs.tokens is not None)
        collect(scheduler, plan)
    assert scheduler.preemptions == 1
    assert computed < 2 * (2 * PAGE), "not everything was computed twice"


def test_preempted_sequence_waits_for_its_token_in_flight() -> None:
    scheduler = scheduler_of(pages=2)
    old = scheduler.add(request("old", PAGE - 1, max_tokens=2))
    young = scheduler.add(other("young", PAGE - 2, 100, max_tokens=2))
    first = planned(scheduler)
    assert len(first.rows) == 1, "a page is kept for the one that runs"
    collect(scheduler, first)
    second = planned(scheduler)
    assert [old.in_flight, young.in_flight] == [1, 0]
    collect(scheduler, second)
    run_to_the_end(scheduler)
    assert len(young.tokens) == PAGE


def test_small_requests_wait_behind_a_large_one_that_lacks_pages() -> None:
    scheduler = scheduler_of(pages=16)
    scheduler.add(other("holder", 20, 900, max_tokens=40))
    collect(scheduler, planned(scheduler))
    large = scheduler.add(request("large", 44, max_tokens=4))
    scheduler.add(other("small", 2, 1000, max_tokens=1))
    admitted = [new[1].id for plan in run_to_the_end(scheduler) for new in plan.new_rows]
    assert [name for name in dict.fromkeys(admitted) if name != "holder"] == ["large", "small"]
    assert len(large.tokens) == 44 + 4


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "in flight", "decoding"])
def test_drop_frees_everything_at_once_in_every_phase(phase: str) -> None:
    scheduler = scheduler_of(step_tokens=8, mixed=8)
    sequence = scheduler.add(request("r", 20))
    if phase != "waiting":
        collect(scheduler, planned(scheduler))
    if phase in ("in flight", "decoding"):
        collect(scheduler, planned(scheduler))
        last = planned(scheduler)
        if phase == "decoding":
            collect(scheduler, last)
    scheduler.drop(sequence)
    scheduler.check_integrity()
    assert scheduler.pages.num_held == 0
    assert scheduler.plan() is None


def test_retracted_step_is_computed_again_and_its_pages_are_not_shared() -> None:
    scheduler = scheduler_of()
    sequence = scheduler.add(request("r", 10, max_tokens=2))
    scheduler.retract(planned(scheduler))
    scheduler.check_integrity()
    assert scheduler.pages.num_held == scheduler.pages.num_idle == 0
    assert sequence.in_flight == 0
    plan = planned(scheduler)
    assert spans(plan) == [(0, 10)]
    collect(scheduler, plan)
    scheduler.retract(planned(scheduler))
    plan = planned(scheduler)
    assert spans(plan) == [(8, 3)], "what earlier steps wrote is used again"
    assert plan.new_rows[0][2] == (7,)
    collect(scheduler, plan)
    assert len(sequence.tokens) == 12


def test_retracted_sequences_keep_their_order() -> None:
    scheduler = scheduler_of()
    for number in range(3):
        scheduler.add(other(str(number), 3, 100 * number))
    scheduler.retract(planned(scheduler))
    planned(scheduler)
    assert [sequence.request.id for sequence in scheduler.running] == ["0", "1", "2"]


def test_pages_of_a_distrusted_sequence_are_not_reused() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("healthy", 8, max_tokens=1))
    run_to_the_end(scheduler)
    sick = scheduler.add(request("sick", 12))
    planned(scheduler)
    assert sick.cached == 8
    scheduler.distrust(sick)
    scheduler.drop(sick)
    scheduler.check_integrity()
    again = scheduler.add(request("again", 12))
    planned(scheduler)
    assert again.cached == 0


def test_responses_within_the_reservation_are_never_preempted() -> None:
    scheduler = scheduler_of(pages=8, reserved=16)
    for number in range(4):
        scheduler.add(other(f"{number}", 8, 100 * number, max_tokens=8))
    plan = planned(scheduler)
    assert len(plan.rows) == 2, "two of sixteen tokens are all that eight pages of four hold"
    collect(scheduler, plan)
    run_to_the_end(scheduler)
    assert scheduler.preemptions == 0


def test_without_a_reservation_the_youngest_is_preempted() -> None:
    scheduler = scheduler_of(pages=8)
    for number in range(4):
        scheduler.add(other(f"{number}", 8, 100 * number, max_tokens=12))
    plan = planned(scheduler)
    assert len(plan.rows) == 2
    collect(scheduler, plan)
    run_to_the_end(scheduler)
    assert scheduler.preemptions > 0


def test_reservation_is_limited_by_max_tokens() -> None:
    scheduler = scheduler_of(pages=8, reserved=1000)
    for number in range(4):
        scheduler.add(other(f"{number}", 6, 100 * number, max_tokens=2))
    assert len(planned(scheduler).rows) == 4


def test_pages_are_reserved_for_the_rest_of_a_chunked_prompt() -> None:
    scheduler = scheduler_of(pages=8, step_tokens=8)
    scheduler.add(other("long", 28, 100, max_tokens=1))
    scheduler.add(other("short", 4, 500, max_tokens=1))
    collect(scheduler, planned(scheduler))
    for _ in range(2):
        collect(scheduler, planned(scheduler))
        assert [sequence.request.id for sequence in scheduler.running] == ["long"]
    run_to_the_end(scheduler)
    assert scheduler.preemptions == 0


def test_single_request_is_admitted_whatever_its_max_tokens() -> None:
    scheduler = scheduler_of(pages=8, reserved=1000)
    scheduler.add(other("greedy", 4, 100, max_tokens=28))
    assert len(planned(scheduler).rows) == 1
