"""Follows a text through a corpus that it may repeat: an earlier part of the same text, or a predicted output.

The longest suffix of the text that occurs in the corpus says where the text is in it; the tokens after that occurrence
are the draft. The corpus is indexed by n-grams: a token costs a few dictionary entries, and a bounded number of
comparisons where the text leaves the corpus. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

import numpy as np

_ORDERS: Final = (5, 2)
"""Lengths of the indexed n-grams, the longest first; the last is the shortest match."""
_MAX_CANDIDATES: Final = 8
"""Occurrences of an n-gram that are compared."""
MAX_MATCH: Final = 64
"""All longer matches count as this long."""
_FACTOR: Final = 0x9E3779B97F4A7C15
_WORD: Final = (1 << 64) - 1


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
