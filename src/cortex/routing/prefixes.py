"""Fingerprints of prompt prefixes, and a bounded record of the places that they were sent to."""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

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
"""The ends of a prompt's blocks, the same for every prompt; block `n` is between edges `n` and `n + 1`."""


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


class CachedPrefix(NamedTuple):
    """The approximate number of leading tokens of a prompt that a place need not compute."""

    device_tokens: int = 0
    host_tokens: int = 0
    """Those that are copied from host memory first."""


NOTHING_CACHED = CachedPrefix()


@dataclass(slots=True)
class _PlaceBlocks:
    """The blocks of one place, the least recently used first. A block is on the device or in host memory; the host's
    copy of one that is on the device is not recorded."""

    device: OrderedDict[int, None] = field(default_factory=OrderedDict)
    host: OrderedDict[int, None] = field(default_factory=OrderedDict)
    device_bytes: int = 0
    host_bytes: int = 0

    def use(self, block: int) -> None:
        if block in self.device:
            self.device.move_to_end(block)
            return
        num_bytes = _num_bytes(block)
        if block in self.host:
            del self.host[block]
            self.host_bytes -= num_bytes
        self.device[block] = None
        self.device_bytes += num_bytes

    def leave_device(self) -> None:
        """The least recently used block is in host memory from now on, as the latest there."""
        block, _ = self.device.popitem(last=False)
        num_bytes = _num_bytes(block)
        self.device_bytes -= num_bytes
        self.host[block] = None
        self.host_bytes += num_bytes

    def drop(self) -> None:
        """The least recently used block is dropped, of those in host memory if there are any."""
        if self.host:
            self.host_bytes -= _num_bytes(self.host.popitem(last=False)[0])
        else:
            self.device_bytes -= _num_bytes(self.device.popitem(last=False)[0])


def _num_bytes(block: int) -> int:
    number = block & 0xFFFF
    return EDGES[number + 1] - EDGES[number]


class PrefixRecord:
    """The places (nodes, or replicas in a node) to which prefixes of one model were sent. Bounded per place; the least
    recently used are dropped.

    A prefix is on the device of a place, or in its host memory since it left the device: with the model
    (`moved_to_host`), or because the device holds no more (`limit`).

    Mutable; owned by one loop. It knows what is still cached only from the amounts that places report: a preference,
    not a guarantee.
    """

    def __init__(self, max_blocks_per_place: int = 65536) -> None:
        self._max_blocks = max_blocks_per_place
        self._places: dict[str, _PlaceBlocks] = {}

    def __len__(self) -> int:
        return sum(len(each.device) + len(each.host) for each in self._places.values())

    def __contains__(self, place: str) -> bool:
        """Whether anything is recorded of `place`."""
        return place in self._places

    def record(self, blocks: Blocks, place: str) -> None:
        """`place` is about to compute the prompt that begins with `blocks`."""
        recent = self._places.get(place)
        if recent is None:
            recent = self._places[place] = _PlaceBlocks()
        for block in reversed(blocks):  # a prefix is dropped from its end: the rest is of use without it
            recent.use(block)
        while len(recent.device) + len(recent.host) > self._max_blocks:
            recent.drop()

    def cached(self, blocks: Blocks, place: str) -> CachedPrefix:
        """What `place` has of the prompt that begins with `blocks`.

        If a block is known or on the device, so are those before it, because they were used later, and the least
        recently used leaves first. So the ends are found by bisection."""
        seen = self._places.get(place)
        if seen is None:
            return NOTHING_CACHED
        device, host = seen.device, seen.host
        num_on_device = bisect_left(blocks, True, key=lambda block: block not in device)
        count = num_on_device
        if host:
            count = bisect_left(blocks, True, lo=count, key=lambda block: block not in device and block not in host)
        num_bytes = EDGES[num_on_device]
        return CachedPrefix(num_bytes // BYTES_PER_TOKEN, (EDGES[count] - num_bytes) // BYTES_PER_TOKEN)

    def most(self, blocks: Blocks, is_usable: Callable[[str], bool]) -> tuple[str, int]:
        """The usable place that has the most of the prompt that begins with `blocks`, and how many tokens; 0: none has
        any."""
        found = ((sum(self.cached(blocks, place)), place) for place in self._places if is_usable(place))
        num_tokens, place = max(found, default=(0, ""))
        return place, num_tokens

    def moved_to_host(self, place: str) -> None:
        """The model left the device of `place`, which keeps what it had computed in host memory."""
        if (recent := self._places.get(place)) is not None:
            while recent.device:
                recent.leave_device()

    def limit(self, place: str, device_tokens: int | None, host_tokens: int | None) -> None:
        """The device and the host memory of `place` hold this many tokens of the model; None: that is not known."""
        recent = self._places.get(place)
        if recent is None:
            return
        if device_tokens is not None:
            while recent.device_bytes > device_tokens * BYTES_PER_TOKEN:
                recent.leave_device()
        if host_tokens is not None:
            while recent.host_bytes > host_tokens * BYTES_PER_TOKEN:
                recent.drop()
        if not (recent.device or recent.host):
            del self._places[place]

    def forget(self, place: str) -> None:
        """`place` unloaded the model or restarted: its cache is empty."""
        self._places.pop(place, None)
