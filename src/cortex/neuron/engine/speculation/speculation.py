"""Gives the sequences of a step their draft tokens, and learns from the results."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final

from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.scheduling.step_plan import RowPlan
from cortex.neuron.engine.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftKind, ProposalKind
from cortex.neuron.engine.speculation.width_rule import WidthRule

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
        self.is_on = is_on

    @property
    def proposes(self) -> bool:
        """Whether the device may compute draft tokens."""
        return self._proposals is not None and self.is_on

    def begin(self, sequence: Sequence) -> None:
        """Before the first step of a sequence."""
        request = sequence.request
        drafts = self.is_on and request.speculates
        if drafts or request.prediction:
            kind = self._proposals if drafts else None
            sequence.drafter = self._new_drafter(sequence.tokens, request.prediction, is_on=drafts, proposals=kind)

    def num_proposals(self, decoding: Ordered[tuple[Sequence, RowPlan]], *, is_mixed: bool) -> int | None:
        """How many draft tokens the device computes in the next step for each row that draws; see `StepPlan`. A step
        with prompts, or with drafts from the text, computes at least what later proposals need; a large batch, or one
        whose proposals do not pay, nothing. `decoding`: the step's rows of responses."""
        if not self.proposes:
            return None
        odds, follows_text = [], False
        for sequence, row in decoding:
            if sequence.drafter is None or sequence.drafter.proposal_kind is None:
                continue
            if row.drafted and sequence.draft.kind != self._proposals:
                follows_text = True  # what it is expected to go on doing
            else:
                odds.append(sequence.drafter.proposal_chances)
        count = self.rule.num_proposals(odds, len(decoding)) if odds and len(decoding) <= MAX_ROWS else 0
        return count or (0 if is_mixed or follows_text else None)

    def is_likely(self, decoding: Ordered[Sequence], *, is_mixed: bool) -> bool:
        """Whether the next step would check drafts, as far as is known before the last one is read."""
        return any(draft.tokens for draft in self._drafts(decoding, is_mixed=is_mixed))

    def assign(self, decoding: Ordered[Sequence], *, is_mixed: bool) -> None:
        """Gives drafts to the sequences, all of whose tokens the host knows."""
        for sequence, draft in zip(decoding, self._drafts(decoding, is_mixed=is_mixed), strict=True):
            sequence.draft = draft

    def _drafts(self, decoding: Ordered[Sequence], *, is_mixed: bool) -> list[Draft]:
        nothing = [NO_DRAFT] * len(decoding)
        if not self.is_on or len(decoding) > MAX_ROWS:
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
