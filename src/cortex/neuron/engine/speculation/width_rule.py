"""Decides how many draft tokens steps check and the device proposes, from the measured times of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cortex.neuron.engine.speculation.drafter import MAX_PROPOSALS, PROPOSAL_KINDS, Draft
from cortex.neuron.engine.speculation.proposal_costs import ProposalCosts, choose_proposals
from cortex.neuron.engine.speculation.widths import StepCosts, choose_widths

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
    """Whether it was launched before the step before it was read, where steps overlap: the device did not wait."""


class WidthRule(Protocol):
    """How many draft tokens the rows of a step check."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step that checks drafts; 0: none does."""
        ...

    def widths(self, drafts: Sequence[Draft], num_tokens: int, *, is_mixed: bool) -> list[int]:
        """For each row. `num_tokens`: of the step without drafts; `is_mixed`: prompts are waiting or computed too."""
        ...

    def num_proposals(self, odds: Sequence[Sequence[float]], num_rows: int) -> int:
        """How many draft tokens the device computes for each row, for the step after this one. `odds`: of the tokens
        that it may propose, for each row that has use for them, each together with those before it."""
        ...

    def record(self, step: StepTime) -> None:
        """Reports a step of decode rows."""
        ...

    def forget(self) -> None:
        """Steps may take another time from now on: graphs were captured for them."""
        ...


class FastestWidths:
    """As many as give the most tokens per second; none while there are prompts, whose steps are long anyway."""

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
        self._costs = StepCosts(self._sizes, self._growth)
        self._proposing = ProposalCosts(self._costs, self._proposal_cost)
        self._since_plain: dict[int, int] = {}
        """Steps of each size that proposed since the latest one without drafts."""

    @property
    def max_tokens(self) -> int:
        return self._max_tokens()

    def widths(self, drafts: Sequence[Draft], num_tokens: int, *, is_mixed: bool) -> list[int]:
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
        plain_s = self._costs.plain(num_rows)
        if plain_s is None or self._since_plain.get(self._costs.size(num_rows), 0) >= PLAIN_AGE:
            return 0
        most = min(MAX_PROPOSALS, self.max_tokens // num_rows - 1, self._proposing.most(num_rows))
        return choose_proposals(odds, num_rows, most, plain_s, lambda count: self._proposing.seconds(num_rows, count))

    def record(self, step: StepTime) -> None:
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
