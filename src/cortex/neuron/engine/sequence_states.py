"""Where the recurrent states of running sequences are saved and restored. Pure: it plans copies between slots."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from cortex.neuron.engine.pages import Digest
from cortex.neuron.engine.recurrent_checkpoints import DecodeCheckpoint, RecurrentCheckpoints, checkpoint_positions
from cortex.neuron.engine.sequence import Sequence
from cortex.neuron.engine.step_plan import StepDraft


class SequenceStates:
    """The part of scheduling that only models with recurrent layers need; without checkpoints it does nothing.

    Such a model cannot continue from its pages alone: a prefix is usable up to a position with a saved state.
    """

    def __init__(self, checkpoints: RecurrentCheckpoints | None, page_tokens: int) -> None:
        self._checkpoints = checkpoints
        self._page_tokens = page_tokens

    def usable(self, sequence: Sequence, counts: Ordered[int]) -> int:
        """The largest of `counts` after which the sequence can continue: counts of cached pages, ascending."""
        if self._checkpoints is None:
            return counts[-1]
        # The last token is always computed, so a state that includes it is of no use.
        most = (len(sequence.tokens) - 1) // self._page_tokens
        known = (count for count in reversed(counts) if count <= most and self._is_known(sequence, count))
        return next(known, 0)

    def _is_known(self, sequence: Sequence, num_pages: int) -> bool:
        checkpoints = self._checkpoints
        return checkpoints is not None and num_pages > 0 and checkpoints.knows(sequence.digests[num_pages - 1])

    def admit(self, sequence: Sequence, draft: StepDraft) -> None:
        """Restores the state after the sequence's cached pages, and decides where its own states will be saved."""
        checkpoints = self._checkpoints
        if checkpoints is None:
            return
        if sequence.committed:
            draft.restores.append((checkpoints.use(sequence.digests[sequence.committed - 1]), sequence.row))
        positions = checkpoint_positions(
            sequence.request.checkpoint_at,
            sequence.scheduled,
            len(sequence.tokens),
            self._page_tokens,
            checkpoints.spacing_tokens,
        )
        sequence.checkpoints = tuple(
            position for position in positions if checkpoints.lacks(sequence.digests[position // self._page_tokens - 1])
        )

    def prefill(self, sequence: Sequence, draft: StepDraft) -> None:
        """After a chunk of the prompt: saves the state if the chunk ends at a checkpoint."""
        if self._checkpoints is None or sequence.scheduled not in sequence.checkpoints:
            return
        slot = self._checkpoints.keep(sequence.digests[sequence.scheduled // self._page_tokens - 1])
        if slot is not None:
            draft.saves.append((sequence.row, slot))

    def decode(self, sequence: Sequence, draft: StepDraft) -> None:
        """After a decoded token: at the end of a page, the state replaces the one saved a page earlier."""
        num_pages, rest = divmod(sequence.scheduled, self._page_tokens)
        if self._checkpoints is None or rest:
            return
        checkpoint = sequence.decode_checkpoint
        slot = self._checkpoints.lend() if checkpoint is None else checkpoint.slot
        if slot is not None:
            sequence.decode_checkpoint = DecodeCheckpoint(slot, num_pages)
            draft.saves.append((sequence.row, slot))

    def release(self, sequence: Sequence) -> None:
        """The sequence leaves its row: its latest state becomes reusable under the digest of its prefix."""
        if sequence.decode_checkpoint is not None:
            digests = sequence.digests_of_full_pages(self._page_tokens)
            self._end_decode_checkpoint(sequence, next(iter(digests[sequence.decode_checkpoint.num_pages - 1 :]), None))

    def retract(self, sequence: Sequence, touched: Iterable[Digest]) -> None:
        """Forgets the states that a failed step was to save."""
        if self._checkpoints is not None:
            self._checkpoints.forget(touched)
            checkpoint = sequence.decode_checkpoint
            if checkpoint is not None and checkpoint.num_pages * self._page_tokens == sequence.scheduled:
                self._end_decode_checkpoint(sequence, None)

    def distrust(self, sequence: Sequence, digests: Iterable[Digest]) -> None:
        """Forgets every state of the sequence."""
        if self._checkpoints is not None:
            self._checkpoints.forget(digests)
            self._end_decode_checkpoint(sequence, None)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the lent slots are those that `sequences` hold."""
        if self._checkpoints is not None:
            held = [sequence.decode_checkpoint for sequence in sequences]
            self._checkpoints.check_integrity(checkpoint.slot for checkpoint in held if checkpoint is not None)

    def _end_decode_checkpoint(self, sequence: Sequence, digest: Digest | None) -> None:
        """`digest` names the prefix of the state; None: the state is not reusable."""
        if self._checkpoints is not None and sequence.decode_checkpoint is not None:
            self._checkpoints.take_back(sequence.decode_checkpoint.slot, digest)
            sequence.decode_checkpoint = None
