"""Gives the sequences of a step their draft tokens, and learns from the results."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final, Protocol

from cortex.neuron.engine.sequence import Sequence
from cortex.neuron.engine.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftKind
from cortex.neuron.engine.speculation.widths import StepCosts, choose_widths
from cortex.neuron.engine.step_plan import RowPlan

MAX_ROWS: Final = 32
"""Larger batches get no drafts: reading the weights takes a small part of their steps."""
MAX_WIDTH: Final = 31
"""Most draft tokens of a row."""


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

    def record(self, num_tokens: int, seconds: float, *, checks_drafts: bool) -> None:
        """Reports how long a step of decode rows took."""
        ...


class FastestWidths:
    """As many as give the most tokens per second; none while there are prompts, whose steps are long anyway."""

    def __init__(self, sizes: Ordered[int], growth: float, max_tokens: Callable[[], int]) -> None:
        """`sizes` and `growth`: see `StepCosts`. `max_tokens`: of a step that checks drafts, if it is to be fast."""
        self._max_tokens = max_tokens
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

    def record(self, num_tokens: int, seconds: float, *, checks_drafts: bool) -> None:
        self._costs.record(num_tokens, seconds, checks_drafts=checks_drafts)


class Speculation:
    """The draft tokens of one model's sequences. Belongs to the engine thread."""

    def __init__(self, rule: WidthRule, new_drafter: type[Drafter] = Drafter, *, is_on: bool = True) -> None:
        """`is_on`: false: predictions are followed, because usage reports them, but nothing is drafted."""
        self.rule = rule
        self._new_drafter = new_drafter
        self._is_on = is_on

    def begin(self, sequence: Sequence) -> None:
        """Before the first step of a sequence."""
        request = sequence.request
        drafts = self._is_on and request.speculates
        if drafts or request.prediction:
            sequence.drafter = self._new_drafter(sequence.tokens, request.prediction, is_on=drafts)

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

    def read(self, sequence: Sequence, row: RowPlan, tokens: Ordered[int]) -> CheckedDraft:
        """Records what became of the drafts of a row. `tokens`: those that the row added to the sequence."""
        drafter, drafted, kind = sequence.drafter, row.drafted, sequence.draft.kind
        if drafter is None:
            return NOTHING_CHECKED
        num_accepted = sum(guess == token for guess, token in zip(drafted, tokens, strict=False))
        drafter.checked(kind, len(drafted), num_accepted)
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
