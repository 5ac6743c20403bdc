"""Prompts of the idle class beside other requests, through the scheduler."""

from __future__ import annotations

from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.system.fair_turns import IDLE

from .planned_steps import PAGE, collect, other, planned, request, run_to_the_end, scheduler_of


def step(scheduler: Scheduler) -> StepPlan:
    plan = planned(scheduler)
    collect(scheduler, plan)
    return plan


def test_idle_prompt_waits_while_another_request_streams_and_goes_on_after_it() -> None:
    scheduler = scheduler_of()
    stream = scheduler.add(request("stream", PAGE, max_tokens=6))
    step(scheduler)
    idle = scheduler.add(other("idle", 40, 1000, level=IDLE))
    while stream.wants_more:
        assert [row.count for row in step(scheduler).rows] == [1], "its chunk would make the stream's steps longer"
    assert idle.scheduled == 0
    run_to_the_end(scheduler)
    assert len(idle.tokens) == 44


def test_idle_prompt_makes_steps_as_long_as_another_prompt_has_made_one() -> None:
    scheduler = scheduler_of(step_tokens=256)
    scheduler.add(request("stream", PAGE, max_tokens=40))
    step(scheduler)
    idle = scheduler.add(other("idle", 40, 1000, level=IDLE))
    step(scheduler)
    scheduler.add(other("prompt", 60, 2000, max_tokens=1))
    step(scheduler)
    assert idle.scheduled == 0
    step(scheduler)
    assert idle.scheduled == 40, "the step takes no longer than the one before"
