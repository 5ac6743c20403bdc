"""Gives the sequences of a step their draft tokens, and learns from the results."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final, Protocol

from cortex.neuron.engine.sequence import Sequence
from cortex.neuron.engine.speculation.drafter import (
    MAX_PROPOSALS,
    NO_DRAFT,
    Draft,
    Drafter,
    DraftKind,
    ProposalKind,
)
from cortex.neuron.engine.speculation.widths import MIN_GAIN, StepCosts, choose_widths
from cortex.neuron.engine.step_plan import RowPlan

MAX_ROWS: Final = 32
"""Larger batches get no drafts: reading the weights takes a small part of their steps."""
MAX_WIDTH: Final = 31
"""Most draft tokens of a row."""
_NEXT_GAIN: Final = 1.03
"""One more token is proposed only if it is expected to give this many times as many tokens per second."""
_COST_PACE: Final = 0.3
"""The weight of the latest step in the cost of proposed tokens."""


@dataclass(frozen=True, slots=True)
class CheckedDraft:
    """What became of the draft of one row."""

    kind: DraftKind
    num_drafted: int
    num_accepted: int
    num_predicted: int
    """Tokens that the row added and that the prediction has, drafted or not."""


NOTHING_CHECKED = CheckedDraft("lookup", 0, 0, 0)


class WidthRule(Protocol):
    """How many draft tokens the rows of a step check."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step that checks drafts; 0: none does."""
        ...

    def widths(self, drafts: Ordered[Draft], num_tokens: int, *, is_mixed: bool) -> list[int]:
        """For each row. `num_tokens`: of the step without drafts; `is_mixed`: prompts are waiting or computed too."""
        ...

    def num_proposals(self, odds: Ordered[Ordered[float]], num_tokens: int) -> int:
        """How many draft tokens the device computes for each row, for the step after this one. `odds`: of the tokens
        that it may propose for each row, each together with those before it."""
        ...

    def record(self, num_tokens: int, seconds: float, *, checks_drafts: bool, num_proposals: int = 0) -> None:
        """Reports how long a step of decode rows took. `num_proposals`: draft tokens that it computed for each row."""
        ...


class FastestWidths:
    """As many as give the most tokens per second; none while there are prompts, whose steps are long anyway."""

    def __init__(
        self, sizes: Ordered[int], growth: float, max_tokens: Callable[[], int], proposal_cost: float = 0.0
    ) -> None:
        """`sizes` and `growth`: see `StepCosts`. `max_tokens`: of a step that checks drafts, if it is to be fast.
        `proposal_cost`: what one proposed token for each row adds to the time of a step, in proportion to a step
        without drafts, until it is measured: in the first step of each sequence."""
        self._max_tokens = max_tokens
        self._proposal_cost = proposal_cost
        self._costs = StepCosts(sizes, growth)

    @property
    def max_tokens(self) -> int:
        return self._max_tokens()

    def widths(self, drafts: Ordered[Draft], num_tokens: int, *, is_mixed: bool) -> list[int]:
        plain_s = self._costs.plain(num_tokens)
        if plain_s is None or is_mixed:
            return [0] * len(drafts)
        odds = [draft.odds for draft in drafts]
        return choose_widths(odds, num_tokens, self.max_tokens, plain_s, self._costs.checking)

    def num_proposals(self, odds: Ordered[Ordered[float]], num_tokens: int) -> int:
        plain_s = self._costs.plain(num_tokens)
        if plain_s is None:
            return 0
        best, found, gain = MIN_GAIN * len(odds) / plain_s, 0, 0.0
        for count in range(1, 1 + min(MAX_PROPOSALS, self.max_tokens // num_tokens - 1)):
            gain += sum(each[count - 1] for each in odds)
            seconds = self._costs.checking(num_tokens * (1 + count)) + count * self._proposal_cost * plain_s
            rate = (len(odds) + gain) / seconds
            if rate < best:
                break
            # A row whose last tokens are rejected is computed again in part, and more tokens were drafted for nothing.
            best, found = rate * _NEXT_GAIN, count
        return found

    def record(self, num_tokens: int, seconds: float, *, checks_drafts: bool, num_proposals: int = 0) -> None:
        plain_s = self._costs.plain(num_tokens)
        if not num_proposals:
            self._costs.record(num_tokens, seconds, checks_drafts=checks_drafts)
        elif plain_s is not None and checks_drafts:
            proposing_s = num_proposals * self._proposal_cost * plain_s
            self._costs.record(num_tokens, max(seconds - proposing_s, plain_s), checks_drafts=True)
        elif plain_s is not None:
            measured = max(0.0, seconds / plain_s - 1) / num_proposals
            self._proposal_cost += (min(measured, 3.0) - self._proposal_cost) * _COST_PACE


class Speculation:
    """The draft tokens of one model's sequences. Belongs to the engine thread."""

    def __init__(
        self,
        rule: WidthRule,
        new_drafter: type[Drafter] = Drafter,
        *,
        is_on: bool = True,
        proposals: ProposalKind | None = None,
    ) -> None:
        """`is_on`: false: predictions are followed, because usage reports them, but nothing is drafted. `proposals`:
        what computes draft tokens on the device, if anything does."""
        self._proposals = proposals
        self.rule = rule
        self._new_drafter = new_drafter
        self._is_on = is_on

    def begin(self, sequence: Sequence) -> None:
        """Before the first step of a sequence."""
        request = sequence.request
        drafts = self._is_on and request.speculates
        if drafts or request.prediction:
            kind = self._proposals if drafts else None
            sequence.drafter = self._new_drafter(sequence.tokens, request.prediction, is_on=drafts, proposals=kind)

    def num_proposals(self, decoding: Ordered[Sequence], *, is_mixed: bool) -> int | None:
        """How many draft tokens the device computes in the next step for each row that draws; see `StepPlan`. A step
        with prompts computes at least what later proposals need; a large batch, or one whose proposals do not pay,
        nothing."""
        if self._proposals is None or not self._is_on:
            return None
        nothing = 0 if is_mixed else None
        if len(decoding) > MAX_ROWS:
            return nothing
        drafters = [sequence.drafter for sequence in decoding if sequence.drafter is not None]
        odds = [drafter.proposal_chances for drafter in drafters if drafter.proposal_kind is not None]
        return (self.rule.num_proposals(odds, len(decoding)) if odds else 0) or nothing

    def is_likely(self, decoding: Ordered[Sequence], *, is_mixed: bool) -> bool:
        """Whether the next step would check drafts, as far as is known before the last one is read."""
        return any(draft.tokens for draft in self._drafts(decoding, is_mixed=is_mixed))

    def assign(self, decoding: Ordered[Sequence], *, is_mixed: bool) -> None:
        """Gives drafts to the sequences, all of whose tokens the host knows."""
        for sequence, draft in zip(decoding, self._drafts(decoding, is_mixed=is_mixed), strict=True):
            sequence.draft = draft

    def _drafts(self, decoding: Ordered[Sequence], *, is_mixed: bool) -> list[Draft]:
        nothing = [NO_DRAFT] * len(decoding)
        if not self._is_on or len(decoding) > MAX_ROWS:
            return nothing
        num_tokens = sum(sequence.remaining for sequence in decoding)
        most = min(MAX_WIDTH, self.rule.max_tokens - num_tokens)
        if most < 1:
            return nothing
        drafts = [_draft(sequence, most) for sequence in decoding]
        if not any(draft.tokens for draft in drafts):
            return nothing
        widths = self.rule.widths(drafts, num_tokens, is_mixed=is_mixed)
        return [draft.first(width) for draft, width in zip(drafts, widths, strict=True)]

    def read(
        self, sequence: Sequence, row: RowPlan, tokens: Ordered[int], proposed: tuple[int, ...] = ()
    ) -> CheckedDraft:
        """Records what became of the drafts of a row. `tokens`: those that the row added to the sequence. `proposed`:
        draft tokens for the next one."""
        drafter, drafted, kind = sequence.drafter, row.drafted, sequence.draft.kind
        if drafter is None:
            return NOTHING_CHECKED
        num_accepted = sum(guess == token for guess, token in zip(drafted, tokens, strict=False))
        drafter.checked(kind, len(drafted), num_accepted)
        drafter.propose(proposed)
        return CheckedDraft(kind, len(drafted), num_accepted, drafter.follow_prediction())


def _draft(sequence: Sequence, count: int) -> Draft:
    """Up to `count` tokens that its grammar, if it has one, allows."""
    drafter, constraint = sequence.drafter, sequence.constraint
    count = min(count, sequence.request.max_tokens - sequence.num_drawn - 1)
    if drafter is None or not drafter.is_on or count < 1:
        return NO_DRAFT
    draft = drafter.draft(count)
    if constraint is None:
        return draft
    forced = constraint.forced_tokens()[:count]
    if forced:
        draft = drafter.forced(forced)
    return draft.first(constraint.num_allowed(draft.tokens))
