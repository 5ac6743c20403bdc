"""How long steps take that check draft tokens of the device and compute the next ones. Pure.

Such a step pays once for being planned after the step before it was read, and once for the pass of the proposer over
its tokens; then for each draft token. So its time is measured as a whole, for one draft token first and then for one
more at a time: what fewer take is known, what one more takes is known roughly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from cortex.neuron.engine.speculation.widths import MIN_GAIN, RECOVERY, MeasuredTimes, StepCosts

NEXT_GAIN: Final = 1.03
"""More tokens are proposed only if they are expected to give this many times as many tokens per second."""


class ProposalCosts:
    """Seconds of steps that check drafts and propose, by their rows and how many tokens they propose for each."""

    def __init__(self, steps: StepCosts, proposal_cost: float) -> None:
        """`steps`: the times of other steps. `proposal_cost`: what one proposed token for each row adds to the time of
        a step, in proportion to a step without drafts, until it is measured."""
        self._steps = steps
        self._proposal_cost = proposal_cost
        self._times: dict[int, MeasuredTimes] = {}

    def _of(self, num_rows: int) -> MeasuredTimes:
        return self._times.setdefault(self._steps.size(num_rows), MeasuredTimes())

    def record(self, num_rows: int, count: int, seconds: float) -> None:
        times = self._of(num_rows)
        change = times.record(count, seconds)
        here = times.known(count) or 0.0
        for other in times.kinds:
            if other != count:
                # What makes one of them slower, as a longer context does, makes all of them slower.
                assumed = here + self._assumed(num_rows, other) - self._assumed(num_rows, count)
                times.move(other, change + min(0.0, assumed - (times.known(other) or 0.0)) * RECOVERY)

    def plain_recorded(self, num_rows: int) -> None:
        """After a step without drafts: the times return to the assumed ones, so that such steps are tried again."""
        times = self._of(num_rows)
        for count in times.kinds:
            times.move(count, (self._assumed(num_rows, count) - (times.known(count) or 0.0)) * RECOVERY)

    def seconds(self, num_rows: int, count: int) -> float:
        times = self._of(num_rows)
        for fewer in range(count, 0, -1):
            if (tried := times.tried(fewer)) is not None:
                more = self._assumed(num_rows, count) - self._assumed(num_rows, fewer)
                return tried + max(0.0, more)
        return self._assumed(num_rows, count)

    def most(self, num_rows: int) -> int:
        """One more than was measured: the next may take much longer than it is assumed to."""
        times = self._of(num_rows)
        return 1 + max((count for count in times.kinds if times.tried(count) is not None), default=0)

    def _assumed(self, num_rows: int, count: int) -> float:
        plain_s = self._steps.plain(num_rows) or 0.0
        return self._steps.checking(num_rows * (1 + count)) + count * self._proposal_cost * plain_s


def choose_proposals(
    odds: Sequence[Sequence[float]], num_rows: int, most: int, plain_s: float, seconds: Callable[[int], float]
) -> int:
    """How many draft tokens are proposed for each row of a batch of `num_rows`: at most `most`, and none if they do not
    pay. `odds`: of the tokens that may be proposed, for each row that would have use for them, each together with those
    before it. `plain_s`: the time of a step without drafts; `seconds`: of one that proposes this many."""
    best, found, gain = MIN_GAIN * num_rows / plain_s, 0, 0.0
    for count in range(1, 1 + most):
        gain += sum(each[count - 1] for each in odds)
        rate = (num_rows + gain) / seconds(count)
        if rate > best:
            # Rows of recurrent layers compute tokens again after rejected ones, and more of them after longer drafts.
            best, found = rate * NEXT_GAIN, count
    return found
