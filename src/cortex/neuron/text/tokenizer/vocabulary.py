"""A model's tokens, without the rules for tokenising: a value that can be sent between processes.

Building it takes the library, and a second for a large vocabulary. Receiving it takes a millisecond, because the bytes
of all tokens are one blob.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

_BOUNDS: Final = struct.Struct("<II")
_BOUND_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class WholeToken:
    """A token at which text is always split: the tokens before it do not depend on the text after it."""

    id: int
    text: str
    is_special: bool
    """Whether it is a control token, which is not part of a response's text."""
    is_plain: bool
    """Whether it is found by its own text alone, anywhere."""
    strips_left: bool = False
    """Whether it includes the white space before it."""
    strips_right: bool = False
    """Whether it includes the white space after it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens and their bytes. Immutable and safe to share between threads."""

    spellings: bytes
    """The bytes of all tokens, concatenated."""
    bounds: bytes
    """Where each token begins in `spellings`, and where the last ends: 32 bits each, little-endian."""
    whole_tokens: tuple[WholeToken, ...]
    named_tokens: Mapping[str, str]
    """`bos_token`, `eos_token` and similar: variables that chat templates expect."""
    eos_ids: tuple[int, ...]
    """Ids that end a generation, from the model's own files, in their order."""
    is_context_free: bool
    """Whether a text between two whole tokens has the same ids everywhere."""
    characters_per_token: int | None
    """The most characters of a text that one token covers; None if there is no bound."""
    silent_characters: str
    """Characters without a token: they vanish, so that bound does not count them."""

    @property
    def size(self) -> int:
        """One more than the largest id; a model's embedding may have more rows than that."""
        return len(self.bounds) // _BOUND_BYTES - 1

    @property
    def control_texts(self) -> frozenset[str]:
        """The texts of control tokens: those declared as such, those that end or begin a text, and `<|…|>`."""
        named = {*self.named_tokens.values()}
        return frozenset(
            token.text
            for token in self.whole_tokens
            if token.text
            and (
                token.is_special
                or token.id in self.eos_ids
                or token.text in named
                or (token.text.startswith("<|") and token.text.endswith("|>"))
            )
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, perhaps part of a character; empty for an id outside the vocabulary."""
        place = token_id * _BOUND_BYTES
        if not 0 <= place < len(self.bounds) - _BOUND_BYTES:
            return b""
        start, end = _BOUNDS.unpack_from(self.bounds, place)
        return self.spellings[start:end]


def joined(each_spelling: Sequence[bytes]) -> tuple[bytes, bytes]:
    """`spellings` and `bounds` of a vocabulary, from the bytes of each token in the order of ids."""
    bounds = list(accumulate(map(len, each_spelling), initial=0))
    return b"".join(each_spelling), struct.pack(f"<{len(bounds)}I", *bounds)
