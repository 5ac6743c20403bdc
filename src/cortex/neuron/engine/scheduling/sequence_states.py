"""Saves and restores the recurrent states of running sequences. Pure: it plans copies between slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import replace

from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.kv.recurrent_checkpoints import (
    DecodeCheckpoint,
    RecurrentCheckpoints,
    checkpoint_positions,
    chunk_end,
)
from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.scheduling.step_plan import StateCopy, StateCut, StepDraft


class SequenceStates:
    """The part of scheduling that only models with recurrent layers need; without checkpoints it does nothing.

    Such a model cannot continue from its pages alone: a prefix is usable up to a position with a saved state.
    """

    def __init__(self, checkpoints: RecurrentCheckpoints | None, page_tokens: int) -> None:
        self._checkpoints = checkpoints
        self._page_tokens = page_tokens

    def begin_step(self) -> None:
        """Begin planning another step."""
        if self._checkpoints is not None:
            self._checkpoints.begin_step()

    def usable(
        self, sequence: Sequence, counts: Ordered[int], elsewhere: Callable[[Digest], bool] | None = None
    ) -> int:
        """The largest of `counts` after which the sequence can continue: counts of cached pages, ascending.
        `elsewhere`: whether the state after a prefix is available elsewhere."""
        if self._checkpoints is None:
            return counts[-1]
        sequence.states.shared = counts[-1]
        # The last token is always computed, so a state that includes it is of no use.
        most = (len(sequence.tokens) - 1) // self._page_tokens
        for count in reversed(counts):
            if 0 < count <= most:
                digest = sequence.digests[count - 1]
                if self._checkpoints.knows(digest) or (elsewhere is not None and elsewhere(digest)):
                    return count
        return 0

    def admit(self, sequence: Sequence, draft: StepDraft, *, resumes_tail: bool) -> None:
        """Restores the state after the sequence's cached pages, or after its tail, and decides where its own states
        will be saved."""
        checkpoints = self._checkpoints
        if checkpoints is None or not sequence.request.uses_prefix_cache:
            return
        if sequence.computed:
            position = sequence.computed if resumes_tail else sequence.committed * self._page_tokens
            draft.restores.append((checkpoints.use(self._digest(sequence, position)), sequence.row))
        positions = checkpoint_positions(
            sequence.request.checkpoint_at,
            sequence.scheduled,
            len(sequence.tokens),
            self._page_tokens,
            checkpoints.spacing_tokens,
            shared_end=sequence.states.shared * self._page_tokens,
            picture_end=max((picture.end for picture in sequence.request.pictures), default=0),
        )
        last = len(sequence.request.prompt) - 1
        if len(sequence.tokens) == last + 1:
            # A prompt that came before up to its last page may come again, whatever the spacing of states.
            page_end = last // self._page_tokens * self._page_tokens
            if sequence.computed == page_end and sequence.tail is not None:
                positions = (last,)
            elif sequence.computed < page_end <= sequence.states.shared * self._page_tokens:
                positions = (*(position for position in positions if position < page_end), page_end)
        sequence.states.positions = tuple(
            position for position in positions if checkpoints.lacks(self._digest(sequence, position))
        )

    def _digest(self, sequence: Sequence, position: int) -> Digest:
        """Names the prefix up to a position that is a page end, or the end of the sequence's tail."""
        num_pages, rest = divmod(position, self._page_tokens)
        if not rest:
            return sequence.digests[num_pages - 1]
        assert sequence.tail is not None
        return sequence.tail

    def prefill_end(self, sequence: Sequence, end: int) -> int:
        """The end of the prompt's next chunk, which could reach `end`."""
        if self._checkpoints is None:
            return end
        return chunk_end(sequence.states.positions, sequence.scheduled, end, cuts_rows=self._checkpoints.cuts_rows)

    def prefill(self, sequence: Sequence, draft: StepDraft) -> None:
        """After a chunk of the prompt, the last row of the draft: saves the state where the chunk ends if that is a
        checkpoint, and at the last one inside the chunk."""
        if self._checkpoints is None or not sequence.states.positions:
            return
        row, end = draft.rows[-1], sequence.scheduled
        if end in sequence.states.positions and (slot := self._keep(sequence, end)) is not None:
            draft.saves.append((sequence.row, slot))
        cut = max((position for position in sequence.states.positions if row.start < position < end), default=None)
        if cut is not None and self._checkpoints.cuts_rows and (slot := self._keep(sequence, cut)) is not None:
            draft.rows[-1] = replace(row, cut=StateCut(cut - row.start, slot))

    def _keep(self, sequence: Sequence, position: int) -> int | None:
        assert self._checkpoints is not None
        rest = position % self._page_tokens
        page_end = self._digest(sequence, position - rest) if rest else None
        return self._checkpoints.keep(self._digest(sequence, position), page_end=page_end)

    def num_drafts(self, sequence: Sequence, count: int) -> int:
        """How many of `count` draft tokens the next row may check. There must be a slot for the state before them. The
        row ends where a state is to be saved, because a state after a rejected token is useless."""
        if self._checkpoints is None or count <= 0:
            return count
        states = sequence.states
        if sequence.request.uses_prefix_cache and (states.latest is not None or self._checkpoints.can_lend):
            num_pages = -(-max(sequence.computed + 1, self._next_save(sequence)) // self._page_tokens)
            count = min(count, num_pages * self._page_tokens - sequence.length)
        if count > 0 and states.snapshot is None:
            states.snapshot = self._checkpoints.lend()
        return 0 if states.snapshot is None else max(0, count)

    def before_decode(self, sequence: Sequence, end: int, draft: StepDraft) -> None:
        """Call before a row of a response that reaches up to `end`: ensures that the row's state is the one at its
        start, and keeps it if the row checks draft tokens. Also saves it if due and `decode` could not, because the
        previous row checked draft tokens."""
        if self._checkpoints is None:
            return
        states = sequence.states
        if states.is_ahead:
            assert states.snapshot is not None
            draft.restores.append((states.snapshot, sequence.row))
            states.is_ahead = False
            return
        if end > sequence.length:
            assert states.snapshot is not None
            draft.restores.append((sequence.row, states.snapshot))
        if not sequence.planned:
            self._save(sequence, sequence.computed, draft.restores)

    def rejected(self, sequence: Sequence) -> bool:
        """Draft tokens were rejected. Returns True if the state of the row includes them, so that its tokens must be
        recomputed from the state before them."""
        sequence.states.is_ahead = self._checkpoints is not None
        return sequence.states.is_ahead

    def decode(self, sequence: Sequence, draft: StepDraft) -> None:
        """Call after a row of a response: if its state is due to be saved, it replaces the one saved before, unless the
        row checks draft tokens, because it is not known yet which of them the state includes."""
        if self._checkpoints is not None and draft.rows[-1].outputs.draws == 1:
            self._save(sequence, sequence.scheduled, draft.saves)

    def _next_save(self, sequence: Sequence) -> int:
        """The state of a response is saved at the first end of a page from this position on."""
        held = sequence.states.latest
        if held is None or self._checkpoints is None:
            return 0
        return held.num_pages * self._page_tokens + max(1, self._checkpoints.response_tokens)

    def _save(self, sequence: Sequence, position: int, copies: list[StateCopy]) -> None:
        """Saves the state of the row at `position`, if due."""
        assert self._checkpoints is not None
        num_pages, rest = divmod(position, self._page_tokens)
        if rest or position < self._next_save(sequence) or not sequence.request.uses_prefix_cache:
            return
        checkpoint = sequence.states.latest
        slot = self._checkpoints.lend() if checkpoint is None else checkpoint.slot
        if slot is not None:
            sequence.states.latest = DecodeCheckpoint(slot, num_pages)
            copies.append((sequence.row, slot))

    def release(self, sequence: Sequence) -> None:
        """The sequence leaves its row: its latest state becomes reusable under the digest of its prefix."""
        states = sequence.states
        states.is_ahead = False
        if self._checkpoints is not None and states.snapshot is not None:
            self._checkpoints.take_back(states.snapshot, None)
            states.snapshot = None
        if states.latest is not None:
            digests = sequence.digests_of_full_pages(self._page_tokens)
            self._end_latest(sequence, next(iter(digests[states.latest.num_pages - 1 :]), None))

    def digests(self) -> list[Digest]:
        """Those of all prefixes with a saved state."""
        return [] if self._checkpoints is None else self._checkpoints.digests()

    def forget(self, digests: Iterable[Digest]) -> None:
        """Forgets the states after these prefixes."""
        if self._checkpoints is not None:
            self._checkpoints.forget(digests)

    def retract(self, sequence: Sequence, start: int, touched: Iterable[Digest]) -> None:
        """Forgets the states that a failed step from position `start` would have saved."""
        if self._checkpoints is not None:
            self._checkpoints.forget(touched)
            checkpoint = sequence.states.latest
            if checkpoint is not None and checkpoint.num_pages * self._page_tokens >= start:
                self._end_latest(sequence, None)

    def distrust(self, sequence: Sequence, digests: Iterable[Digest]) -> None:
        """Forgets every state of the sequence."""
        self.forget(digests)
        if self._checkpoints is not None:
            self._end_latest(sequence, None)

    def check_integrity(self, sequences: Iterable[Sequence], incoming: Iterable[int]) -> None:
        """Raises AssertionError unless the lent slots are those that `sequences` hold and those that are fetched."""
        if self._checkpoints is not None:
            held = [slot for sequence in sequences for slot in _lent_to(sequence)]
            self._checkpoints.check_integrity([*held, *incoming])

    def _end_latest(self, sequence: Sequence, digest: Digest | None) -> None:
        """`digest` names the prefix of the state; None: the state is not reusable."""
        if self._checkpoints is not None and sequence.states.latest is not None:
            self._checkpoints.take_back(sequence.states.latest.slot, digest)
            sequence.states.latest = None


def _lent_to(sequence: Sequence) -> list[int]:
    """The slots of checkpoints that a sequence holds."""
    states = sequence.states
    slots = [] if states.latest is None else [states.latest.slot]
    return slots if states.snapshot is None else [*slots, states.snapshot]
