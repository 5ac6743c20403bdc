"""What the idle class gets of steps: as a decision, and through the scheduler."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.roofline.step_costs import StepCosts, StepShape
from cortex.neuron.engine.roofline.step_work import DeviceLimits, StepWork
from cortex.neuron.engine.scheduling.budget import LEAST_TOKENS
from cortex.neuron.engine.scheduling.idle_work import (
    FORCED_READS,
    GROWTH,
    LONG_SHARE,
    MOST_GROWTH,
    MOST_PROMPT_STEPS,
    MOST_ROW_STEPS,
    MOST_SKIPPED,
    READS,
    IdleWork,
    Turn,
)
from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.system.fair_turns import DEFAULT, FLEX, IDLE

from .planned_steps import PAGE, collect, other, planned, request, run_to_the_end, scheduler_of

NOTHING = StepShape(0)


def costs() -> StepCosts:
    """An 8B model in bfloat16 on an H200, as steps were measured there."""
    work = StepWork(15_000_000_000, token_bytes=131_072, weights_per_token=7_500_000_000, attention_width=131_072)
    return StepCosts(work, DeviceLimits(4.0e12, 7.5e14))


def step(scheduler: Scheduler) -> StepPlan:
    plan = planned(scheduler)
    collect(scheduler, plan)
    return plan


shapes = st.builds(
    lambda streams, context, worth: StepShape(streams, context * streams).with_prompts(worth),
    st.integers(1, 64),
    st.integers(0, 4000),
    st.integers(0, 1000),
)


@given(shapes, st.lists(st.integers(0, 8000), max_size=300))
def test_rows_make_a_step_of_others_little_longer_and_as_many_join_as_do_so(
    others: StepShape, contexts: list[int]
) -> None:
    known = costs()
    count = IdleWork().room(known, others).num_rows(contexts)

    def seconds(num_rows: int) -> float:
        streams, context = others.num_streams + num_rows, others.context_tokens + sum(contexts[:num_rows])
        return known.seconds(StepShape(streams, context, others.prompt_tokens, others.prompt_worth))

    assert seconds(count) <= GROWTH * known.seconds(others)
    assert count == len(contexts) or seconds(count + 1) > GROWTH * known.seconds(others)


def having_seen(known: StepCosts, part: float, prompts: list[int], streams: StepShape, num_steps: int) -> IdleWork:
    """After steps of these streams, of which `part` have prompts of other requests."""
    work, draw = IdleWork(), random.Random(1)
    for _ in range(num_steps):
        is_long = draw.random() < part
        work.room(known, streams.with_prompts(draw.choice(prompts)) if is_long else streams)
    return work


@given(shapes, st.integers(0, 4096))
def test_prompts_do_not_join_others_whose_steps_have_few_prompts(others: StepShape, room: int) -> None:
    assert IdleWork().room(costs(), others).prompt_worth(others, room) == 0


@pytest.mark.parametrize("part", [0.0, 0.003, 0.006, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("prompts", [[200], [40, 200, 1000]])
@pytest.mark.parametrize("num_streams", [1, 8])
def test_idle_class_keeps_the_99th_percentile_of_the_gaps_of_others(
    part: float, prompts: list[int], num_streams: int
) -> None:
    known, streams = costs(), StepShape(num_streams, 500 * num_streams)
    work, draw = having_seen(known, part, prompts, streams, 8000), random.Random(2)
    alone, longest = [], []
    for _ in range(8000):
        others = streams.with_prompts(draw.choice(prompts)) if draw.random() < part else streams
        room = work.room(known, others)
        alone.append(known.seconds(others))
        longest.append(room.most_s)
        assert room.most_s <= MOST_GROWTH * known.seconds(others)
    assert percentile(longest, 0.99) <= 1.2 * percentile(alone, 0.99)
    takes_prompts = [room.prompt_worth(streams, 16_384) > 0 for room in [work.room(known, streams)]]
    assert takes_prompts == [part >= 2 * LONG_SHARE], "only where prompts of others are usual"


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


def test_prompts_and_rows_take_turns_and_prompts_wait_until_they_fill_a_step() -> None:
    known, work = costs(), IdleWork()
    room, contexts = work.room(known, NOTHING), [500] * 64
    worth = room.prompt_worth(NOTHING, 16_384)

    def turns(prompt_tokens: int, count: int) -> list[Turn]:
        found = []
        for _ in range(count):
            found.append(work.turn(room, contexts, prompt_tokens, worth))
            work.planned(room, found[-1], leaves_rows=False, leaves_prompts=False)
        return found

    assert turns(worth, 2) == ["prompts"] * 2
    assert turns(worth - 1, MOST_ROW_STEPS + 1) == ["rows"] * MOST_ROW_STEPS + ["prompts"], "at last"
    assert turns(0, 1) == ["both"], "nothing waits for its turn"
    assert turns(worth, MOST_PROMPT_STEPS + 1) == ["prompts"] * MOST_PROMPT_STEPS + ["rows"]
    assert work.turn(room, [], 1, worth) == "both", "no rows"


@pytest.mark.parametrize(
    ("num_rows", "join"),
    [(0, True), (2, True), (64, False)],
)
def test_rows_join_prompts_in_a_step_of_their_own_while_they_take_little_of_it(num_rows: int, join: bool) -> None:
    room = IdleWork().room(costs(), NOTHING)
    assert room.is_alone
    assert room.num_rows([500] * num_rows) == num_rows
    assert room.leaves_prompts_room([500] * num_rows) is join


def test_step_of_the_idle_class_alone_is_short() -> None:
    known = costs()
    room = IdleWork().room(known, NOTHING)
    worth = room.prompt_worth(NOTHING, 16_384)
    assert known.seconds(NOTHING.with_prompts(worth)) == pytest.approx(READS * known.seconds(StepShape(1)), rel=0.02)
    assert room.prompt_worth(StepShape(512, 512 * 4000), 16_384) == LEAST_TOKENS, "a prompt always advances there"


def test_prompt_advances_at_last_beside_streams_and_only_now_and_then() -> None:
    known, work, streams = costs(), IdleWork(), StepShape(4, 2000)
    advanced = []
    for _ in range(3 * MOST_SKIPPED):
        room = work.room(known, streams)
        worth = room.prompt_worth(streams, 16_384)
        advanced.append(worth)
        work.planned(room, "both", leaves_rows=False, leaves_prompts=not worth)
    chunks = [worth for worth in advanced if worth]
    assert len(chunks) == 2
    assert known.seconds(streams.with_prompts(chunks[0])) <= 1.01 * FORCED_READS * known.seconds(StepShape(1))
    assert chunks[0] > 2 * LEAST_TOKENS


def test_stream_has_no_idle_prompt_in_its_steps_and_the_prompt_goes_on_after_it() -> None:
    scheduler = scheduler_of()
    stream = scheduler.add(request("stream", PAGE, max_tokens=6))
    step(scheduler)
    idle = scheduler.add(other("idle", 40, 1000, level=IDLE))
    while stream.wants_more:
        assert [row.count for row in step(scheduler).rows] == [1], "its chunk would make the stream's steps longer"
    assert idle.scheduled == 0
    run_to_the_end(scheduler)
    assert len(idle.tokens) == 44


def test_prompt_of_another_class_does_not_wait_for_idle_rows() -> None:
    scheduler = scheduler_of(pages=256, rows=16, step_tokens=256)
    idle = [scheduler.add(other(f"idle{number}", PAGE, 100 * number, 40, level=IDLE)) for number in range(12)]
    while not all(sequence.drew_in_row for sequence in idle):
        step(scheduler)
    first = scheduler.add(other("first", 20, 5000, max_tokens=8))
    rows = step(scheduler).rows
    assert max(row.count for row in rows) == 20, "the whole prompt at once"
    assert len(rows) <= 2, "20 tokens, and one row more is within the bound"
    while first.wants_more:
        assert len(step(scheduler).rows) == 1, "a row more would double the step of one"
    assert len(step(scheduler).rows) == 12, "nobody else is there"


def test_oldest_idle_rows_join_first_so_that_each_ends() -> None:
    scheduler = scheduler_of(pages=512, rows=64, step_tokens=256)
    streams = [scheduler.add(other(f"stream{number}", PAGE, 100 * number, 60)) for number in range(30)]
    while not all(sequence.drew_in_row for sequence in streams):
        step(scheduler)
    for sequence in streams[:15]:
        scheduler.drop(sequence)
    idle = [scheduler.add(other(f"idle{number}", PAGE, 9000 + 100 * number, 4, level=FLEX)) for number in range(3)]
    assert all(sequence.level == FLEX for sequence in idle)
    step(scheduler)
    assert all(sequence.drew_in_row for sequence in idle), "only the idle class waits like this"


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6), st.sampled_from([IDLE, FLEX, DEFAULT])), max_size=12))
def test_every_request_of_every_class_ends(requests: list[tuple[int, int, int]]) -> None:
    scheduler = scheduler_of(pages=32, rows=4, step_tokens=16)
    added = [
        scheduler.add(other(str(number), length, 1000 * number, max_tokens, level=level))
        for number, (length, max_tokens, level) in enumerate(requests)
    ]
    plans = run_to_the_end(scheduler)
    assert [len(each.tokens) - len(each.request.prompt) for each in added] == [each[1] for each in requests]
    assert len(plans) <= sum(length + max_tokens for length, max_tokens, _ in requests)


def test_idle_class_advances_while_another_stream_never_ends() -> None:
    scheduler = scheduler_of(pages=1024, context=3000)
    scheduler.add(request("stream", PAGE, max_tokens=2900))
    step(scheduler)
    idle = scheduler.add(other("idle", 20, 9000, max_tokens=2, level=IDLE))
    steps = 0
    while idle.wants_more and steps < 2000:
        collect(scheduler, scheduler.plan() or pytest.fail("nothing to do"))
        steps += 1
    assert MOST_SKIPPED < steps <= 3 * (MOST_SKIPPED + 1)


def test_row_too_long_for_the_steps_of_others_advances_though_prompts_of_its_class_never_end() -> None:
    known, streams, contexts = costs(), StepShape(4, 2000), [400_000]
    work = having_seen(known, 0.1, [200, 1000], streams, 8000)
    advanced = 0
    for _ in range(2 * (MOST_SKIPPED + 1)):
        room = work.room(known, streams)
        turn = work.turn(room, contexts, 100_000, room.prompt_worth(streams, 16_384))
        num_rows = 0 if turn == "prompts" else room.num_rows(contexts)
        work.planned(room, turn, leaves_rows=not num_rows, leaves_prompts=turn == "rows")
        advanced += num_rows
    assert advanced == 2


def test_rows_of_the_idle_class_advance_while_prompts_of_it_never_end() -> None:
    scheduler = scheduler_of(pages=4096, rows=8, step_tokens=64)
    idle = [scheduler.add(other(f"idle{number}", PAGE, 100 * number, 40, level=IDLE)) for number in range(6)]
    while not all(sequence.drew_in_row for sequence in idle):
        step(scheduler)
    scheduler.add(other("long", 10_000, 50_000, max_tokens=1, level=IDLE))
    before = [len(sequence.tokens) for sequence in idle]
    for _ in range(MOST_PROMPT_STEPS + 1):
        step(scheduler)
    assert [len(sequence.tokens) for sequence in idle] == [count + 1 for count in before]
