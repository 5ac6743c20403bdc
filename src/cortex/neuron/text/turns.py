"""Where turns end in a rendered prompt, in tokens.

A hybrid model's state can be reused only where a checkpoint was kept, and only if the next request begins with exactly
the same tokens up to there. So a turn's end counts when it lies at a token that text is always cut around: nothing that
comes after it, not another answer nor a stripped thought, can change the tokens before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Encoding


def stable_positions(encoding: Encoding, text: str, ends: Iterable[int], whole_ids: frozenset[int]) -> tuple[int, ...]:
    """Token positions at or just before the characters `ends` of `text` where a prefix is safe to keep, rising."""
    ids = encoding.ids
    positions = {_cut_before(encoding, ids, len(text), end, whole_ids) for end in ends}
    return tuple(sorted(positions - {0}))


def _cut_before(encoding: Encoding, ids: list[int], num_characters: int, end: int, whole_ids: frozenset[int]) -> int:
    position = _token_at(encoding, len(ids), num_characters, end)
    while position > 0 and not (ids[position - 1] in whole_ids or (position < len(ids) and ids[position] in whole_ids)):
        position -= 1
    return position


def _token_at(encoding: Encoding, num_tokens: int, num_characters: int, character: int) -> int:
    """The first token that reaches past `character`."""
    for candidate in range(character, min(character + 16, num_characters)):  # white space may belong to no token
        token = encoding.char_to_token(candidate)
        if token is not None:
            return token
    if character >= num_characters:
        return num_tokens
    return next((i for i, (_, end) in enumerate(encoding.offsets) if end > character), num_tokens)
