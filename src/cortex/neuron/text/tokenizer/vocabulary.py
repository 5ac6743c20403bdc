"""What is to be known of a model's tokens short of cutting text into them: a value that travels between processes.

Making it takes the library, and a second for a large vocabulary; taking it over takes a millisecond, since the bytes of
all tokens are one blob.
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
    """A token that text is always cut around: nothing to its left depends on what is to its right."""

    id: int
    text: str
    is_special: bool
    """A control token, which is not part of an answer's text."""
    is_plain: bool
    """It stands for its own letters wherever they are, and for nothing around them."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens and their bytes. Immutable and safe to share between threads."""

    spellings: bytes
    """The bytes of all tokens, one behind the other."""
    bounds: bytes
    """Where in `spellings` each begins, and the last ends: 32 bits each, little-endian."""
    whole_tokens: tuple[WholeToken, ...]
    named_tokens: Mapping[str, str]
    """`bos_token`, `eos_token` and kin: the variables that chat templates expect."""
    eos_ids: tuple[int, ...]
    """Ids that end a generation, from the model's own files, in their order."""
    is_context_free: bool
    """Whether a text between two whole tokens has the same ids wherever it stands."""
    characters_per_token: int | None
    """No token stands for more characters of a text; None where some may stand for any number of them."""
    silent_characters: str
    """Characters without a token, which are not counted for that: they vanish."""

    @property
    def size(self) -> int:
        """One more than the largest id; a model's embedding may have more rows than that."""
        return len(self.bounds) // _BOUND_BYTES - 1

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, perhaps part of a character; none for an id outside the vocabulary."""
        if not 0 <= token_id < self.size:
            return b""
        start, end = _BOUNDS.unpack_from(self.bounds, token_id * _BOUND_BYTES)
        return self.spellings[start:end]


def joined(each_spelling: Sequence[bytes]) -> tuple[bytes, bytes]:
    """`spellings` and `bounds` of a vocabulary whose tokens are spelled so, in the order of their ids."""
    bounds = list(accumulate(map(len, each_spelling), initial=0))
    return b"".join(each_spelling), struct.pack(f"<{len(bounds)}I", *bounds)
