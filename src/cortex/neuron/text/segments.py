"""Tokenising long prompts without doing the same work every turn.

An agent sends its whole conversation again with each turn. Text is always cut around whole tokens such as `<|im_end|>`,
so what lies between two of them has the same ids wherever it stands, and is remembered. Up to such a cut a prompt's
tokens cannot change, whatever comes after.
"""

from __future__ import annotations

import re
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from tokenizers import AddedToken

from cortex.neuron.text.tokenizer import Tokenizer

_MAX_REMEMBERED_CHARACTERS: Final = 8 << 20
_MIN_REMEMBERED_CHARACTERS: Final = 256
"""Shorter segments are tokenised faster than they are looked after."""
_MAX_WHOLE_TOKENS: Final = 1024
"""Beyond that, looking for them in Python costs more than it saves."""


@dataclass(frozen=True, slots=True)
class Segmented:
    """A text's ids, and where it was cut: `cut_tokens[i]` ids precede character `cut_characters[i]`."""

    ids: tuple[int, ...]
    cut_characters: tuple[int, ...]
    cut_tokens: tuple[int, ...]

    def cut_before(self, character: int) -> int:
        """The number of tokens up to the last cut at or before `character`; 0 if there is none."""
        found = bisect_right(self.cut_characters, character)
        return self.cut_tokens[found - 1] if found else 0


class SegmentEncoder:
    """Encodes exactly as `tokenizer.encode` does. Safe to share between threads; its memory is bounded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        whole = tokenizer.backend.get_added_tokens_decoder()
        self._ids_by_whole = {token.content: i for i, token in whole.items()}
        self._pattern = _pattern(list(whole.values())) if tokenizer.is_context_free else None
        self._remembered: OrderedDict[str, array[int]] = OrderedDict()
        self._num_characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> Segmented:
        return self._encode_whole(text) if self._pattern is None else self._encode_segments(self._pattern, text)

    def _encode_segments(self, pattern: re.Pattern[str], text: str) -> Segmented:
        ids: list[int] = []
        cuts: list[tuple[int, int]] = []
        position = 0
        for found in pattern.finditer(text):
            ids += self._segment(text[position : found.start()])
            cuts.append((found.start(), len(ids)))
            ids.append(self._ids_by_whole[found.group()])
            cuts.append((found.end(), len(ids)))
            position = found.end()
        ids += self._segment(text[position:])
        return _segmented(ids, cuts)

    def _encode_whole(self, text: str) -> Segmented:
        encoding = self._tokenizer.encoding(text)
        whole = self._tokenizer.whole_ids
        cuts: list[tuple[int, int]] = []
        for i, (token, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
            if token in whole:
                cuts += [(start, i), (end, i + 1)]
        return _segmented(encoding.ids, cuts)

    def _segment(self, text: str) -> list[int] | array[int]:
        if len(text) < _MIN_REMEMBERED_CHARACTERS:
            return self._tokenizer.encode(text) if text else []
        with self._lock:
            known = self._remembered.get(text)
            if known is not None:
                self._remembered.move_to_end(text)
                return known
        ids = array("I", self._tokenizer.encode(text))
        with self._lock:
            if text not in self._remembered:
                self._remembered[text] = ids
                self._num_characters += len(text)
            while self._num_characters > _MAX_REMEMBERED_CHARACTERS:
                oldest, _ = self._remembered.popitem(last=False)
                self._num_characters -= len(oldest)
        return ids


def _segmented(ids: list[int], cuts: list[tuple[int, int]]) -> Segmented:
    return Segmented(tuple(ids), tuple(character for character, _ in cuts), tuple(token for _, token in cuts))


def _pattern(whole: list[AddedToken]) -> re.Pattern[str] | None:
    """Finds whole tokens as the library does, longest first; None where they do more than stand for themselves."""
    if not whole or len(whole) > _MAX_WHOLE_TOKENS:
        return None
    if any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in whole):
        return None
    contents = sorted((token.content for token in whole), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, contents)))
