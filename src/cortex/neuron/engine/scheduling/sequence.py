"""The place of a running request: its row, pages, state slots and progress."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from cortex.neuron.engine.kv.page_groups import Holding
from cortex.neuron.engine.kv.pages import ROOT, Digest, page_digests, tail_digest
from cortex.neuron.engine.kv.recurrent_checkpoints import DecodeCheckpoint
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.scheduling.picture_positions import NO_PICTURES, PicturePositions
from cortex.neuron.engine.scheduling.step_plan import (
    DRAW_ONE,
    LATEST_TOKEN,
    NO_OUTPUT,
    PromptScoring,
    RowInputs,
    RowOutputs,
    RowPlan,
)
from cortex.system.fair_turns import PRIORITY

NO_ROW = -1
PREEMPTIONS_PER_LEVEL = 3


@dataclass(slots=True, eq=False)
class SavedStates:
    """The recurrent states of a sequence; unused without recurrent layers. Written by `SequenceStates` only."""

    shared: int = 0
    """Leading pages shared with an earlier prompt; more than `Sequence.committed` if no state was saved at their
    end."""
    positions: tuple[int, ...] = ()
    """Positions of the prompt where its state will be saved."""
    latest: DecodeCheckpoint | None = None
    """Where the latest state of its response is saved."""
    snapshot: int | None = None
    """The slot to which its state is copied before a row checks draft tokens."""
    is_ahead: bool = False
    """Whether the state of its row includes rejected tokens; then `snapshot` has the valid one."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Written by the scheduler, except `tokens` (by the step loop), `states` and the names of its pages.

    A launched step is in flight until the host reads its results. Until then its tokens exist only on the device. The
    device runs steps in order, so a step may be planned that relies on those in flight.
    """

    request: EngineRequest
    tokens: Ordered[int]
    """The tokens of the prompt and the drawn ones that the host knows. Grows; read-only here."""
    packed: array[int] = field(default_factory=lambda: array("I"))
    """The first of them in 32 bits, for digests."""
    pictures: PicturePositions = NO_PICTURES
    digests: list[Digest] = field(default_factory=list)
    """The digests of its full pages, as the last `digests_of_full_pages` returned them."""
    tail: Digest | None = None
    """Digest of its prompt without the last token, if that ends inside a page after the first (`PromptTails`). Set just
    before admission."""
    states: SavedStates = field(default_factory=SavedStates)

    # Written by the scheduler:
    row: int = NO_ROW
    pages: Holding = ()
    computed: int = 0
    """Positions whose KV is in its pages, by the results read so far."""
    planned: int = 0
    """Positions that steps in flight compute, counted until read, even if the sequence has lost its row."""
    in_flight: int = 0
    """Tokens that steps in flight draw."""
    drew_in_row: bool = False
    """Whether its last token was drawn in its current row."""
    is_token_on_device: bool = False
    """Whether the device knows its last token, because its row drew only that one."""
    committed: int = 0
    """Leading pages whose digests the pool knows."""
    expected_start: int | None = None
    """The expected start of its first chunk when it was first considered."""
    cached: int | None = None
    """Prompt tokens that came from the prefix cache at first admission."""
    leaves_row_at: int = 0
    """The position where it leaves its row, because the rest of a known prefix is being fetched; 0 if not."""
    front_tokens: int = 0
    """Prompt tokens that it computed before it left its row there."""
    preemptions: int = 0
    """How often it lost its row."""

    @property
    def level(self) -> int:
        """The level of its class, raised after preemptions, so that no sequence is preempted forever. Changes only
        while the sequence waits."""
        return min(PRIORITY, self.request.level + self.preemptions // PREEMPTIONS_PER_LEVEL)

    @property
    def length(self) -> int:
        """Tokens of the prompt and drawn so far, including those that only the device knows."""
        return len(self.tokens) + self.in_flight

    @property
    def num_drawn(self) -> int:
        return self.length - len(self.request.prompt)

    @property
    def scheduled(self) -> int:
        """Positions computed or in flight, after which the next step continues."""
        return self.computed + self.planned

    @property
    def remaining(self) -> int:
        """Positions that must be scheduled before the next token can be drawn, or before it leaves its row."""
        return (self.leaves_row_at or self.length) - self.scheduled

    @property
    def awaits_blocks(self) -> bool:
        """Whether it may leave its row before its prompt is computed, to continue after pages that were fetched."""
        if self.leaves_row_at:
            return True
        return bool(self.request.transfer) and not self.drew_in_row and not self.scores_prompt

    @property
    def wants_more(self) -> bool:
        request = self.request
        return len(self.tokens) + self.in_flight - len(request.prompt) < request.max_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still needed, for which every position is computed, cached or
        not."""
        return self.request.prompt_logprobs is not None and len(self.tokens) == len(self.request.prompt)

    def next_row(self, end: int, drafted: tuple[int, ...], *, writes: bool) -> RowPlan:
        """The row that computes the next positions, up to `end`, including draft tokens."""
        start = self.computed + self.planned
        lag = self.pictures.lag(start) if self.request.pictures else 0
        if self.is_token_on_device and end - start == 1 and self.drew_in_row:
            latest = RowInputs(1, None, rope_lag=lag) if lag else LATEST_TOKEN
            return RowPlan(self.row, start, latest, DRAW_ONE, decodes=True)
        if self.drew_in_row:
            tokens = (*self.tokens[start:], *drafted)[: end - start]
            outputs = RowOutputs(draws=1 + end - len(self.tokens))
            return RowPlan(self.row, start, RowInputs(end - start, tokens, rope_lag=lag), outputs, decodes=True)
        following = self.tokens[end] if end < len(self.tokens) else None
        spans = self.pictures.spans(start, end) if self.request.pictures else ()
        inputs = RowInputs(end - start, tuple(self.tokens[start:end]), following, spans, lag)
        return RowPlan(self.row, start, inputs, self._outputs(start, end), writes)

    def _outputs(self, start: int, end: int) -> RowOutputs:
        draws = int(end == len(self.tokens))
        following = tuple(self.request.prompt[start + 1 : end + 1]) if self.scores_prompt else ()
        if not following:
            return DRAW_ONE if draws else NO_OUTPUT
        return RowOutputs(draws, PromptScoring(following, self.request.prompt_logprobs or 0))

    def digests_of_full_pages(self, page_tokens: int) -> list[Digest]:
        """Digests of every full page of the known tokens, extended as tokens arrive; empty for a request without prefix
        cache."""
        if not self.request.uses_prefix_cache:
            return self.digests
        done = len(self.digests) * page_tokens
        if len(self.tokens) - done >= page_tokens:
            parent = self.digests[-1] if self.digests else self.request.tenant or ROOT
            salts: tuple[bytes, ...] = ()
            if self.request.pictures and done < self.request.pictures[-1].end:
                ends = range(done + page_tokens, len(self.tokens) + 1, page_tokens)
                salts = tuple(self.pictures.salt(end - page_tokens, end) for end in ends)
            self.packed.extend(self.tokens[len(self.packed) :])
            self.digests += page_digests(parent, self.packed[done:], page_tokens, salts)
        return self.digests

    def name_tail(self, page_tokens: int) -> None:
        """Sets `tail`, if the prompt has a full page before it. The digests of its full pages must be known."""
        if not self.request.uses_prefix_cache:
            return
        prompt, pictures = self.request.prompt, self.request.pictures
        last = len(prompt) - 1
        num_pages, rest = divmod(last, page_tokens)
        if self.tail is None and num_pages and rest and not (pictures and pictures[-1].end > last):
            salt = self.pictures.salt(last - rest, last) if pictures else b""
            self.tail = tail_digest(self.digests[num_pages - 1], prompt[last - rest : last], salt)
