"""Decides how much of a step goes to the idle class, for which no one waits. Pure.

Rows of this class join a step of other requests, oldest first, only while the step is expected to take little longer. A
prompt rarely fits. Work that does not fit advances once in many steps in any case.

A step without other requests has every row of the class but is kept short, because a new request waits for that step
and the one launched after it. If rows would leave little room for prompts in such a step, it takes prompts alone: two
short steps, one of prompts and one of rows, compute more than two mixed ones.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import accumulate

from cortex.neuron.engine.roofline.step_costs import StepCosts, StepShape
from cortex.neuron.engine.scheduling.budget import LEAST_TOKENS

GROWTH = 1.08
"""Factor by which rows of the idle class may lengthen a step of other requests."""
READS = 1.8
"""Target duration of an idle-only step with prompts, as a multiple of the time to read the weights."""
LEAST_STEP_S = 0.004
"""Such a step may always take this long: the wait is not noticeable, and steps of a small model are mostly launches."""
ROWS_SHARE = 1 / 8
"""Rows join prompts in an idle-only step if they take at most this part of the time beyond reading the weights."""
MOST_PROMPT_STEPS = 32
"""Rows are computed at least once in this many idle-only steps."""
MOST_SKIPPED = 256
"""Rows and a prompt advance at least once in this many steps of other requests."""
FORCED_READS = 3.0
"""Limit of such a step, as a multiple of the time to read the weights or to compute the smallest chunk of a prompt."""


@dataclass(frozen=True, slots=True)
class IdleBudget:
    """The budget of one step for the idle class."""

    costs: StepCosts
    others: StepShape
    """The step without the idle class."""
    most_s: float
    """The time that it may take."""
    forced_s: float = 0.0
    """The time granted to rows or a prompt that have waited for long; 0 if none have."""

    @property
    def is_alone(self) -> bool:
        """Whether the step has no other requests."""
        return not self.others.num_streams and not self.others.prompt_tokens

    @property
    def _longest_s(self) -> float:
        return max(self.most_s, self.forced_s)

    def num_rows(self, contexts: Ordered[int]) -> int:
        """The number of rows that join, given the context length of each."""
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
        """The maximum work of prompts. `planned`: the step so far; `room`: the tokens that it can still take."""
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
        """Consecutive steps of other requests that left out all rows or all prompts."""
        self._num_prompt_steps = 0
        """Consecutive steps in which prompts kept rows out."""

    @property
    def rows_are_due(self) -> bool:
        return self._num_prompt_steps >= MOST_PROMPT_STEPS

    def room(self, costs: StepCosts, others: StepShape) -> IdleBudget:
        """The budget of the next step. `others`: that step without the idle class."""
        read_s = costs.seconds(StepShape(1))
        if not others.num_streams and not others.prompt_tokens:
            return IdleBudget(costs, others, max(READS * read_s, LEAST_STEP_S))
        forced_s = FORCED_READS * read_s if self._num_skipped >= MOST_SKIPPED else 0.0
        return IdleBudget(costs, others, GROWTH * costs.seconds(others), forced_s)

    def planned(self, room: IdleBudget, *, leaves_out: bool, skips_rows: bool) -> None:
        """Records a planned step. `leaves_out`: none of its rows joined, or none of its prompts advanced; `skips_rows`:
        an idle-only step takes prompts although there are rows."""
        self._num_prompt_steps = self._num_prompt_steps + 1 if skips_rows else 0
        is_skipped = leaves_out and not room.is_alone and not room.forced_s
        self._num_skipped = self._num_skipped + 1 if is_skipped else 0
