"""The draft tokens of one sequence, and the probability of each to be accepted.

The probability is learned from every token of the response, drafted or not: each shows whether the expected token was
right. So text that begins to repeat is noticed without cost. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Final, Literal, get_args

from cortex.neuron.engine.speculation.suffix_match import SuffixMatch

DraftKind = Literal["lookup", "prediction", "grammar", "mtp", "draft"]
ProposalKind = Literal["mtp", "draft"]
"""Kinds computed on the device: by a head of the model, or by a smaller model."""
PROPOSAL_KINDS: Final = frozenset(get_args(ProposalKind))

_MATCH_LENGTHS: Final = (1, 4, 8, 16, 32)
"""Buckets of match lengths: matches of one bucket share the probability to continue."""
_FIRST_ODDS: Final[dict[str, tuple[float, ...]]] = {
    "lookup": (0.0, 0.3, 0.5, 0.7, 0.8, 0.9),
    "prediction": (0.6, 0.6, 0.8, 0.9, 0.9, 0.95),
    "grammar": (0.9,) * 6,
}
MAX_PROPOSALS: Final = 7
"""Maximum number of draft tokens computed on the device per row."""
_FIRST_PROPOSAL_ODDS: Final = 0.75
_FIRST_SAMPLES, _MOST_SAMPLES = 4, 20
"""Weights, in proposed tokens, of the initial odds of proposals, and at most of the learned ones."""
_RETURN: Final = 0.0005
"""How fast the odds of proposals return to the initial ones while there are none, so that they are tried again."""
_PACE: Final = 0.1
"""The weight of the latest token in the odds."""
_MAX_FOLLOWED: Final = 32
"""Beyond this many pending tokens, their odds are not learned."""


@dataclass(frozen=True, slots=True)
class Draft:
    tokens: tuple[int, ...]
    odds: tuple[float, ...]
    """The probability that each token and all before it are accepted."""
    kind: DraftKind

    def first(self, count: int) -> Draft:
        return Draft(self.tokens[:count], self.odds[:count], self.kind)


NO_DRAFT = Draft((), (), "lookup")


class Drafter:
    """Belongs to the engine thread. `text` is the sequence's tokens: it grows, and is only read."""

    def __init__(
        self,
        text: Sequence[int],
        prediction: tuple[int, ...] = (),
        *,
        is_on: bool = True,
        proposals: ProposalKind | None = None,
    ) -> None:
        """`is_on`: whether to draft; if not, it only reports how much of the prediction appeared in place. `proposals`:
        the kind of those from the device; None without any."""
        self.proposal_kind = proposals
        self.is_on = is_on
        self._text = text
        self._lookup: SuffixMatch | None = None
        """Made on first use, because the index of a long prompt takes milliseconds."""
        self._prediction = SuffixMatch(prediction, text, is_prediction=True, searches=is_on) if prediction else None
        self._odds = {kind: list(odds) for kind, odds in _FIRST_ODDS.items()}
        self._proposed: tuple[int, ...] = ()
        self._proposed_at = 0
        """The length of the text that `_proposed` continues."""
        self._proposal_odds = [_FIRST_PROPOSAL_ODDS] * MAX_PROPOSALS
        """The odds of each proposed token, if those before it are right."""
        self._num_samples = [_FIRST_SAMPLES] * MAX_PROPOSALS
        """What these were learned from."""

    def draft(self, count: int) -> Draft:
        """Up to `count` expected tokens after the text."""
        self._follow()
        sources: tuple[tuple[DraftKind, SuffixMatch | None], ...] = (
            ("prediction", self._prediction),
            ("lookup", self._lookup),
        )
        drafts = [self._draft_of(kind, lookup, count) for kind, lookup in sources if lookup is not None]
        if self.proposal_kind is not None and self._proposed_at == len(self._text):
            tokens = self._proposed[:count]
            drafts.append(Draft(tokens, self.proposal_chances[: len(tokens)], self.proposal_kind))
        return max(drafts, key=lambda draft: sum(draft.odds), default=NO_DRAFT)

    def propose(self, tokens: tuple[int, ...]) -> None:
        """Records the tokens that the device proposes after the text, and learns from its previous proposals."""
        odds, counts = self._proposal_odds, self._num_samples
        for index, token in enumerate(self._proposed[: len(self._text) - self._proposed_at]):
            held = self._text[self._proposed_at + index] == token
            counts[index] = min(counts[index] + 1, _MOST_SAMPLES)
            odds[index] += (held - odds[index]) / counts[index]
            if not held:
                break
        if not tokens and not self._proposed:
            odds[:] = [one + (_FIRST_PROPOSAL_ODDS - one) * _RETURN for one in odds]
        self._proposed, self._proposed_at = tokens, len(self._text)

    @property
    def proposal_chances(self) -> tuple[float, ...]:
        """The probability that each token that the device may propose, and all before it, are accepted."""
        odds, known = [], 1.0
        for one, count in zip(self._proposal_odds, self._num_samples, strict=True):
            known = one if count > _FIRST_SAMPLES else min(one, known)  # not learned: no likelier than the one before
            odds.append(known)
        return tuple(accumulate(odds, mul))

    def _draft_of(self, kind: DraftKind, lookup: SuffixMatch, count: int) -> Draft:
        tokens = lookup.draft(count if kind == "prediction" else min(count, lookup.length))
        return Draft(tokens, self._chances(kind, lookup.length, len(tokens)), kind)

    def forced(self, tokens: tuple[int, ...]) -> Draft:
        """Tokens that a grammar asks for."""
        return Draft(tokens, self._chances("grammar", 0, len(tokens)), "grammar")

    def checked(self, kind: DraftKind, num_drafted: int, num_accepted: int) -> None:
        """Learns from checked draft tokens. The outcome of others follows from the text."""
        if kind == "grammar":
            for index in range(min(num_accepted + 1, num_drafted)):
                self._learn("grammar", 0, held=index < num_accepted)

    def follow_prediction(self) -> int:
        """Follows the new tokens of the text through the prediction; returns how many of them it has."""
        if self._prediction is None:
            return 0
        before = self._prediction.num_followed
        self._follow_in("prediction", self._prediction)
        return self._prediction.num_followed - before

    def _follow(self) -> None:
        self.follow_prediction()
        if self._lookup is None:
            self._lookup = SuffixMatch(self._text, self._text)
        if (late := self._lookup.num_pending - _MAX_FOLLOWED) > 0:
            self._lookup.skip(late)
        self._follow_in("lookup", self._lookup)

    def _follow_in(self, kind: DraftKind, lookup: SuffixMatch) -> None:
        while lookup.num_pending:
            length = lookup.length
            held = lookup.advance()
            if held is not None:
                self._learn(kind, length, held=held)

    def _learn(self, kind: DraftKind, length: int, *, held: bool) -> None:
        place = bisect_right(_MATCH_LENGTHS, length)
        odds = self._odds[kind]
        odds[place] += (held - odds[place]) * _PACE

    def _chances(self, kind: DraftKind, length: int, count: int) -> tuple[float, ...]:
        """A continuing match gets longer and thus more likely to continue."""
        chances, chance = [], 1.0
        for index in range(count):
            chance *= self._odds[kind][bisect_right(_MATCH_LENGTHS, length + index if kind != "grammar" else 0)]
            chances.append(chance)
        return tuple(chances)
