"""Checkpoints of recurrent states: which slot holds the state after which prefix, and where to save states.

A recurrent state is a fold over its tokens, so a prefix can only be reused up to a position whose state was saved.
Pure bookkeeping over slot ids; the memory itself belongs to `memory.sequences.StateMemory`. A slot is known (it
holds, or will hold after the planned step, the state after a prefix with a digest), lent (a running sequence saves its
latest state there) or blank. If none is blank, the least recently used known slot is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cortex.neuron.engine.pages import Digest


@dataclass(frozen=True, slots=True)
class DecodeCheckpoint:
    """The latest saved state of a decoding sequence, from which the next turn can continue after its response."""

    slot: int
    num_pages: int
    """Length of the prefix that the state covers."""


def checkpoint_positions(
    turn_ends: Sequence[int],
    start: int,
    num_tokens: int,
    page_tokens: int,
    spacing_tokens: int,
    *,
    shared_end: int = 0,
    picture_end: int = 0,
) -> tuple[int, ...]:
    """Where to save the state of a prompt that is computed from `start` to `num_tokens`: at page ends before the last
    token, each at least `spacing_tokens` after the previous one, because every stop costs a step.

    Conversations share the first turn. After the last two turns the next request may diverge, because templates
    rewrite the latest turns. The end of the prompt is for requests that only append. At `shared_end` the prompt
    diverges from an earlier one (0: from none), as others may. The end of the last picture (0: there is none) is for
    other questions about it.
    """
    last = num_tokens - 1  # the last token is always computed: the next one is drawn from it
    ends = sorted(end for end in turn_ends if 0 < end <= last)
    wanted = (*ends[:1], *ends[-2:], min(shared_end, last), min(picture_end, last), last)
    kept: list[int] = []
    for position in sorted({end // page_tokens * page_tokens for end in wanted}):
        if position > start and position - start >= spacing_tokens:
            kept.append(position)
            start = position
    return tuple(kept)


class RecurrentCheckpoints:
    """Owns the checkpoint slots of one model. Not thread-safe: it belongs to the engine thread."""

    def __init__(self, first_slot: int, num_slots: int, spacing_tokens: int = 0) -> None:
        self.spacing_tokens = spacing_tokens
        """Fewest tokens of a prompt between two checkpoints."""
        self._slots = range(first_slot, first_slot + num_slots)
        self._blank = list(reversed(self._slots))
        self._lent: set[int] = set()
        self._slot_of: OrderedDict[Digest, int] = OrderedDict()
        """Known slots, the least recently used first."""

    def knows(self, digest: Digest) -> bool:
        """Whether the state after `digest` is saved."""
        return digest in self._slot_of

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    def known(self) -> Iterator[tuple[int, Digest]]:
        """The known slots with their digests, the least recently used first."""
        return ((slot, digest) for digest, slot in self._slot_of.items())

    def lacks(self, digest: Digest) -> bool:
        """Whether saving the state after `digest` would help: it is not known, and there are slots."""
        return bool(self._slots) and digest not in self._slot_of

    def use(self, digest: Digest) -> int:
        """The slot of a known prefix."""
        self._slot_of.move_to_end(digest)
        return self._slot_of[digest]

    def keep(self, digest: Digest) -> int | None:
        """A slot for the state after `digest`; None if the state is known already, or if there is no slot.

        The slot counts as known from now on, so the step that is being planned must copy the state."""
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
            return None
        slot = self._take()
        if slot is not None:
            self._slot_of[digest] = slot
        return slot

    def lend(self) -> int | None:
        """A slot for the latest state of a decoding sequence; None if half of all slots are lent already."""
        if 2 * len(self._lent) >= len(self._slots):
            return None
        slot = self._take()
        if slot is not None:
            self._lent.add(slot)
        return slot

    def take_back(self, slot: int, digest: Digest | None) -> None:
        """Ends a loan. `digest`: the prefix whose state the slot holds; None: the state is not reusable."""
        self._lent.remove(slot)
        if digest is None or digest in self._slot_of:
            self._blank.append(slot)
        else:
            self._slot_of[digest] = slot

    def forget(self, digests: Iterable[Digest]) -> None:
        """Forgets the states after these prefixes."""
        for digest in digests:
            slot = self._slot_of.pop(digest, None)
            if slot is not None:
                self._blank.append(slot)

    def _take(self) -> int | None:
        if self._blank:
            return self._blank.pop()
        if self._slot_of:
            return self._slot_of.popitem(last=False)[1]
        return None

    def check_integrity(self, lent: Iterable[int]) -> None:
        """Raises AssertionError unless every slot is in one state and `lent` are the lent ones."""
        assert sorted(lent) == sorted(self._lent), "lent slots differ from what sequences hold"
        assert sorted([*self._blank, *self._lent, *self._slot_of.values()]) == list(self._slots), (
            "a slot is lost or in two places"
        )
