"""What the scheduler plans in important situations. Random traces are in `test_traces.py`."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest

from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.scheduling.step_plan import DRAW_ONE, LATEST_TOKEN, NO_OUTPUT, RowInputs, RowOutputs, RowPlan
from cortex.neuron.pictures.picture import Picture, PictureGrid, PictureRules

from .planned_steps import PAGE, collect, other, planned, read, request, run_to_the_end, scheduler_of, spans


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", ()), "empty"),
        (request("r", 3, max_tokens=0), "max_tokens is 0"),
        (request("r", 30, max_tokens=3), "30 tokens and asks for 3 more, but the context of this model holds 32"),
    ],
)
def test_rejects_a_request_that_can_never_run_without_a_trace(bad: EngineRequest, message: str) -> None:
    scheduler = scheduler_of(pages=8)
    with pytest.raises(RequestError, match=message):
        scheduler.add(bad)
    assert len(scheduler.waiting) == 0
    assert scheduler.plan() is None


def test_longest_possible_request_runs_to_its_end() -> None:
    scheduler = scheduler_of(pages=8)
    scheduler.add(request("r", 20, max_tokens=12))
    plans = run_to_the_end(scheduler)
    assert len(plans) == 12
    assert scheduler.preemptions == 0
    assert scheduler.pages.num_held == 0


def test_no_work_gives_no_plan() -> None:
    assert scheduler_of().plan() is None


def test_prompt_longer_than_the_budget_is_prefilled_in_chunks_and_draws_once() -> None:
    scheduler = scheduler_of(step_tokens=10)
    scheduler.add(request("r", 25, max_tokens=1))
    plans = run_to_the_end(scheduler)
    assert [spans(plan) for plan in plans] == [[(0, 10)], [(10, 10)], [(20, 5)]]
    assert [plan.rows[0].outputs for plan in plans] == [NO_OUTPUT, NO_OUTPUT, DRAW_ONE]
    assert plans[1].rows[0].inputs.tokens == tuple(range(10, 20))


def test_decode_rows_come_first_and_prefill_beside_them_is_capped() -> None:
    scheduler = scheduler_of(mixed=7)
    scheduler.add(request("old", 4))
    collect(scheduler, planned(scheduler))
    scheduler.add(other("new", 20, 100))
    plan = planned(scheduler)
    assert plan.rows[0] == RowPlan(0, 4, LATEST_TOKEN, DRAW_ONE, decodes=True)
    assert spans(plan) == [(4, 1), (0, 6)]
    assert plan.num_singles == 1
    assert plan.num_tokens == 7


def test_single_prefill_tokens_are_ordered_with_the_decodes() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("long", 6))
    scheduler.add(request("short", (50,)))
    plan = planned(scheduler)
    assert spans(plan) == [(0, 1), (0, 6)]
    assert plan.num_singles == 1


def test_step_is_planned_before_the_last_one_is_read() -> None:
    scheduler = scheduler_of()
    sequence = scheduler.add(request("r", 4, max_tokens=3))
    planned(scheduler)
    assert spans(planned(scheduler)) == [(4, 1)]
    assert spans(planned(scheduler)) == [(5, 1)]
    assert scheduler.plan() is None, "three draws are on their way: it wants no more"
    assert (sequence.in_flight, sequence.planned, sequence.computed) == (3, 6, 0)


def test_positions_count_as_computed_once_their_step_is_read() -> None:
    scheduler = scheduler_of(step_tokens=10)
    sequence = scheduler.add(request("r", 12))
    first, second = planned(scheduler), planned(scheduler)
    assert (sequence.computed, sequence.scheduled) == (0, 12)
    collect(scheduler, first)
    assert (sequence.computed, sequence.scheduled) == (10, 12)
    collect(scheduler, second)
    assert (sequence.computed, sequence.scheduled) == (12, 12)


@pytest.mark.parametrize(("accepted", "computed"), [((7,), 5), ((7, 8), 6), ((7, 8, 9, 5), 8)])
def test_row_that_draws_after_guesses_advances_by_its_accepted_tokens(accepted: tuple[int, ...], computed: int) -> None:
    """As a step of several tokens does: the KV of wrong guesses lies after `computed` and is overwritten."""
    scheduler = scheduler_of()
    sequence = scheduler.add(request("r", 4, max_tokens=20))
    collect(scheduler, planned(scheduler))
    row = RowPlan(sequence.row, 4, RowInputs(4, (7, 7, 8, 9)), RowOutputs(draws=4))
    scheduler.pages.extend(sequence.pages, 8)
    sequence.planned, sequence.in_flight = row.count, row.outputs.draws
    read(scheduler, sequence, row, accepted)
    scheduler.check_integrity()
    assert (sequence.computed, sequence.planned, sequence.in_flight) == (computed, 0, 0)
    assert sequence.tokens == [0, 1, 2, 3, 7, *accepted]
    assert spans(planned(scheduler)) == [(computed, 1)]


def test_preempted_chunk_is_not_computed_again_before_its_step_is_read() -> None:
    scheduler = scheduler_of(step_tokens=4)
    sequence = scheduler.add(request("r", 12, max_tokens=1))
    first = planned(scheduler)
    scheduler.retract(planned(scheduler))
    assert scheduler.plan() is None
    scheduler.row_read(sequence, first.rows[0], 0)
    assert (sequence.computed, sequence.planned) == (0, 0)
    run_to_the_end(scheduler)
    assert len(sequence.tokens) == 13


def test_requests_with_the_same_prompt_compute_it_once() -> None:
    scheduler = scheduler_of()
    for name in "abc":
        scheduler.add(request(name, 10, principal=name))
    first = planned(scheduler)
    assert spans(first) == [(0, 10)], "rows of one step do not rely on each other's writes"
    collect(scheduler, first)
    assert spans(planned(scheduler)) == [(10, 1), (9, 1), (9, 1)]
    assert [sequence.cached for sequence in scheduler.running] == [0, 9, 9]


def test_fully_cached_prompt_computes_one_token_and_writes_nothing() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("first", 2 * PAGE, max_tokens=1))
    run_to_the_end(scheduler)
    sequences = [scheduler.add(request(name, 2 * PAGE, max_tokens=1)) for name in ("second", "third")]
    plan = planned(scheduler)
    last = RowInputs(1, (2 * PAGE - 1,))
    assert [*plan.rows] == [RowPlan(row, 2 * PAGE - 1, last, DRAW_ONE, writes=False) for row in (0, 1)]
    assert [sequence.cached for sequence in sequences] == [2 * PAGE - 1] * 2
    assert scheduler.pages.num_held == 2, "both hold the same pages"


def test_drawn_tokens_are_a_cached_prefix_for_the_next_turn() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("turn", 6, max_tokens=3))
    run_to_the_end(scheduler)
    following = scheduler.add(request("next", (*range(6), 7, 7, 7, 50)))
    planned(scheduler)
    assert following.cached == 2 * PAGE


def test_prompts_with_different_first_tokens_share_no_page() -> None:
    scheduler = scheduler_of()
    scheduler.add(request("first", 12, max_tokens=1))
    run_to_the_end(scheduler)
    sequence = scheduler.add(request("second", (99, *range(1, 12))))
    planned(scheduler)
    assert sequence.cached == 0


def test_admits_in_order_of_arrival_whoever_sent_them() -> None:
    scheduler = scheduler_of(rows=3)
    for number, principal in enumerate(["", "ada", "ada", "bob"]):
        scheduler.add(other(str(number), 2, 100 * number, principal=principal))
    planned(scheduler)
    assert [sequence.request.id for sequence in scheduler.running] == ["0", "1", "2"]


def test_long_prompt_delays_a_short_one_of_another_principal_by_a_chunk() -> None:
    scheduler = scheduler_of(pages=1024, step_tokens=256)
    scheduler.add(other("long", 2000, 0, principal="ada"))
    planned(scheduler)
    scheduler.add(other("same", 100, 5000, principal="ada"))
    scheduler.add(other("short", 100, 3000, principal="bob"))
    plan = planned(scheduler)
    assert [sequence.request.id for sequence in scheduler.running] == ["long", "short"]
    assert [row.count for row in plan.rows] == [156, 100]


def test_short_prompt_waits_for_a_chunk_of_a_long_one_of_the_same_principal() -> None:
    scheduler = scheduler_of(pages=2048, step_tokens=256, mixed=64)
    scheduler.add(other("long", 6000, 0))
    collect(scheduler, planned(scheduler))
    scheduler.add(other("hi", 5, 7000))
    plan = planned(scheduler)
    assert [row.count for row in plan.rows] == [5, 59]
    assert [sequence.drew_in_row for sequence in scheduler.running] == [False, True]


def test_cached_conversation_is_as_short_as_what_is_new_of_it() -> None:
    scheduler = scheduler_of(pages=2048, step_tokens=256, mixed=64)
    scheduler.add(request("turn", 800, max_tokens=1))
    run_to_the_end(scheduler)
    scheduler.add(other("long", 6000, 10_000))
    collect(scheduler, planned(scheduler))
    scheduler.add(request("next turn", (*range(800), 5, 6, 7)))
    assert sorted(row.count for row in planned(scheduler).rows) == [3, 61]


def test_none_overtakes_a_prompt_that_lacks_pages() -> None:
    scheduler = scheduler_of(pages=100, step_tokens=64, mixed=32, rows=8, reserved=60)
    scheduler.add(request("stream", 4, max_tokens=60))
    collect(scheduler, planned(scheduler))
    scheduler.add(other("large", 380, 1000, max_tokens=1))
    collect(scheduler, planned(scheduler))
    for number in range(3):
        scheduler.add(other(f"small {number}", 2, 5000 + 10 * number, max_tokens=9))
        collect(scheduler, planned(scheduler))
    assert [sequence.request.id for sequence in scheduler.running] == ["stream"]
    run_to_the_end(scheduler)


def test_prompt_that_lacks_pages_takes_no_share_of_the_one_that_has_them() -> None:
    scheduler = scheduler_of(pages=100, step_tokens=128)
    scheduler.add(other("long", 380, 0, principal="ada"))
    planned(scheduler)
    scheduler.add(other("short", 100, 3000, principal="bob"))
    planned(scheduler)
    assert [row.count for row in planned(scheduler).rows] == [128]
    run_to_the_end(scheduler)


@pytest.mark.parametrize("is_decoding", [False, True])
def test_whole_pictures_of_several_principals_stay_within_a_step(is_decoding: bool) -> None:
    """Each exceeds the share of its principal."""
    scheduler = scheduler_of(step_tokens=20, mixed=16, pictures=PictureRules(is_whole=True))
    if is_decoding:
        scheduler.add(request("old", 4, max_tokens=30))
        collect(scheduler, planned(scheduler))
    for number, principal in enumerate(("a", "b", "c")):
        picture = Picture(1, PictureGrid(3, 4, 12, 0, 0), bytes([number]), b"")
        seen = other(principal, 14, 100 * (number + 1), max_tokens=1, principal=principal)
        scheduler.add(replace(seen, pictures=(picture,)))
    pending = {sequence.request.id for sequence in scheduler.waiting}
    for _ in range(20):
        plan = planned(scheduler)
        assert plan.num_tokens <= 20
        collect(scheduler, plan)
        if not pending & {each.request.id for each in (*scheduler.waiting, *scheduler.running)}:
            return
    pytest.fail("a picture was never computed")


def test_picture_larger_than_a_step_is_computed_alone() -> None:
    scheduler = scheduler_of(step_tokens=8, pictures=PictureRules(is_whole=True))
    picture = Picture(0, PictureGrid(3, 4, 12, 0, 0), b"0", b"")
    for number, principal in enumerate("ab"):
        seen = other(principal, 12, 100 * (number + 1), max_tokens=1, principal=principal)
        scheduler.add(replace(seen, pictures=(picture,)))
    assert [plan.num_tokens for plan in run_to_the_end(scheduler)] == [12, 12]


def calls_of_a_decode_step(num_rows: int) -> int:
    """The Python calls that planning a step of so many decode rows takes."""
    scheduler = scheduler_of(num_rows, rows=num_rows, step_tokens=2 * num_rows, mixed=2 * num_rows)
    for number in range(num_rows):
        scheduler.add(other(str(number), 1, number))
    collect(scheduler, planned(scheduler))
    counts: Counter[str] = Counter()
    sys.setprofile(lambda _frame, event, _argument: counts.update((event,)))
    try:
        plan = scheduler.plan()
    finally:
        sys.setprofile(None)
    assert plan is not None
    assert len(plan.rows) == plan.num_tokens == num_rows
    return counts["call"]


def test_the_work_of_planning_grows_with_the_rows_and_no_faster() -> None:
    assert calls_of_a_decode_step(80) < 4.5 * calls_of_a_decode_step(20)
