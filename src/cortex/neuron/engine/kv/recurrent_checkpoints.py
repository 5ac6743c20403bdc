"""Checkpoints of recurrent states: the prefix of each slot, and the positions at which to save states.

A recurrent state is a fold over its tokens, so a prefix can only be reused up to a position whose state was saved.
Pure bookkeeping over slot ids; the memory itself belongs to `memory.sequences.StateMemory`. A slot is known (it
holds, or will hold after the planned step, the state after a prefix with a digest), lent (a running sequence saves its
latest state there) or blank. If none is blank, the least recently used known slot is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cortex.neuron.engine.kv.pages import Digest

CHECKPOINT_SPACING_TOKENS = {"cuda": 256, "cpu": 32}
"""Minimum tokens between checkpoints: a state takes the memory of the KV of a thousand tokens or more, and each one of
a prompt but the last may cost a step."""
RESPONSE_SPACING_TOKENS = {"cuda": 128, "cpu": 32}
"""On a GPU: computing this many tokens takes little longer than computing one page, so states need not be copied at
every page end."""


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
    token, each at least `spacing_tokens` after the previous one, because states take memory, and some cost a step.

    Conversations share the first turn. After the last two turns the next request may diverge, because templates rewrite
    the latest turns. The end of the prompt serves requests that only append. At `shared_end` the prompt diverges from
    an earlier one (0 if none), as others may. The end of the last picture (0 if none) serves other questions about it.
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


def chunk_end(positions: Sequence[int], start: int, end: int, *, cuts_rows: bool) -> int:
    """Where a chunk of a prompt ends that starts at `start` and could reach `end`, if states are to be saved at
    `positions`, which ascend. With `cuts_rows` the chunk can contain one of them, so that two need one step; with an
    even number the first chunk contains none."""
    inside = [position for position in positions if start < position < end]
    if not cuts_rows:
        return inside[0] if inside else end
    return inside[len(inside) % 2] if len(inside) > 1 else end


class RecurrentCheckpoints:
    """Owns the checkpoint slots of one model. Not thread-safe: it belongs to the engine thread."""

    def __init__(
        self,
        first_slot: int,
        num_slots: int,
        spacing_tokens: int = 0,
        response_tokens: int = 1,
        *,
        cuts_rows: bool = True,
    ) -> None:
        self.spacing_tokens = spacing_tokens
        """Fewest tokens of a prompt between two checkpoints."""
        self.response_tokens = response_tokens
        """Fewest tokens of a response between two checkpoints; the first one is at the first end of a page."""
        self.cuts_rows = cuts_rows
        """Whether a step can save one state inside each row, in addition to those at row ends. A batch-invariant step
        cannot, because it computes rows token by token."""
        self._slots = range(first_slot, first_slot + num_slots)
        self._blank = list(reversed(self._slots))
        self._lent: set[int] = set()
        self._slot_of: OrderedDict[Digest, int] = OrderedDict()
        """Known slots, the least recently used first."""
        self._page_end_before: dict[Digest, Digest] = {}
        """A known prefix that ends inside a page → the prefix up to that page."""
        self._promised: set[int] = set()
        """Known slots that the step being planned reads or writes."""

    def begin_step(self) -> None:
        """Begin planning another step."""
        self._promised.clear()

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
        """The known slots of prefixes that end with a page, with their digests, the least recently used first."""
        return ((slot, digest) for digest, slot in self._slot_of.items() if digest not in self._page_end_before)

    def slot_of(self, digest: Digest) -> int | None:
        """The slot of a known prefix."""
        return self._slot_of.get(digest)

    def digests(self) -> list[Digest]:
        """Those of all known prefixes."""
        return list(self._slot_of)

    def lacks(self, digest: Digest) -> bool:
        """Whether saving the state after `digest` would help: it is unknown, and there are slots."""
        return bool(self._slots) and digest not in self._slot_of

    def use(self, digest: Digest) -> int:
        """The slot of a known prefix, reserved for the step being planned, which reads it."""
        self._touch(digest)
        slot = self._slot_of[digest]
        self._promised.add(slot)
        return slot

    def keep(self, digest: Digest, *, page_end: Digest | None = None) -> int | None:
        """A slot for the state after `digest`; None if the state is already known or no slot is available. `page_end`:
        for a prefix that ends inside a page, the prefix up to that page.

        The slot counts as known from now on, so the step that is being planned must copy the state. No other state of
        the same step gets the slot: rows write theirs in no particular order."""
        if digest in self._slot_of:
            self._touch(digest)
            return None
        slot = self._take()
        if slot is not None:
            self._slot_of[digest] = slot
            self._promised.add(slot)
            if page_end is not None:
                self._page_end_before[digest] = page_end
            self._touch(digest)
        return slot

    def _touch(self, digest: Digest) -> None:
        """Makes a known prefix the most recently used, except for the page end before it, without whose state a state
        inside a page is useless."""
        self._slot_of.move_to_end(digest)
        page_end = self._page_end_before.get(digest)
        if page_end is not None and page_end in self._slot_of:
            self._slot_of.move_to_end(page_end)

    @property
    def can_lend(self) -> bool:
        """Whether `lend` has a slot."""
        is_left = bool(self._blank) or any(slot not in self._promised for slot in self._slot_of.values())
        return is_left and 2 * len(self._lent) < len(self._slots)

    def lend(self) -> int | None:
        """A slot for the latest state of a decoding sequence; None if half of all slots are lent already."""
        if not self.can_lend:
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
                self._page_end_before.pop(digest, None)
                self._blank.append(slot)

    def _take(self) -> int | None:
        if self._blank:
            return self._blank.pop()
        for digest, slot in self._slot_of.items():
            if slot not in self._promised:
                del self._slot_of[digest]
                self._page_end_before.pop(digest, None)
                return slot
        return None

    def check_integrity(self, lent: Iterable[int]) -> None:
        """Raises AssertionError unless every slot is in one state and `lent` are the lent ones."""
        assert sorted(lent) == sorted(self._lent), "lent slots differ from what sequences hold"
        assert self._page_end_before.keys() <= self._slot_of.keys(), "a tail has no slot"
        assert sorted([*self._blank, *self._lent, *self._slot_of.values()]) == list(self._slots), (
            "a slot is lost or in two places"
        )
