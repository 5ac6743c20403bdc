"""Checkpoints of recurrent states: which slot holds the state after which prefix, and where to take them.

A recurrent state is a fold over its tokens, so a prefix can only be reused up to a position where its state was kept.
Pure bookkeeping over slot numbers; the memory itself belongs to `states.StateMemory`. A slot is in one of three
places: known (it holds, or will hold when the planned step is done, the state after a named prefix), lent (a running
sequence keeps its latest state there) or blank. When none is blank, the known one that went unused longest is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cortex.neuron.engine.pages import Digest


@dataclass(frozen=True, slots=True)
class DecodeCheckpoint:
    """The latest state of a sequence that decodes, kept so that the next turn can go on from its answer."""

    slot: int
    num_pages: int
    """The prefix it is the state of."""


def checkpoint_positions(
    turn_ends: Sequence[int], start: int, num_tokens: int, page_tokens: int, spacing_tokens: int
) -> tuple[int, ...]:
    """Where the state of a prompt is kept that is computed from `start` to `num_tokens`: at page ends, none past the
    last token but one, each `spacing_tokens` after the one before, as it costs a step to stop there.

    The first turn is what conversations have in common. The last two are where the next request may part from this
    one, as templates rewrite the latest turns. The end of the prompt serves one that merely goes on.
    """
    last = num_tokens - 1  # the last token is always computed: the next one is drawn from it
    ends = sorted(end for end in turn_ends if 0 < end <= last)
    wanted = (*ends[:1], *ends[-2:], last)
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
        """Tokens of a prompt from one checkpoint to the next, at least."""
        self._slots = range(first_slot, first_slot + num_slots)
        self._blank = list(reversed(self._slots))
        self._lent: set[int] = set()
        self._slot_of: OrderedDict[Digest, int] = OrderedDict()
        """Known slots, those unused longest first."""

    @property
    def num_known(self) -> int:
        return len(self._slot_of)

    def longest(self, digests: Sequence[Digest]) -> int:
        """How many pages the longest prefix with a known state has; `digests` name a sequence's pages in order."""
        return next((count for count in range(len(digests), 0, -1) if digests[count - 1] in self._slot_of), 0)

    def lacks(self, digest: Digest) -> bool:
        """Whether it would be of use to keep the state after `digest`: it is not known, and there are slots."""
        return bool(self._slots) and digest not in self._slot_of

    def use(self, digest: Digest) -> int:
        """The slot of a known prefix."""
        self._slot_of.move_to_end(digest)
        return self._slot_of[digest]

    def keep(self, digest: Digest) -> int | None:
        """A slot to copy the state after `digest` to; known from now on, so it must be copied with this very step.
        None when it is known already, or when there is no slot."""
        if digest in self._slot_of:
            self._slot_of.move_to_end(digest)
            return None
        slot = self._take()
        if slot is not None:
            self._slot_of[digest] = slot
        return slot

    def lend(self) -> int | None:
        """A slot for a sequence's trail; None where half of all slots are lent already."""
        if 2 * len(self._lent) >= len(self._slots):
            return None
        slot = self._take()
        if slot is not None:
            self._lent.add(slot)
        return slot

    def take_back(self, slot: int, digest: Digest | None) -> None:
        """Ends a loan. `digest` names what the slot holds; None: nothing of use."""
        self._lent.remove(slot)
        if digest is None or digest in self._slot_of:
            self._blank.append(slot)
        else:
            self._slot_of[digest] = slot

    def forget(self, digests: Iterable[Digest]) -> None:
        """Makes sure that the states after these prefixes are not used again."""
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
        """Raises AssertionError unless the books agree with the slots that sequences say they were lent."""
        borrowed = list(lent)
        assert sorted(borrowed) == sorted(self._lent), "lent slots differ from what sequences hold"
        assert sorted([*self._blank, *self._lent, *self._slot_of.values()]) == list(self._slots), (
            "a slot is lost or in two places"
        )
