"""The draft tokens of one sequence, and the probability of each to be accepted. Pure.

They follow the text through a corpus that it may repeat: an earlier part of the same text, or a predicted output. The
longest suffix of the text that occurs in the corpus says where the text is in it; the tokens after that occurrence are
the draft. The corpus is indexed by n-grams: a token costs a few dictionary entries, and a bounded number of comparisons
where the text leaves the corpus.

The probability is learned from every token of the response, drafted or not: each shows whether the expected token was
right. So text that begins to repeat is noticed without cost.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Final, Literal, get_args

import numpy as np

_ORDERS: Final = (5, 2)
"""Lengths of the indexed n-grams, the longest first; the last is the shortest match."""
_MAX_CANDIDATES: Final = 8
"""Occurrences of an n-gram that are compared."""
MAX_MATCH: Final = 64
"""All longer matches count as this long."""
_FACTOR: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1

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


class NGrams:
    """The ends of each sequence of `order` tokens in a corpus: the index after its last token. Different sequences may
    share a key, so the caller must compare."""

    def __init__(self, order: int, corpus: Sequence[int]) -> None:
        self.order = order
        self._added: dict[int, list[int]] = {}
        """Positions of tokens that were added later."""
        count = max(0, len(corpus) - order + 1)
        tokens, keys = np.array(corpus, dtype=np.uint64), np.zeros(count, np.uint64)
        for index in range(order):
            keys = keys * np.uint64(_FACTOR) + tokens[index : index + count]
        by_key = keys.argsort(kind="stable")
        self._keys, self._ends = keys[by_key], by_key + order

    def _key(self, text: Sequence[int], end: int) -> int:
        key = 0
        for token in text[end - self.order : end]:
            key = (key * _FACTOR + token) & _WORD
        return key

    def add(self, text: Sequence[int], end: int) -> None:
        """Adds the n-gram of `text` that ends before `end`."""
        if end >= self.order:
            self._added.setdefault(self._key(text, end), []).append(end)

    def ends(self, text: Sequence[int], end: int, near: int | None) -> Iterator[int]:
        """Possible occurrences of the n-gram of `text` that ends before `end`: the latest first, or the first one after
        `near` first."""
        if end < self.order:
            return
        key = self._key(text, end)
        added = self._added.get(key, [])
        yield from reversed(added[-_MAX_CANDIDATES:])
        first = int(self._keys.searchsorted(np.uint64(key)))
        if first == len(self._keys) or int(self._keys[first]) != key:
            return
        known = self._ends[first : int(self._keys.searchsorted(np.uint64(key), "right"))]
        if near is None:
            yield from known[::-1][: max(0, _MAX_CANDIDATES - len(added))].tolist()
        else:
            middle = bisect_left(known, near)
            yield from known[middle : middle + _MAX_CANDIDATES].tolist()
            yield from known[max(0, middle - _MAX_CANDIDATES) : middle][::-1].tolist()


class SuffixMatch:
    """The place of a growing text in a corpus. Belongs to the engine thread."""

    def __init__(
        self, corpus: Sequence[int], text: Sequence[int], *, is_prediction: bool = False, searches: bool = True
    ) -> None:
        """Both are kept and only read; `text` grows. They may be the same. `is_prediction`: the rest of the text is
        expected to be the corpus, with changes. `searches`: if false, nothing is indexed, and a text that leaves the
        corpus, except by replaced tokens of a prediction, is not found again."""
        self._corpus = corpus
        self._text = text
        self._seen = len(text)
        self._is_prediction = is_prediction
        self.place: int | None = 0 if is_prediction and corpus else None
        """The place in the corpus at which the text is expected to continue; None if the text is not in the corpus."""
        self.length = 0
        """How many of the latest tokens are the same in both, up to MAX_MATCH."""
        self._left: int | None = None
        """The place where the text left a prediction and is expected to return."""
        self.num_followed = 0
        """Tokens of the text that were the expected ones."""
        self._orders = _ORDERS if searches else ()
        if not is_prediction:
            self._search()
            self._add()

    @cached_property
    def _grams(self) -> list[NGrams]:
        """Made at the first search: the index of a long prediction takes some milliseconds."""
        corpus = self._corpus if self._is_prediction else self._corpus[:-1]
        return [NGrams(order, corpus) for order in self._orders]

    @property
    def num_pending(self) -> int:
        """Tokens of the text that were not followed yet."""
        return len(self._text) - self._seen

    def skip(self, count: int) -> None:
        """Follows `count` tokens, at least one, without comparing them with expectations."""
        for _ in range(count - 1):
            self._seen += 1
            self._add()
        self._seen += 1
        self.place, self.length = None, 0
        self._search()
        self._add()

    def advance(self) -> bool | None:
        """Follows the text by one token. Returns whether it was the expected one; None if none was expected."""
        token = self._text[self._seen]
        self._seen += 1
        held = None if self.place is None else self._corpus[self.place] == token
        if held:
            self.num_followed += 1
            self.length = min(self.length + 1, MAX_MATCH)
        else:
            if self.length or not self._left:
                self._left = self.place
            self.length = 0
        # A prediction with one replaced token continues after it.
        self.place = self.place + 1 if self.place is not None and (held or self._is_prediction) else None
        if self.length < _ORDERS[0]:
            self._search()
        if self.place is not None and self.place >= len(self._corpus):
            self.place = None
        self._add()
        return held

    def draft(self, count: int) -> tuple[int, ...]:
        """Up to `count` expected next tokens. A repeating text is expected to keep repeating."""
        if self.place is None:
            return ()
        tokens = list(self._corpus[self.place : self.place + count])
        period = len(tokens)
        while not self._is_prediction and len(tokens) < count:
            tokens.append(tokens[-period])
        return tuple(tokens)

    def _search(self) -> None:
        """Moves to the longest match, if it is longer than the current one."""
        near = (self._left or 0) if self._is_prediction else None
        for grams in self._grams:
            for place in grams.ends(self._text, self._seen, near):
                length = self._match_length(place)
                if length >= grams.order and length > self.length:
                    self.place, self.length = place, length
            if self.length >= grams.order:
                return

    def _match_length(self, place: int) -> int:
        corpus, text, end = self._corpus, self._text, self._seen
        most = min(MAX_MATCH, place, end)
        for length in range(most):
            if corpus[place - 1 - length] != text[end - 1 - length]:
                return length
        return most

    def _add(self) -> None:
        if not self._is_prediction:
            for grams in self._grams:
                grams.add(self._text, self._seen)


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
