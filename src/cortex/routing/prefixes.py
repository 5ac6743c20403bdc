"""Fingerprints of prompt prefixes, and a bounded record of the places that they were sent to."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from itertools import pairwise

MAX_PREFIX_BYTES = 4 << 20
"""About a million tokens. Longer prefixes are indistinguishable here."""
BYTES_PER_TOKEN = 4
_SMALLEST_BLOCK = 256
_BLOCKS_PER_DOUBLING = 64
"""A block is at most 1/64 of what precedes it: a prefix is known to within 1.6 %, by a few hundred fingerprints."""

Blocks = tuple[int, ...]


def _edges() -> tuple[int, ...]:
    edges = [0]
    while edges[-1] < MAX_PREFIX_BYTES:
        edges.append(edges[-1] + max(_SMALLEST_BLOCK, edges[-1] // _BLOCKS_PER_DOUBLING))
    return tuple(edges[:-1])


EDGES = _edges()
"""Where the blocks of a prompt end. They are the same for every prompt; block `n` is between edges `n` and `n + 1`."""


def leading_blocks(prompt: bytes) -> Blocks:
    """Chained fingerprints of the leading full blocks of a prompt. Equal fingerprints almost certainly mean an equal
    prefix, which is enough for a preference."""
    fingerprints = []
    fingerprint = 0
    view = memoryview(prompt)
    for number, (start, end) in enumerate(pairwise(EDGES)):
        if end > len(prompt):
            break
        fingerprint = zlib.crc32(view[start:end], fingerprint)
        fingerprints.append(fingerprint << 16 | number)
    return tuple(fingerprints)


class PrefixRecord:
    """Which prefixes of one model were sent where: to which nodes, or to which replicas in a node. Bounded for each
    place; the least recently used are dropped.

    Mutable; owned by one loop. It records where prompts went, not what is still cached there: a preference, not a
    guarantee.
    """

    def __init__(self, max_blocks_per_place: int = 65536) -> None:
        self._max_blocks = max_blocks_per_place
        self._blocks: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def record(self, blocks: Blocks, place: str) -> None:
        """`place` is about to compute the prompt that begins with `blocks`."""
        recent = self._blocks.setdefault(place, OrderedDict())
        for block in reversed(blocks):  # a prefix is dropped from its end: the rest is of use without it
            recent[block] = None
            recent.move_to_end(block)
        while len(recent) > self._max_blocks:
            recent.popitem(last=False)

    def num_cached_tokens(self, blocks: Blocks, place: str) -> int:
        """About how many leading tokens `place` has computed."""
        seen = self._blocks.get(place)
        if not seen:
            return 0
        count = 0
        for block in blocks:
            if block not in seen:
                break
            count += 1
        return EDGES[count] // BYTES_PER_TOKEN

    def forget(self, place: str) -> None:
        """`place` unloaded the model or restarted: its cache is empty."""
        self._blocks.pop(place, None)
