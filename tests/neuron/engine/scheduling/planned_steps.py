"""A scheduler, and steps that are planned and read without an engine."""

from __future__ import annotations

from collections.abc import Iterable

from cortex.neuron.engine.kv.page_groups import KVPages
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.roofline.step_costs import StepCosts
from cortex.neuron.engine.roofline.step_work import DeviceLimits, StepWork
from cortex.neuron.engine.scheduling.budget import SchedulerLimits
from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.scheduling.step_plan import RowPlan, StepPlan
from cortex.neuron.pictures.picture import PictureRules
from cortex.system.fair_turns import DEFAULT

PAGE = 4
TOKEN_S = 1e-3
"""Expected time of a token, in a prompt and in a stream alike."""


def token_costs() -> StepCosts:
    """Costs of steps that depend on nothing but their tokens."""
    return StepCosts(StepWork(0, weights_per_token=10**9), DeviceLimits(1e18, 2e9 / TOKEN_S))


def scheduler_of(
    pages: int = 64,
    *,
    rows: int = 8,
    step_tokens: int = 64,
    mixed: int | None = None,
    context: int | None = None,
    reserved: int = 0,
    pictures: PictureRules | None = None,
) -> Scheduler:
    """`mixed`: tokens of a step that streams or several prompts wait for, unless streams are more than a third of it;
    None: as of any step."""
    limits = SchedulerLimits(
        rows, step_tokens, ((mixed or step_tokens) + 0.5) * TOKEN_S, context or pages * PAGE, reserved
    )
    return Scheduler(KVPages({None: pages + 1}, PAGE), limits, token_costs(), pictures=pictures)


def request(
    name: str, prompt: int | tuple[int, ...], max_tokens: int = 4, principal: str = "", level: int = DEFAULT
) -> EngineRequest:
    """A prompt given by its length is the start of 0, 1, 2, …"""
    tokens = tuple(range(prompt)) if isinstance(prompt, int) else prompt
    return EngineRequest(name, tokens, max_tokens=max_tokens, principal=principal, level=level)


def other(
    name: str, length: int, first: int, max_tokens: int = 4, principal: str = "", level: int = DEFAULT
) -> EngineRequest:
    """A prompt that shares no prefix with one of another `first`."""
    return request(name, tuple(range(first, first + length)), max_tokens, principal, level)


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.check_integrity()
    return plan


def collect(scheduler: Scheduler, plan: StepPlan, token: int = 7) -> None:
    """The host reads a step in which every row drew `token`; complete sequences end."""
    by_row = {sequence.row: sequence for sequence in scheduler.running}
    for row in plan.rows:
        sequence = by_row[row.row]
        read(scheduler, sequence, row, (token,) * row.outputs.draws)
        if len(sequence.tokens) - len(sequence.request.prompt) == sequence.request.max_tokens:
            scheduler.drop(sequence)
    scheduler.check_integrity()


def read(scheduler: Scheduler, sequence: Sequence, row: RowPlan, tokens: Iterable[int]) -> None:
    """The host reads a row that drew these tokens, as a step loop does, which owns the tokens of a sequence."""
    assert isinstance(sequence.tokens, list)
    known = len(sequence.tokens)
    sequence.tokens.extend(tokens)
    scheduler.row_read(sequence, row, len(sequence.tokens) - known)


def run_to_the_end(scheduler: Scheduler) -> list[StepPlan]:
    plans = []
    while (plan := scheduler.plan()) is not None:
        collect(scheduler, plan)
        plans.append(plan)
    return plans


def spans(plan: StepPlan) -> list[tuple[int, int]]:
    return [(row.start, row.count) for row in plan.rows]
