"""Which prompts one replica of a model has seen, so that later turns of a conversation go there. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 256
MAX_BLOCKS = 4096
"""The least recently used blocks beyond this are forgotten."""


class PrefixMemory:
    """Which prefixes one replica has computed. A preference, not a guarantee: the engine may have dropped them."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_known_tokens(self, prompt: Sequence[int]) -> int:
        known = 0
        for block in _blocks_of(prompt):
            if block not in self._blocks:
                break
            known += BLOCK_TOKENS
        return known

    def add(self, prompt: Sequence[int]) -> None:
        for block in _blocks_of(prompt):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)


def _blocks_of(prompt: Sequence[int]) -> list[int]:
    """Chained fingerprints of the leading full blocks."""
    blocks: list[int] = []
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        blocks.append(hash((blocks[-1] if blocks else 0, tuple(prompt[end - BLOCK_TOKENS : end]))))
    return blocks
