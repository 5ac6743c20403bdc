"""Where states are saved and which of them later prompts continue from, for requests that run one after another."""

from __future__ import annotations

import pytest
from tests.neuron.engine.scheduling.folding_device import VOCAB, FoldingDevice, next_token
from tests.neuron.engine.scheduling.planned_steps import read, token_costs

from cortex.neuron.engine.kv.page_groups import KVPages
from cortex.neuron.engine.kv.recurrent_checkpoints import RecurrentCheckpoints
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.scheduling.budget import SchedulerLimits
from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.scheduling.step_plan import StepPlan


def run(
    scheduler: Scheduler, device: FoldingDevice, request: EngineRequest, drafts_until: int = 0
) -> tuple[Sequence, list[StepPlan]]:
    """One request alone, to its end. Up to a length of `drafts_until` each row checks three draft tokens, all right."""
    sequence, plans = scheduler.add(request), []
    while len(sequence.tokens) < len(request.prompt) + request.max_tokens:
        past = tuple(sequence.tokens)
        for _ in range(3 if len(past) < drafts_until else 0):
            past = (*past, next_token(past))
        guesses = past[len(sequence.tokens) :]
        plan = scheduler.plan({request.id: guesses} if guesses else {})
        assert plan is not None
        plans.append(plan)
        for row, tokens in zip(plan.rows, device.launch(plan), strict=True):
            read(scheduler, sequence, row, tokens)
    scheduler.drop(sequence)
    scheduler.check_integrity()
    return sequence, plans


def conversation(
    num_slots: int = 8, *, spacing: int = 0, response_tokens: int = 1, cuts_rows: bool = True
) -> tuple[Scheduler, FoldingDevice]:
    limits = SchedulerLimits(max_rows=2, step_tokens=100, step_s=0.1, context_tokens=400)
    checkpoints = RecurrentCheckpoints(3, num_slots, spacing, response_tokens, cuts_rows=cuts_rows)
    return Scheduler(KVPages({None: 101}, 4), limits, token_costs(), checkpoints), FoldingDevice(4)


def prompt_rows(plans: list[StepPlan]) -> list[tuple[int, int]]:
    """The tokens of each row of a prompt, and those before its cut."""
    rows = (row for plan in plans for row in plan.rows if row.inputs.tokens is not None)
    return [(row.count, 0 if row.cut is None else row.cut.num_tokens) for row in rows]


@pytest.mark.parametrize(
    ("length", "turn_ends", "cuts_rows", "expected"),
    [
        (41, (), True, [(41, 40)]),
        (41, (9,), True, [(8, 0), (33, 32)]),
        (41, (9, 30), True, [(28, 8), (13, 12)]),
        (61, (9, 30, 50), True, [(8, 0), (40, 20), (13, 12)]),
        (4, (), True, [(4, 0)]),
        (150, (), True, [(100, 0), (50, 48)]),
        (101, (), True, [(100, 0), (1, 0)]),
        (130, (101,), True, [(100, 0), (30, 28)]),
        (41, (9, 30), False, [(8, 0), (20, 0), (12, 0), (1, 0)]),
    ],
)
def test_step_saves_one_state_inside_a_row_and_one_at_its_end(
    length: int, turn_ends: tuple[int, ...], cuts_rows: bool, expected: list[tuple[int, int]]
) -> None:
    scheduler, device = conversation(cuts_rows=cuts_rows)
    request = EngineRequest("1", (1,) * length, max_tokens=1, checkpoint_at=turn_ends)
    _, plans = run(scheduler, device, request)
    assert prompt_rows(plans) == expected
    ends = sorted({end // 4 * 4 for end in (*turn_ends, length - 1)} - {0})
    assert sorted(len(tokens) for slot, tokens in device.slots.items() if slot >= 3) == ends


def test_rows_of_one_step_do_not_share_a_slot() -> None:
    scheduler, device = conversation(num_slots=1)
    for number in range(2):
        scheduler.add(EngineRequest(str(number), (number,) * 21, max_tokens=1))
    plan = scheduler.plan()
    assert plan is not None
    assert [row.count for row in plan.rows] == [21, 21]
    assert list(plan.written_slots) == [3]
    device.launch(plan)
    assert device.slots[3] == (0,) * 20


def test_next_turn_continues_from_the_end_of_the_last_response() -> None:
    scheduler, device = conversation()
    first, plans = run(scheduler, device, EngineRequest("1", (1,) * 21, max_tokens=12))
    assert first.cached == 0
    assert prompt_rows(plans) == [(21, 20)]
    second, _ = run(scheduler, device, EngineRequest("2", (*first.tokens, 2, 2), max_tokens=3))
    assert second.cached == 32  # the last token drawn is not computed: 21 + 12 − 1 positions, whole pages


@pytest.mark.parametrize(
    ("response_tokens", "saves"), [(1, [24, 28, 32, 36]), (8, [24, 32]), (6, [24, 32]), (11, [24, 36])]
)
def test_states_of_a_response_are_as_far_apart_as_is_asked_for(response_tokens: int, saves: list[int]) -> None:
    scheduler, device = conversation(response_tokens=response_tokens)
    first, plans = run(scheduler, device, EngineRequest("1", (1,) * 21, max_tokens=17))
    decoded = [plan for plan in plans if plan.only_decodes]
    assert [plan.rows[0].start + 1 for plan in decoded if plan.saves] == saves
    second, _ = run(scheduler, device, EngineRequest("2", (*first.tokens, 2, 2), max_tokens=3))
    assert second.cached == saves[-1]


@pytest.mark.parametrize("drafts_until", range(21, 39))
def test_drafts_do_not_keep_a_state_from_being_saved(drafts_until: int) -> None:
    """Also where the last row that checks some ends where a state is to be saved."""
    scheduler, device = conversation(response_tokens=8)
    first, _ = run(scheduler, device, EngineRequest("1", (1,) * 21, max_tokens=17), drafts_until)
    second, _ = run(scheduler, device, EngineRequest("2", (*first.tokens, 2, 2), max_tokens=3))
    assert second.cached == 32


def test_state_of_a_row_is_not_saved_as_that_of_an_earlier_position() -> None:
    """The prompt is still in flight when its first decode row is planned."""
    scheduler, _ = conversation()
    scheduler.add(EngineRequest("1", (1,) * 21, max_tokens=4))
    prompt, decoding = scheduler.plan(), scheduler.plan()
    assert prompt is not None
    assert decoding is not None
    assert decoding.only_decodes
    assert not decoding.restores


def test_response_that_is_not_kept_saves_no_state() -> None:
    scheduler, device = conversation()
    _, plans = run(scheduler, device, EngineRequest("1", (1,) * 21, max_tokens=12, uses_prefix_cache=False))
    assert not any(plan.saves or plan.restores for plan in plans)


def test_short_responses_are_not_computed_again() -> None:
    """Prompts save no state so close behind another one, so that those of responses are all that there is."""
    scheduler, device = conversation(num_slots=20, spacing=32, response_tokens=16)
    history: tuple[int, ...] = (1,) * 82
    lost = []
    for turn in range(6):
        sequence, _ = run(scheduler, device, EngineRequest(str(turn), history, max_tokens=13 - turn))
        lost.append(len(history) - (sequence.cached or 0))
        history = (*sequence.tokens, *(2,) * 8)
    assert max(lost[1:]) <= 8 + 16 + 4  # what is new, and less than two of the spacings before it


def test_next_turn_that_rewrites_the_last_one_continues_from_the_turn_before() -> None:
    scheduler, device = conversation()
    first, plans = run(scheduler, device, EngineRequest("1", (1,) * 41, max_tokens=2, checkpoint_at=(9, 30)))
    assert prompt_rows(plans) == [(28, 8), (13, 12)]
    again, _ = run(scheduler, device, EngineRequest("2", (*first.tokens[:31], 2, 2, 2), max_tokens=1))
    assert again.cached == 28
    other, _ = run(scheduler, device, EngineRequest("3", (*first.tokens[:15], 0, 0, 0), max_tokens=1))
    assert other.cached == 8


def test_repeated_prompt_is_computed_from_its_last_page_end() -> None:
    scheduler, device = conversation()
    for length, cached in ((32, 28), (33, 32), (35, 32)):
        run(scheduler, device, EngineRequest("1", (length % VOCAB,) * length, max_tokens=1))
        again, plans = run(scheduler, device, EngineRequest("2", (length % VOCAB,) * length, max_tokens=1))
        assert again.cached == cached
        assert len(plans) == 1


@pytest.mark.parametrize("cuts_rows", [True, False])
@pytest.mark.parametrize(("length", "again"), [(32, 28), (33, 32), (34, 32), (35, 32)])
def test_prompt_that_comes_the_third_time_computes_its_last_token(length: int, again: int, cuts_rows: bool) -> None:
    """The second time, the state before the last token is saved."""
    scheduler, device = conversation(cuts_rows=cuts_rows)
    prompt = (length % VOCAB,) * length
    cached = [run(scheduler, device, EngineRequest(str(turn), prompt, 1))[0].cached for turn in range(4)]
    assert cached == [0, again, length - 1, length - 1]
    other, _ = run(scheduler, device, EngineRequest("other", (*prompt[:-2], VOCAB, VOCAB), 1))
    assert other.cached == (0 if length == 33 else again), "the tail differs"


@pytest.mark.parametrize("cuts_rows", [True, False])
@pytest.mark.parametrize(
    ("length", "turn_end", "cached"),
    [
        (200, 0, [0, 196, 199, 199]),
        (31, 0, [0, 0, 28, 30, 30]),  # the first state of a prompt would spare fewer tokens than the spacing
        (151, 146, [0, 144, 148, 150, 150]),  # the state at its last page end lies too close behind that of a turn
        (161, 146, [0, 144, 160, 160]),  # it has no tail: it ends one token behind a page
    ],
)
def test_spacing_of_states_does_not_keep_a_prompt_from_coming_again(
    length: int, turn_end: int, cached: list[int], cuts_rows: bool
) -> None:
    scheduler, device = conversation(spacing=32, cuts_rows=cuts_rows)
    request = EngineRequest("same", (1,) * length, max_tokens=1, checkpoint_at=(turn_end,))
    assert [run(scheduler, device, request)[0].cached for _ in cached] == cached


def test_prompt_whose_state_is_gone_is_computed_from_its_last_page_end() -> None:
    scheduler, device = conversation(num_slots=2)
    for turn in range(2):
        run(scheduler, device, EngineRequest(str(turn), (1,) * 35, max_tokens=1))
    other, _ = run(scheduler, device, EngineRequest("other", (*(1,) * 32, 2, 2, 2), max_tokens=1))
    assert other.cached == 32, "it saves its own state before the last token in place of the other"
    again, _ = run(scheduler, device, EngineRequest("again", (1,) * 35, max_tokens=1))
    assert again.cached == 32


def test_prompt_that_comes_again_and_again_keeps_its_states() -> None:
    """Others come between: their states take the slots of what was not used."""
    scheduler, device = conversation(num_slots=3)
    cached = []
    for turn in range(8):
        sequence, _ = run(scheduler, device, EngineRequest(f"same {turn}", (1,) * 35, max_tokens=1))
        cached.append(sequence.cached)
        run(scheduler, device, EngineRequest(f"other {turn}", (turn, *(2,) * 34), max_tokens=1))
    assert cached == [0, 32, *(34,) * 6]


def test_state_before_a_last_token_is_evicted_before_the_one_that_it_is_reached_from() -> None:
    scheduler, device = conversation(num_slots=2)
    for turn in range(3):
        run(scheduler, device, EngineRequest(f"same {turn}", (1,) * 35, max_tokens=1))
        if turn:
            run(scheduler, device, EngineRequest(f"other {turn}", (turn, *(2,) * 34), max_tokens=1))
            again, _ = run(scheduler, device, EngineRequest(f"again {turn}", (1,) * 35, max_tokens=1))
            assert again.cached == 32


def test_state_before_a_last_token_is_not_offered_to_host_memory() -> None:
    scheduler, device = conversation()
    for turn in range(2):
        sequence, _ = run(scheduler, device, EngineRequest(str(turn), (1,) * 35, max_tokens=1))
    assert scheduler.checkpoints is not None
    assert sequence.tail is not None
    assert scheduler.checkpoints.knows(sequence.tail)
    assert sequence.tail not in [digest for _, digest in scheduler.checkpoints.known()]


def test_prompt_that_ends_at_a_checkpoint_cannot_use_it() -> None:
    """Its last token must be computed, and the state already includes it."""
    scheduler, device = conversation()
    run(scheduler, device, EngineRequest("1", (1,) * 41, max_tokens=1, checkpoint_at=(20,)))
    shorter, _ = run(scheduler, device, EngineRequest("2", (1,) * 40, max_tokens=1))
    assert shorter.cached == 20


def test_without_slots_nothing_is_reused_and_no_chunk_is_split() -> None:
    scheduler, device = conversation(num_slots=0)
    request = EngineRequest("1", (1,) * 41, max_tokens=8, checkpoint_at=(9, 30))
    for _ in range(2):
        sequence, plans = run(scheduler, device, request)
        assert sequence.cached == 0
        assert plans[0].num_tokens == 41
