"""Fingerprints of prompt prefixes, and a bounded record of the places that they were sent to."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import OrderedDict
from itertools import pairwise

MAX_PREFIX_BYTES = 4 << 20
"""About a million tokens. Longer prefixes are indistinguishable here."""
BYTES_PER_TOKEN = 4
_SMALLEST_BLOCK = 256
_BLOCKS_PER_DOUBLING = 64
"""A block is at most 1/64 of what precedes it: a prefix is known to within 1.6 %, by a few hundred fingerprints."""

HOST_WORTH = 0.8
"""What a token in host memory saves of the time to compute it: copying takes a sixth on a fast bus, more on others, and
a part of the pages may have been dropped."""

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
    if len(prompt) < _SMALLEST_BLOCK:
        return ()
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

    A prefix is on the device, or in the host memory of a place whose model left the device since (`moved_to_host`).

    Mutable; owned by one loop. It records where prompts went, not what is still cached there: a preference, not a
    guarantee.
    """

    def __init__(self, max_blocks_per_place: int = 65536) -> None:
        self._max_blocks = max_blocks_per_place
        self._blocks: dict[str, OrderedDict[int, bool]] = {}
        """Whether each block is on the device."""

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def record(self, blocks: Blocks, place: str) -> None:
        """`place` is about to compute the prompt that begins with `blocks`."""
        recent = self._blocks.setdefault(place, OrderedDict())
        for block in reversed(blocks):  # a prefix is dropped from its end: the rest is of use without it
            recent[block] = True
            recent.move_to_end(block)
        while len(recent) > self._max_blocks:
            recent.popitem(last=False)

    def num_cached_tokens(self, blocks: Blocks, place: str) -> int:
        """About how many leading tokens `place` need not compute. Those in host memory count less, by what it costs to
        copy them: `HOST_WORTH`.

        Where a block is known, so are those before it, and where it is on the device, so are they: `record` and what
        it drops keep it so. So the ends are found by bisection, without a look at every block."""
        seen = self._blocks.get(place)
        if not seen:
            return 0
        count = bisect_left(blocks, True, key=lambda block: block not in seen)
        num_on_device = bisect_left(blocks, True, hi=count, key=lambda block: not seen.get(block))
        num_bytes = EDGES[num_on_device] + HOST_WORTH * (EDGES[count] - EDGES[num_on_device])
        return int(num_bytes) // BYTES_PER_TOKEN

    def moved_to_host(self, place: str) -> None:
        """The model left the device of `place`, which keeps what it had computed in host memory."""
        for block in self._blocks.get(place, ()):
            self._blocks[place][block] = False

    def forget(self, place: str) -> None:
        """`place` unloaded the model or restarted: its cache is empty."""
        self._blocks.pop(place, None)
