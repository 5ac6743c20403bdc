"""The index of blocks in host memory. Pure: the memory belongs to `SlabMemory`.

A block is one KV page over the layers of a group, or one recurrent state. It is found by its kind and by the digest of
its prefix (`pages.page_digests`): a chain of 128-bit hashes over every token from the first on. A kind names the
weights by their content, so blocks of other weights are never found.

Memory comes in slabs of blocks of one kind, which are filled in order and dropped as a whole, the least recently used
first. Blocks of one conversation are written together, so little is lost with a slab that was not used for long.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cortex.neuron.engine.kv.pages import TENANT_BYTES, Digest

SLAB_BYTES = 64 << 20
MIN_SLABS = 16
"""A budget holds at least this many slabs, so that dropping one loses little."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Blocks that can take each other's place."""

    model: bytes
    """The fingerprint of weights and layout."""
    part: int
    """The KV group, or the number of groups for recurrent states."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ChosenBlocks:
    """An operator's selection of blocks: those that match every given field."""

    model_id: str | None = None
    tenants: tuple[bytes, ...] = ()
    """Prefixes of their digests; empty: all."""

    def of_model(self, model_id: str) -> bool:
        return self.model_id in (None, model_id)

    def has(self, digest: Digest) -> bool:
        return not self.tenants or any(digest.startswith(each[:TENANT_BYTES]) for each in self.tenants)


class BlockPlace(NamedTuple):
    slab: int
    slot: int


class SlabMemory(Protocol):
    """The memory of slabs, by number."""

    def allocate(self, slab: int, num_bytes: int) -> bool:
        """Returns False if there is no memory now."""
        ...

    def free(self, slab: int) -> None: ...


@dataclass(slots=True, eq=False)
class _Slab:
    number: int
    kind: BlockKind
    num_slots: int
    num_taken: int = 0
    slots: dict[Digest, int] = field(default_factory=dict)
    """Digest → slot of each complete block."""
    checksums: dict[Digest, int] = field(default_factory=dict)
    """Digest → checksum of each block that is verified."""
    num_copies: int = 0
    """Copies in progress to and from the slab, which must not be dropped meanwhile."""
    saved: set[Digest] = field(default_factory=set)
    """Digests of blocks that are on disk or being written."""

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.kind.num_bytes


class HostPages:
    """One for all models of a device. Belongs to the engine thread, except `num_bytes`, which any thread may read."""

    def __init__(self, memory: SlabMemory, budget_bytes: int = 0) -> None:
        self._memory = memory
        self._budget_bytes = budget_bytes
        self._slabs: OrderedDict[int, _Slab] = OrderedDict()
        """The least recently used first."""
        self._slab_of: dict[tuple[BlockKind, Digest], _Slab] = {}
        self._filling: dict[BlockKind, _Slab] = {}
        self._num_blocks: Counter[BlockKind] = Counter()
        self._next_number = 0
        self.num_bytes = 0
        """Bytes of all slabs."""

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    def __len__(self) -> int:
        return len(self._slab_of)

    def limit(self, budget_bytes: int) -> None:
        """Sets the budget, and drops the least recently used slabs that exceed it."""
        self._budget_bytes = budget_bytes
        self.shrink(budget_bytes)

    def shrink(self, num_bytes: int) -> None:
        """Drops the least recently used slabs, except those being copied, until the rest takes `num_bytes`."""
        for slab in list(self._slabs.values()):
            if self.num_bytes <= num_bytes:
                return
            if not slab.num_copies:
                self._drop(slab)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def has(self, kind: BlockKind, digest: Digest) -> bool:
        return (kind, digest) in self._slab_of

    def num_blocks(self, kind: BlockKind) -> int:
        return self._num_blocks[kind]

    def kinds(self, model: bytes) -> list[BlockKind]:
        return [kind for kind in self._num_blocks if kind.model == model]

    def blocks(self) -> list[tuple[BlockKind, Digest]]:
        return list(self._slab_of)

    def borrow(self, kind: BlockKind, digests: Iterable[Digest], *, uses: bool = True) -> list[BlockPlace]:
        """The places of blocks that `has` confirmed, pinned until `end`. They count as used, the first block last,
        unless they leave."""
        places = []
        slabs: dict[int, None] = {}
        for digest in digests:
            slab = self._slab_of[kind, digest]
            slab.num_copies += 1
            slabs[slab.number] = None
            places.append(BlockPlace(slab.number, slab.slots[digest]))
        for number in reversed(slabs) if uses else ():
            self._slabs.move_to_end(number)
        return places

    def unsaved(self, share: float) -> Iterator[tuple[BlockKind, list[Digest]]]:
        """Unsaved blocks, slab by slab, in the least recently used slabs: those that are dropped if `share` of the
        budget is reused."""
        left = self.num_bytes - self._budget_bytes + int(self._budget_bytes * share)
        for slab in list(self._slabs.values()):
            if left <= 0:
                return
            left -= slab.num_bytes
            if len(slab.saved) < len(slab.slots):  # asked in every step: the blocks are not looked at one by one
                found = [digest for digest in slab.slots if digest not in slab.saved]
                yield slab.kind, sorted(found, key=slab.slots.__getitem__)

    def is_saved(self, kind: BlockKind, digest: Digest) -> bool:
        """Whether the block is on disk or being written."""
        slab = self._slab_of.get((kind, digest))
        return slab is not None and digest in slab.saved

    def saved(self, kind: BlockKind, digests: Iterable[Digest], *, is_saved: bool = True) -> None:
        """Marks blocks as on disk or being written; or as not saved after all."""
        for digest in digests:
            if (slab := self._slab_of.get((kind, digest))) is not None:
                slab.saved.add(digest) if is_saved else slab.saved.discard(digest)

    def reserve(self, kind: BlockKind, count: int) -> list[BlockPlace]:
        """Places for up to `count` new blocks, each reserved until `publish` or `end`. Drops slabs when the budget is
        full."""
        places: list[BlockPlace] = []
        while len(places) < count:
            slab = self._filling.get(kind) or self._add(kind)
            if slab is None:
                break
            slab.num_copies += 1
            places.append(BlockPlace(slab.number, slab.num_taken))
            slab.num_taken += 1
            if slab.num_taken == slab.num_slots:
                del self._filling[kind]
        return places

    def publish(self, kind: BlockKind, digest: Digest, place: BlockPlace, checksum: int | None = None) -> None:
        """The copy to a reserved place is complete: the block can be found from now on. `checksum`: of its contents, if
        blocks are verified."""
        slab = self._slabs[place.slab]
        if (kind, digest) not in self._slab_of:
            slab.slots[digest] = place.slot
            if checksum is not None:
                slab.checksums[digest] = checksum
            self._slab_of[kind, digest] = slab
            self._num_blocks[kind] += 1
        self._slabs.move_to_end(place.slab)
        self.end([place])

    def checksum(self, kind: BlockKind, digest: Digest) -> tuple[BlockPlace, int] | None:
        """The place and checksum of a verified block; None if there is none."""
        slab = self._slab_of.get((kind, digest))
        if slab is None or digest not in slab.checksums:
            return None
        return BlockPlace(slab.number, slab.slots[digest]), slab.checksums[digest]

    def end(self, places: Sequence[BlockPlace]) -> None:
        """The copies to or from these places have ended. Slabs that they kept alive above a lowered budget are
        dropped."""
        for place in places:
            self._slabs[place.slab].num_copies -= 1
        if self.num_bytes > self._budget_bytes:
            self.shrink(self._budget_bytes)

    def forget(self, kind: BlockKind, digests: Iterable[Digest]) -> None:
        """Removes these blocks."""
        for digest in digests:
            slab = self._slab_of.pop((kind, digest), None)
            if slab is not None:
                del slab.slots[digest]
                slab.checksums.pop(digest, None)
                slab.saved.discard(digest)
                self._num_blocks[kind] -= 1

    # -- slabs -----------------------------------------------------------------------------------------------------

    def _add(self, kind: BlockKind) -> _Slab | None:
        num_slots = max(1, min(SLAB_BYTES, self._budget_bytes // MIN_SLABS) // kind.num_bytes)
        num_bytes = num_slots * kind.num_bytes
        if num_bytes > self._budget_bytes:
            return None
        number = self._taken_over(num_bytes)
        if number is None:
            self.shrink(self._budget_bytes - num_bytes)
            number = self._next_number
            if self.num_bytes + num_bytes > self._budget_bytes or not self._memory.allocate(number, num_bytes):
                return None
            self._next_number += 1
            self.num_bytes += num_bytes
        slab = self._slabs[number] = self._filling[kind] = _Slab(number, kind, num_slots)
        return slab

    def _taken_over(self, num_bytes: int) -> int | None:
        """Reuses the slab that would be dropped next, because page-locking memory takes longer than filling it. None if
        nothing must be dropped, or if that slab has another size."""
        if not self.num_bytes <= self._budget_bytes < self.num_bytes + num_bytes:
            return None
        oldest = next((slab for slab in self._slabs.values() if not slab.num_copies), None)
        if oldest is None or oldest.num_bytes != num_bytes:
            return None
        self._clear(oldest)
        return oldest.number

    def _drop(self, slab: _Slab) -> None:
        self._clear(slab)
        self.num_bytes -= slab.num_bytes
        self._memory.free(slab.number)

    def _clear(self, slab: _Slab) -> None:
        """Removes a slab's blocks and keeps its memory."""
        del self._slabs[slab.number]
        if self._filling.get(slab.kind) is slab:
            del self._filling[slab.kind]
        for digest in slab.slots:
            del self._slab_of[slab.kind, digest]
        self._num_blocks[slab.kind] -= len(slab.slots)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is in one slab, and the slabs are within the budget."""
        found = {(slab.kind, digest): slab for slab in self._slabs.values() for digest in slab.slots}
        assert found == self._slab_of, "the maps of blocks disagree"
        assert +self._num_blocks == Counter(kind for kind, _ in found), "blocks are counted wrongly"
        assert self.num_bytes == sum(slab.num_bytes for slab in self._slabs.values()), "bytes are counted wrongly"
        assert self.num_bytes <= self._budget_bytes or any(slab.num_copies for slab in self._slabs.values()), (
            "more than the budget is held"
        )
        for slab in self._slabs.values():
            assert slab.saved <= slab.slots.keys(), "a block that is not there counts as saved"
            assert len(set(slab.slots.values())) == len(slab.slots), "two blocks are at one place"
            assert all(slot < slab.num_taken <= slab.num_slots for slot in slab.slots.values()), "a place is not taken"
        assert all(self._slabs[slab.number] is slab for slab in self._filling.values()), "a dropped slab is filled"
