"""Drafts tokens for the sequences of a step, and learns from the results."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Final

from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.sampling.constraints import Constraint
from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.scheduling.step_plan import RowPlan
from cortex.neuron.engine.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftKind, ProposalKind
from cortex.neuron.engine.speculation.width_rule import FastestWidths

MAX_ROWS: Final = 32
"""Larger batches get no drafts, because reading the weights is a small part of their steps."""
MAX_WIDTH: Final = 31
"""Most draft tokens of a row."""


@dataclass(frozen=True, slots=True)
class CheckedDraft:
    """The outcome of one row's draft."""

    kind: DraftKind
    num_drafted: int
    num_accepted: int
    num_predicted: int
    """Tokens that the row added and that the prediction has, drafted or not."""


NOTHING_CHECKED = CheckedDraft("lookup", 0, 0, 0)


@dataclass(slots=True)
class _Drafting:
    """The drafting state of one request."""

    drafter: Drafter
    constraint: Constraint | None
    """The grammar that its output must conform to. Only read here."""
    kind: DraftKind = "lookup"
    """The source of the latest draft."""

    def draft(self, sequence: Sequence, count: int) -> Draft:
        """Up to `count` tokens that its grammar, if it has one, allows."""
        count = min(count, sequence.request.max_tokens - sequence.num_drawn - 1)
        if not self.drafter.is_on or count < 1:
            return NO_DRAFT
        draft = self.drafter.draft(count)
        if self.constraint is None:
            return draft
        forced = self.constraint.forced_tokens()[:count]
        if forced:
            draft = self.drafter.forced(forced)
        return draft.first(self.constraint.num_allowed(draft.tokens))


class Speculation:
    """The sole writer of the drafts for one model's requests. Belongs to the engine thread."""

    def __init__(
        self,
        rule: FastestWidths,
        new_drafter: type[Drafter] = Drafter,
        *,
        is_on: bool = True,
        proposals: ProposalKind | None = None,
    ) -> None:
        """`is_on`: if false, nothing is drafted, but predictions are still followed, because usage reports them.
        `proposals`: the source of draft tokens on the device, if any."""
        self._proposals = proposals
        self.rule = rule
        self._new_drafter = new_drafter
        self.is_on = is_on
        self._drafting: dict[str, _Drafting] = {}
        """By the id of the request; only those that have drafts or a prediction."""

    @property
    def proposes(self) -> bool:
        """Whether the device may compute draft tokens."""
        return self._proposals is not None and self.is_on

    def begin(self, request: EngineRequest, tokens: Ordered[int], constraint: Constraint | None) -> None:
        """Before the first step of a request. `tokens`: of prompt and output; it grows, and is only read here."""
        drafts = self.is_on and request.speculates
        if drafts or request.prediction:
            kind = self._proposals if drafts else None
            drafter = self._new_drafter(tokens, request.prediction, is_on=drafts, proposals=kind)
            self._drafting[request.id] = _Drafting(drafter, constraint)

    def end(self, request_id: str) -> None:
        """The request has ended."""
        self._drafting.pop(request_id, None)

    def num_proposals(self, decoding: Ordered[tuple[Sequence, RowPlan]], *, is_mixed: bool) -> int | None:
        """How many draft tokens the device computes in the next step for each row that draws; see `StepPlan`. A step
        with prompts, or with drafts from the text, computes at least what later proposals need; a large batch, or one
        whose proposals do not pay, nothing. `decoding`: the step's rows of responses."""
        if not self.proposes:
            return None
        odds, follows_text = [], False
        for sequence, row in decoding:
            drafting = self._drafting.get(sequence.request.id)
            if drafting is None or drafting.drafter.proposal_kind is None:
                continue
            if row.drafted and drafting.kind != self._proposals:
                follows_text = True  # and will probably continue so
            else:
                odds.append(drafting.drafter.proposal_chances)
        count = self.rule.num_proposals(odds, len(decoding)) if odds and len(decoding) <= MAX_ROWS else 0
        return count or (0 if is_mixed or follows_text else None)

    def is_likely(self, decoding: Ordered[Sequence], *, is_mixed: bool) -> bool:
        """Whether the next step would likely check drafts, judged before the last one is read."""
        return any(draft.tokens for draft in self._drafts(decoding, is_mixed=is_mixed))

    def draft(self, decoding: Ordered[Sequence], *, is_mixed: bool) -> Mapping[str, tuple[int, ...]]:
        """The draft tokens that the next step checks, by the id of their request. The host must know all tokens of the
        sequences."""
        drafted: dict[str, tuple[int, ...]] = {}
        if not self._drafting:
            return drafted
        for sequence, draft in zip(decoding, self._drafts(decoding, is_mixed=is_mixed), strict=True):
            drafting = self._drafting.get(sequence.request.id)
            if drafting is not None:
                drafting.kind = draft.kind
                if draft.tokens:
                    drafted[sequence.request.id] = draft.tokens
        return drafted

    def _drafts(self, decoding: Ordered[Sequence], *, is_mixed: bool) -> list[Draft]:
        nothing = [NO_DRAFT] * len(decoding)
        if not self.is_on or len(decoding) > MAX_ROWS:
            return nothing
        num_tokens = sum(sequence.remaining for sequence in decoding)
        most = min(MAX_WIDTH, self.rule.max_tokens - num_tokens)
        if most < 1:
            return nothing
        drafting = [self._drafting.get(sequence.request.id) for sequence in decoding]
        drafts = [
            NO_DRAFT if each is None else each.draft(sequence, most)
            for sequence, each in zip(decoding, drafting, strict=True)
        ]
        if not any(draft.tokens for draft in drafts):
            return nothing
        widths = self.rule.widths(drafts, num_tokens, is_mixed=is_mixed)
        return [draft.first(width) for draft, width in zip(drafts, widths, strict=True)]

    def read(self, request_id: str, row: RowPlan, tokens: Ordered[int], proposed: tuple[int, ...] = ()) -> CheckedDraft:
        """Records the outcome of a row's drafts. `tokens`: those that the row added to the request. `proposed`: draft
        tokens for the next row."""
        drafting = self._drafting.get(request_id)
        if drafting is None:
            return NOTHING_CHECKED
        drafter, drafted, kind = drafting.drafter, row.drafted, drafting.kind
        num_accepted = sum(guess == token for guess, token in zip(drafted, tokens, strict=False))
        drafter.checked(kind, len(drafted), num_accepted)
        drafter.propose(proposed)
        return CheckedDraft(kind, len(drafted), num_accepted, drafter.follow_prediction())
