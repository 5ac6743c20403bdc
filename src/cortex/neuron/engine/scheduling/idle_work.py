"""How much of a step is for the idle class, for which nobody waits. Pure.

Beside other requests, rows of this class join a step only as far as it is expected to take little longer than without
them; the oldest join first. A prompt rarely fits. What does not, advances in any case once in many steps.

A step without other requests has every row of the class, but is kept short: a request that comes meanwhile waits for
that step, and for the one that is launched after it. Where rows would leave little of such a step for prompts, it is
for prompts alone: two short steps, of prompts and of rows, compute more than two of both.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import accumulate

from cortex.neuron.engine.roofline.step_costs import StepCosts, StepShape
from cortex.neuron.engine.scheduling.budget import LEAST_TOKENS

GROWTH = 1.08
"""How many times as long rows of the idle class may make a step of other requests."""
READS = 1.8
"""A step of the idle class alone takes this many times as long as reading the weights, if prompts are computed."""
LEAST_STEP_S = 0.004
"""It may take as long in any case: nobody notices the wait, and a step of a small model is mostly launches."""
ROWS_SHARE = 1 / 8
"""Rows join prompts in a step of the idle class alone, if they take no more than this part of what reading leaves."""
MOST_PROMPT_STEPS = 32
"""Rows are computed at least once in so many steps of the idle class alone."""
MOST_SKIPPED = 256
"""Rows and a prompt advance at least once in so many steps of other requests."""
FORCED_READS = 3.0
"""Such a step takes at most this many times as long as reading the weights, or as the least chunk of a prompt does."""


@dataclass(frozen=True, slots=True)
class IdleBudget:
    """What one step has for the idle class."""

    costs: StepCosts
    others: StepShape
    """The step without the idle class."""
    most_s: float
    """What it may take."""
    forced_s: float = 0.0
    """What it may take at least, because rows or a prompt have waited for long; 0: none have."""

    @property
    def is_alone(self) -> bool:
        """Whether nothing else is in the step."""
        return not self.others.num_streams and not self.others.prompt_tokens

    @property
    def _longest_s(self) -> float:
        return max(self.most_s, self.forced_s)

    def num_rows(self, contexts: Ordered[int]) -> int:
        """How many rows join, of those that have so many tokens before them."""
        if self.is_alone:
            return len(contexts)
        sums = list(accumulate(contexts, initial=0))
        least, most = 0, len(contexts) + 1
        while most - least > 1:
            middle = (least + most) // 2
            if self._seconds(middle, sums[middle]) <= self._longest_s:
                least = middle
            else:
                most = middle
        return max(least, min(len(contexts), 1 if self.forced_s else 0))

    def leaves_prompts_room(self, contexts: Ordered[int]) -> bool:
        """Whether a step of the idle class alone is for these rows and prompts. If not, prompts go first."""
        read_s = self.costs.seconds(StepShape(1))
        most_s = read_s + ROWS_SHARE * (self.most_s - read_s)
        return not contexts or self._seconds(len(contexts), sum(contexts)) <= most_s

    def prompt_worth(self, planned: StepShape, room: int) -> int:
        """What prompts are worth at most. `planned`: the step so far; `room`: the tokens that it can still have."""
        before = planned.prompt_tokens
        worth = self.costs.prompt_tokens(planned, self._longest_s, room + before) - before
        if self.is_alone or self.forced_s:
            return min(room, max(worth, LEAST_TOKENS))
        return worth if worth >= LEAST_TOKENS else 0

    def _seconds(self, num_rows: int, context_tokens: int) -> float:
        others = self.others
        return self.costs.seconds(
            StepShape(
                others.num_streams + num_rows,
                others.context_tokens + context_tokens,
                others.prompt_tokens,
                others.prompt_worth,
            )
        )


class IdleWork:
    """Belongs to the scheduler."""

    def __init__(self) -> None:
        self._num_skipped = 0
        """Steps of other requests in a row in which all rows or all prompts were left out."""
        self._num_prompt_steps = 0
        """Steps in a row in which prompts kept rows out."""

    @property
    def rows_are_due(self) -> bool:
        return self._num_prompt_steps >= MOST_PROMPT_STEPS

    def room(self, costs: StepCosts, others: StepShape) -> IdleBudget:
        """What the next step has. `others`: that step without the idle class."""
        read_s = costs.seconds(StepShape(1))
        if not others.num_streams and not others.prompt_tokens:
            return IdleBudget(costs, others, max(READS * read_s, LEAST_STEP_S))
        forced_s = FORCED_READS * read_s if self._num_skipped >= MOST_SKIPPED else 0.0
        return IdleBudget(costs, others, GROWTH * costs.seconds(others), forced_s)

    def planned(self, room: IdleBudget, *, leaves_out: bool, skips_rows: bool) -> None:
        """The step is planned. `leaves_out`: there are rows of which none joined, or prompts of which none advanced;
        `skips_rows`: a step of the class alone is for prompts, although there are rows."""
        self._num_prompt_steps = self._num_prompt_steps + 1 if skips_rows else 0
        is_skipped = leaves_out and not room.is_alone and not room.forced_s
        self._num_skipped = self._num_skipped + 1 if is_skipped else 0
