"""Decides how much of a step goes to the idle class, for which no one waits. Pure.

Rows of this class join a step of other requests, oldest first, only while the step is expected to take little longer.
Prompts join only if many steps contain prompts of other requests. Those steps then determine the 99th percentile of the
time between tokens, so a step of streams with rows or prompts of this class may take about as long as they do. Work
that does not fit advances once in many steps in any case.

A step without other requests has every row of the class but is kept short, because a new request waits for that step
and the one launched after it. If rows would leave little room for prompts in a step, it takes prompts alone once they
fill it: two short steps, one of prompts and one of rows, compute more than two mixed ones.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from cortex.neuron.engine.roofline.step_costs import StepCosts, StepShape
from cortex.neuron.engine.scheduling.budget import LEAST_TOKENS

Turn = Literal["rows", "prompts", "both"]

GROWTH = 1.08
"""Factor by which rows of the idle class may lengthen a step of other requests."""
READS = 1.8
"""Target duration of an idle-only step with prompts, as a multiple of the time to read the weights."""
LEAST_STEP_S = 0.004
"""Such a step may always take this long: the wait is not noticeable, and steps of a small model are mostly launches."""
ROWS_SHARE = 1 / 8
"""Rows join prompts if they take at most this part of the time that the idle class may add to a step."""
MOST_PROMPT_STEPS = 32
"""Rows are computed at least once in this many steps."""
MOST_ROW_STEPS = 8
"""Prompts wait for at most this many steps of rows to fill a step."""
LONG_SHARE = 0.015
"""Steps with prompts of other requests are usual if they are at least this part of the steps of streams."""
LONG_QUANTILE = 1 / 3
"""With that share, the 99th percentile of all gaps between tokens is this quantile of those with prompts."""
LONG_GROWTH = 1.15
"""Where such steps are usual, the idle class may lengthen a step of streams to this multiple of that quantile, …"""
MOST_GROWTH = 2.5
"""… but not by more than this factor."""
SHARE_WEIGHT = 1 / 1000
"""The weight of the latest step in the share of those with prompts."""
LONG_WEIGHT = 1 / 16
"""The rate at which the quantile follows the times of steps."""
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
    is_long: bool = False
    """Whether prompts may join streams, because steps with others' prompts are usual."""
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
        """Whether a step is for these rows and prompts. If not, they take turns."""
        least_s = self.costs.seconds(StepShape(1) if self.is_alone else self.others)
        most_s = least_s + ROWS_SHARE * (self.most_s - least_s)
        return not contexts or self._seconds(len(contexts), sum(contexts)) <= most_s

    def prompt_worth(self, planned: StepShape, room: int) -> int:
        """The maximum work of prompts. `planned`: the step so far; `room`: the tokens that it can still take."""
        if not (self.is_alone or self.forced_s or self.is_long):
            return 0
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
        self._num_without_rows = self._num_without_prompts = 0
        """Consecutive steps of other requests that left out all rows, or all prompts."""
        self._num_prompt_steps = self._num_row_steps = 0
        """Consecutive steps of prompts alone, and of rows alone while prompts waited."""
        self._long_share = 0.0
        """The part of the steps of others' streams that have prompts of others."""
        self._long_s = 0.0
        """`LONG_QUANTILE` of the expected times of these steps."""

    def room(self, costs: StepCosts, others: StepShape) -> IdleBudget:
        """The budget of the next step. `others`: that step without the idle class. Called once per step."""
        read_s = costs.seconds(StepShape(1))
        if not others.num_streams and not others.prompt_tokens:
            return IdleBudget(costs, others, max(READS * read_s, LEAST_STEP_S))
        num_skipped = max(self._num_without_rows, self._num_without_prompts)
        forced_s = FORCED_READS * read_s if num_skipped >= MOST_SKIPPED else 0.0
        others_s = costs.seconds(others)
        if others.num_streams:
            self._learn(others, others_s)
        is_long = self._long_share >= LONG_SHARE and not others.prompt_tokens
        long_s = min(LONG_GROWTH * self._long_s, MOST_GROWTH * others_s) if is_long else 0.0
        return IdleBudget(costs, others, max(GROWTH * others_s, long_s), is_long, forced_s)

    def _learn(self, others: StepShape, others_s: float) -> None:
        is_long = others.prompt_tokens > 0
        self._long_share += SHARE_WEIGHT * (is_long - self._long_share)
        if is_long:
            part = LONG_QUANTILE if others_s > self._long_s else LONG_QUANTILE - 1
            self._long_s = self._long_s * (1 + LONG_WEIGHT * part) or others_s

    def turn(self, room: IdleBudget, contexts: Ordered[int], prompt_tokens: int, worth: int) -> Turn:
        """What of the idle class the step computes. `contexts`: those of its rows; `prompt_tokens`: the tokens of its
        prompts; `worth`: as many as the step has room for."""
        if not worth or not prompt_tokens or room.forced_s or room.leaves_prompts_room(contexts):
            return "both"
        if self._num_prompt_steps >= MOST_PROMPT_STEPS:
            return "rows"
        return "prompts" if prompt_tokens >= worth or self._num_row_steps >= MOST_ROW_STEPS else "rows"

    def planned(self, room: IdleBudget, turn: Turn, *, leaves_rows: bool, leaves_prompts: bool) -> None:
        """Records a planned step. `leaves_rows`: none of its rows joined; `leaves_prompts`: none of its prompts
        advanced."""
        self._num_prompt_steps = self._num_prompt_steps + 1 if turn == "prompts" else 0
        self._num_row_steps = self._num_row_steps + 1 if turn == "rows" else 0
        counts = not room.is_alone and not room.forced_s
        self._num_without_rows = self._num_without_rows + 1 if counts and leaves_rows else 0
        self._num_without_prompts = self._num_without_prompts + 1 if counts and leaves_prompts else 0
