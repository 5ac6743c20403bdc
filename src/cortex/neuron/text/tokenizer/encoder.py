"""The interface of everything that tokenises text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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


@dataclass(frozen=True, slots=True)
class TextsToEncode:
    """Documents, or pairs of a query and a document."""

    texts: tuple[str, ...]
    queries: tuple[str, ...] = ()
    """One for each text; empty: the texts are not pairs."""
    max_tokens: int | None = None
    """Longer texts are cut off; of a pair, the longer part. None: nothing is cut off."""
    from_left: bool = False
    adds_special: bool = True
    """With the begin and end tokens that the model was trained with."""
    literal: tuple[tuple[tuple[int, int], ...], ...] = ()
    """For each text, its parts in which no control token begins: their first characters and their ends. Empty: texts
    and pairs are read with their control tokens."""


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    ids: Sequence[Sequence[int]]
    first_segments: Sequence[int] = ()
    """For pairs: the tokens of the first segment; 0 if the tokenizer does not distinguish the two."""


class TextEncoder(Protocol):
    """Safe to share between threads. It may wait for another process: do not call it on the event loop."""

    @property
    def num_tokenised(self) -> int:
        """Characters of prompts that were tokenised so far; parts that were known cost nothing."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, including control tokens in it; adds no token."""

    def encode_document(self, text: str) -> list[int]:
        """Ids of a document, with the begin and end tokens that the model was trained with."""

    def encode_texts(self, texts: TextsToEncode) -> EncodedTexts:
        """Ids of several documents or pairs. Not from several threads at once."""

    def encode_segmented(self, text: str, literal_at: Sequence[int] = (), tenant: bytes = b"") -> Segmented:
        """Like `encode`, with the positions of cuts around whole tokens; parts of a long text that the same tenant sent
        before cost little. At the characters `literal_at`, ascending, no whole token begins."""


class NoEncoder:
    """The encoder of a process that does not tokenise: a caller has confused the processes."""

    num_tokenised = 0

    def encode(self, text: str) -> list[int]:
        raise AssertionError(
            f"this process does not tokenise; send the {len(text)} characters to the process that does"
        )

    def encode_document(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_texts(self, texts: TextsToEncode) -> EncodedTexts:
        return EncodedTexts([self.encode("".join(texts.texts))])

    def encode_segmented(self, text: str, literal_at: Sequence[int] = (), tenant: bytes = b"") -> Segmented:
        del literal_at, tenant
        return Segmented(tuple(self.encode(text)), (), ())
