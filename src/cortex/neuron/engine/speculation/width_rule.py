"""Chooses the number of draft tokens that steps check and the device proposes, for the most tokens per second.

A step of more tokens takes longer, and gives more tokens if drafts are right. Both are known from earlier steps: the
odds of each draft token from its sequence, the time of a step from steps of the same size.

A step that checks draft tokens of the device and computes the next ones pays once for being planned after the step
before it was read, and once for the pass of the proposer over its tokens; then for each draft token. So its time is
measured as a whole, first for one draft token and then for one more at a time: the times of fewer are known, and that
of one more approximately.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cortex.neuron.engine.speculation.drafter import MAX_PROPOSALS, PROPOSAL_KINDS, Draft

MIN_GAIN: Final = 1.03
"""Drafts are checked only if they are expected to raise tokens per second by this factor."""
PACE: Final = 0.2
"""Weight of the latest step in the time of its size."""
RECOVERY: Final = 0.002
"""How fast the times of unused sizes return to the assumed ones, so that they are tried again."""
_TRIES: Final = 3
"""The first steps of a kind may load their kernels: the fastest of this many counts."""
_MOST_CHANGE: Final = 0.1
"""The time of unused sizes falls at most to this fraction at once, so it stays positive."""


class MeasuredTimes:
    """Measured seconds of several kinds of steps."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def record(self, kind: int, seconds: float) -> float:
        """Returns by how much steps of this kind became slower, which the first few cannot tell."""
        known = self._times.get(kind, seconds)
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        # A pause of the machine does not predict the next step.
        if count <= _TRIES:
            self._times[kind] = min(known, seconds)
            return 0.0
        change = (min(seconds, 3 * known) - known) * PACE
        self._times[kind] = known + change
        return change

    def known(self, kind: int) -> float | None:
        """None without such a step yet."""
        return self._times.get(kind)

    def tried(self, kind: int) -> float | None:
        """None without enough such steps."""
        return self._times[kind] if self._counts.get(kind, 0) >= _TRIES else None

    def move(self, kind: int, change: float) -> None:
        known = self._times[kind]
        self._times[kind] = max(known + change, known * _MOST_CHANGE)

    @property
    def kinds(self) -> list[int]:
        """The kinds of the steps so far."""
        return list(self._times)


class StepCosts:
    """Seconds that steps take, by their number of tokens and whether they check drafts."""

    def __init__(self, sizes: Sequence[int], growth: float) -> None:
        """`sizes`: ascending; steps up to the same size take about equally long. `growth`: assumed cost of one extra
        token, relative to a step of one token, until measured."""
        self._sizes = sizes
        self._growth = growth
        self._plain = MeasuredTimes()
        self._checking = MeasuredTimes()

    def record(self, num_tokens: int, seconds: float, *, checks_drafts: bool) -> None:
        (self._checking if checks_drafts else self._plain).record(self.size(num_tokens), seconds)
        if not checks_drafts:
            for other in self._checking.kinds:
                self._checking.move(other, (self._assumed(other) - (self._checking.known(other) or 0.0)) * RECOVERY)

    def plain(self, num_tokens: int) -> float | None:
        """Seconds of a step without drafts; None without such a step yet."""
        return self._plain.known(self.size(num_tokens))

    def checking(self, num_tokens: int) -> float:
        """Seconds of a step that checks drafts."""
        size = self.size(num_tokens)
        tried = self._checking.tried(size)
        return self._assumed(size) if tried is None else tried

    def _assumed(self, size: int) -> float:
        """From the nearest smaller step without drafts."""
        sizes = self._plain.kinds
        near = max((one for one in sizes if one <= size), default=min(sizes, default=0))
        return (self._plain.known(near) or 0.0) * (1 + self._growth * max(0, size - near))

    def size(self, num_tokens: int) -> int:
        """The size to which a step of `num_tokens` belongs."""
        place = bisect_left(self._sizes, num_tokens)
        return self._sizes[place] if place < len(self._sizes) else num_tokens


def choose_widths(
    odds: Sequence[Sequence[float]],
    num_tokens: int,
    max_tokens: int,
    plain_s: float,
    checking_s: Callable[[int], float],
) -> list[int]:
    """How many draft tokens each row of a step checks. The step has `num_tokens` without drafts and takes `plain_s`;
    with drafts it may have up to `max_tokens`. `odds`: of each row's draft tokens, each together with those before
    it, so they do not increase."""
    best, widths = MIN_GAIN * len(odds) / plain_s, [0] * len(odds)
    chosen = [0] * len(odds)
    gain = 0.0
    most_likely = sorted(((one, row) for row, each in enumerate(odds) for one in each), reverse=True)
    for number, (one, row) in enumerate(most_likely[: max(0, max_tokens - num_tokens)], start=1):
        gain += one
        chosen[row] += 1
        rate = (len(odds) + gain) / checking_s(num_tokens + number)
        if rate > best:
            best, widths = rate, chosen.copy()
    return widths


NEXT_GAIN: Final = 1.03
"""More tokens are proposed only if they are expected to raise tokens per second by this factor."""


class ProposalCosts:
    """Seconds of steps that check drafts and propose, by their rows and how many tokens they propose for each."""

    def __init__(self, steps: StepCosts, proposal_cost: float) -> None:
        """`steps`: the times of other steps. `proposal_cost`: assumed cost of one proposed token per row, relative to a
        step without drafts, until measured."""
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
        """One more than was measured, because the next may take much longer than assumed."""
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


PLAIN_AGE: Final = 512
"""After this many steps that propose, the time of a step without drafts is measured again."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step of decode rows took."""

    num_rows: int
    num_tokens: int
    """The tokens of all rows: a row may have draft tokens, and tokens that are computed again."""
    seconds: float
    checks_drafts: bool
    num_proposals: int = 0
    """Draft tokens that it computed for each row."""
    follows: bool = True
    """Whether it was launched before the previous step was read (overlapping steps), so that the device did not
    wait."""


class FastestWidths:
    """How many draft tokens the rows of a step check: the number with the most tokens per second; none while there are
    prompts, whose steps are long anyway."""

    def __init__(
        self, sizes: Sequence[int], growth: float, max_tokens: Callable[[], int], proposal_cost: float = 0.0
    ) -> None:
        """`sizes` and `growth`: see `StepCosts`. `max_tokens`: of a step that checks drafts, if it is to be fast.
        `proposal_cost`: see `ProposalCosts`."""
        self._sizes, self._growth = sizes, growth
        self._max_tokens = max_tokens
        self._proposal_cost = proposal_cost
        self.forget()

    def forget(self) -> None:
        """Forget measured times, because newly captured graphs change them."""
        self._costs = StepCosts(self._sizes, self._growth)
        self._proposing = ProposalCosts(self._costs, self._proposal_cost)
        self._since_plain: dict[int, int] = {}
        """Steps of each size that proposed since the latest one without drafts."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step that checks drafts; 0: none does."""
        return self._max_tokens()

    def widths(self, drafts: Sequence[Draft], num_tokens: int, *, is_mixed: bool) -> list[int]:
        """For each row. `num_tokens`: of the step without drafts; `is_mixed`: prompts are waiting or computed too."""
        plain_s = self._costs.plain(len(drafts))
        if plain_s is None or is_mixed:
            return [0] * len(drafts)
        if num_tokens > len(drafts):  # tokens are computed again, with or without drafts
            plain_s = self._costs.checking(num_tokens)
        odds = [draft.odds for draft in drafts]
        chosen = choose_widths(odds, num_tokens, self.max_tokens, plain_s, self._costs.checking)
        proposed = [len(draft.tokens) if draft.kind in PROPOSAL_KINDS else 0 for draft in drafts]
        if not any(chosen) and num_tokens + sum(proposed) <= self.max_tokens:
            return proposed  # they were computed because checking them pays: `num_proposals` decides for both
        return chosen

    def num_proposals(self, odds: Sequence[Sequence[float]], num_rows: int) -> int:
        """How many draft tokens the device computes for each row, for the step after this one. `odds`: of the tokens
        that it may propose, for each row that has use for them, each together with those before it."""
        plain_s = self._costs.plain(num_rows)
        if plain_s is None or self._since_plain.get(self._costs.size(num_rows), 0) >= PLAIN_AGE:
            return 0
        most = min(MAX_PROPOSALS, self.max_tokens // num_rows - 1, self._proposing.most(num_rows))
        return choose_proposals(odds, num_rows, most, plain_s, lambda count: self._proposing.seconds(num_rows, count))

    def record(self, step: StepTime) -> None:
        """Reports a step of decode rows."""
        size = self._costs.size(step.num_rows)
        if step.num_proposals:
            self._since_plain[size] = self._since_plain.get(size, 0) + 1
            if step.checks_drafts:
                self._proposing.record(step.num_rows, step.num_proposals, step.seconds)
        elif step.checks_drafts or step.num_tokens > step.num_rows:
            self._costs.record(step.num_tokens, step.seconds, checks_drafts=True)
        elif step.follows:
            self._costs.record(step.num_tokens, step.seconds, checks_drafts=False)
            self._proposing.plain_recorded(step.num_rows)
            self._since_plain[size] = 0
