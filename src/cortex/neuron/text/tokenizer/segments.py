"""Tokenises long prompts without repeating the work of earlier turns.

An agent sends its whole conversation again with each turn. Text is always split at whole tokens such as `<|im_end|>`,
so a segment between two of them has the same ids everywhere, and is cached. Each tenant has a cache of its own: the
time that a text takes must not reveal that another tenant sent it. SentencePiece treats the beginning of a text
differently: its segments are encoded after the token before them. The tokens of a prompt up to such a cut do not depend
on the text after it.
"""

from __future__ import annotations

import re
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise, takewhile
from operator import itemgetter
from typing import Final

from cortex.neuron.text.tokenizer.encoder import Segmented
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from cortex.neuron.text.tokenizer.vocabulary import WholeToken

_MAX_CACHED_CHARACTERS: Final = 8 << 20
_MIN_CACHED_CHARACTERS: Final = 256
"""Shorter segments are tokenised faster than they are looked up."""
_CHARACTERS_PER_LITERAL: Final = 8
"""Cost of the position of a literal character, in characters of the cache limit."""
_MAX_WHOLE_TOKENS: Final = 16_384
"""Gemma has 6,400. With more, the pattern takes long to build."""
_WINDOW_CHARACTERS: Final = 1 << 16
"""Characters per search: a search blocks all other threads."""


_BREAK: Final = "\ufdd0"
"""A noncharacter: no vocabulary has a token of it."""
_SPACES: Final = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""The characters that the library treats as white space."""


class SegmentEncoder:
    """Encodes exactly like `tokenizer.encode`, but for text that is to be taken literally. Safe to share between
    threads; its cache is bounded."""

    def __init__(
        self,
        tokenizer: LibraryTokenizer,
        *,
        max_cached_characters: int = _MAX_CACHED_CHARACTERS,
        window_characters: int = _WINDOW_CHARACTERS,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_cached_characters = max_cached_characters
        self._window_characters = window_characters
        vocabulary = tokenizer.vocabulary
        self._ids_by_whole = {token.text: token.id for token in vocabulary.whole_tokens}
        self._stripping_left = {token.text for token in vocabulary.whole_tokens if token.strips_left}
        self._stripping_right = {token.text for token in vocabulary.whole_tokens if token.strips_right}
        self._longest_whole = max(map(len, self._ids_by_whole), default=0)
        self._pattern = _pattern(vocabulary.whole_tokens)
        self._is_context_free = vocabulary.is_context_free
        self._cached: OrderedDict[tuple[bytes, str, str, tuple[int, ...]], array[int]] = OrderedDict()
        """By tenant, by segment, by the whole token before it where that matters, and by its literal characters."""
        self._num_characters = 0
        self._num_tokenised = 0
        self._lock = threading.Lock()

    @property
    def num_tokenised(self) -> int:
        """Characters that the library has tokenised; those of cached segments cost nothing."""
        return self._num_tokenised

    def encode(self, text: str, literal_at: Sequence[int] = (), tenant: bytes = b"") -> Segmented:
        """At the characters `literal_at`, ascending, no whole token begins. `tenant`: whose text it is."""
        if self._pattern is None:
            return self._encode_whole(text, literal_at)
        return self._encode_segments(self._pattern, text, literal_at, tenant)

    def _encode_segments(
        self, pattern: re.Pattern[str], text: str, literal_at: Sequence[int], tenant: bytes
    ) -> Segmented:
        ids: list[int] = []
        cuts: list[tuple[int, int]] = []
        position, before = 0, ""
        for found in self._whole_tokens(pattern, text, frozenset(literal_at)):
            whole = found.group()
            start, end = self._with_white_space(whole, text, position, found.start(), found.end())
            ids += self._literal_segment(text, position, start, literal_at, tenant, before)
            cuts.append((start, len(ids)))
            ids.append(self._ids_by_whole[whole])
            cuts.append((end, len(ids)))
            position = end
            before = "" if self._is_context_free else whole
        ids += self._literal_segment(text, position, len(text), literal_at, tenant, before)
        return _segmented(ids, cuts)

    def _literal_segment(
        self, text: str, start: int, end: int, literal_at: Sequence[int], tenant: bytes, before: str
    ) -> list[int] | array[int]:
        """The ids of a part of `text` without whole tokens. Where it contains the text of one, it is encoded in two
        pieces, or with a break: the library would find the token in the whole. `before`: the whole token that it is
        encoded after."""
        inside = literal_at[bisect_left(literal_at, start) : bisect_left(literal_at, end)]
        if not inside or not self._is_context_free:
            return self._segment(text[start:end], tenant, before, tuple(at - start for at in inside))
        bounds = (start, *(at + 1 for at in inside), end)
        return [token for piece in pairwise(bounds) for token in self._segment(text[slice(*piece)], tenant)]

    def _with_white_space(self, whole: str, text: str, begin: int, start: int, end: int) -> tuple[int, int]:
        """Where a whole token begins and ends with the white space that it takes; the text before `begin` is taken."""
        if whole in self._stripping_left:
            start = begin + len(text[begin:start].rstrip(_SPACES))
        if whole in self._stripping_right:
            while end < len(text) and text[end] in _SPACES:
                end += 1
        return start, end

    def _whole_tokens(self, pattern: re.Pattern[str], text: str, literal_at: frozenset[int]) -> Iterator[re.Match[str]]:
        """Like `pattern.finditer`, without tokens that begin at a literal character, searched window by window."""
        position = 0
        while position < len(text):
            window_end = position + self._window_characters
            # A token that begins in the window is found whole; one that begins after it is left to the next window.
            found = pattern.search(text, position, window_end + self._longest_whole - 1)
            if found is None or found.start() >= window_end:
                position = window_end
            elif found.start() in literal_at:
                position = found.start() + 1
            else:
                yield found
                position = found.end()

    def _encode_whole(self, text: str, literal_at: Sequence[int]) -> Segmented:
        """Encodes the text in one piece, because the ids of a part depend on the whole."""
        whole = set(self._ids_by_whole.values())
        ids: list[int] = []
        cuts: list[tuple[int, int]] = []
        self._count(text)
        for token, start, end in self._broken(text, literal_at):
            ids.append(token)
            if token in whole:
                cuts += [(start, len(ids) - 1), (end, len(ids))]
        return _segmented(ids, cuts)

    def _broken(self, text: str, literal_at: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """The tokens of `text`, each with its first character and its end. A character that no token merges with breaks
        the texts of tokens that are literal; its own tokens are left out."""
        bounds = (0, *(at + 1 for at in literal_at), len(text))
        breaks = [at + 1 + number for number, at in enumerate(literal_at)]
        encoding = self._tokenizer.encoding(_BREAK.join(text[slice(*piece)] for piece in pairwise(bounds)))
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            num_breaks = bisect_left(breaks, start)
            if end != start + 1 or breaks[num_breaks : num_breaks + 1] != [start]:
                yield token, start - num_breaks, end - num_breaks

    def _segment(
        self, text: str, tenant: bytes, before: str = "", literal_at: tuple[int, ...] = ()
    ) -> list[int] | array[int]:
        if len(text) < _MIN_CACHED_CHARACTERS:
            return self._encoded_after(before, text, literal_at) if text else []
        key = tenant, text, before, literal_at
        with self._lock:
            known = self._cached.get(key)
            if known is not None:
                self._cached.move_to_end(key)
                return known
        ids = array("I", self._encoded_after(before, text, literal_at))
        with self._lock:
            if key not in self._cached:
                self._cached[key] = ids
                self._num_characters += _num_counted(text, literal_at)
            while self._num_characters > self._max_cached_characters:
                (_, oldest, _, its_literal_at), _ = self._cached.popitem(last=False)
                self._num_characters -= _num_counted(oldest, its_literal_at)
        return ids

    def _encoded_after(self, before: str, text: str, literal_at: Sequence[int]) -> list[int]:
        self._count(text)
        if literal_at:
            ids = [token for token, _, _ in self._broken(before + text, [len(before) + at for at in literal_at])]
        else:
            ids = self._tokenizer.encode(before + text)
        return ids[1:] if before else ids

    def _count(self, text: str) -> None:
        with self._lock:
            self._num_tokenised += len(text)


def _num_counted(text: str, literal_at: Sequence[int]) -> int:
    """The characters that a cached segment counts as: its positions of literal characters take memory, too."""
    return len(text) + _CHARACTERS_PER_LITERAL * len(literal_at)


def _segmented(ids: list[int], cuts: list[tuple[int, int]]) -> Segmented:
    return Segmented(tuple(ids), tuple(character for character, _ in cuts), tuple(token for _, token in cuts))


def _pattern(whole: tuple[WholeToken, ...]) -> re.Pattern[str] | None:
    """Finds whole tokens like the library, longest first; None if the text of some of them is not enough to find
    them."""
    if not whole or len(whole) > _MAX_WHOLE_TOKENS or not all(token.is_plain for token in whole):
        return None
    strips = any(token.strips_left or token.strips_right for token in whole)
    if strips and any(token.text != token.text.strip(_SPACES) for token in whole):
        return None  # one may take the space that another begins with
    return re.compile(_any_of(sorted({token.text for token in whole} - {""})))


def _any_of(texts: Sequence[str]) -> str:
    """A pattern of any of `texts`, which are sorted, the longest that matches. Common beginnings are tried once: with
    thousands of tokens that begin alike, one alternative after another takes long at every such character."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], texts[-1], strict=False))
    shared = "".join(first for first, _ in pairs)
    rests = [text[len(shared) :] for text in texts]
    is_whole = rests[0] == ""
    branches = [_any_of(list(group)) for _, group in groupby(rests[is_whole:], key=itemgetter(0))]
    tail = "" if not branches else f"(?:{'|'.join(branches)})"
    return re.escape(shared) + (f"{tail}?" if is_whole and tail else tail)
