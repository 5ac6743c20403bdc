"""One step as plain values, and the draft from which the scheduler makes it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cortex.neuron.engine.kv.page_groups import Holding
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.roofline.step_costs import StepShape
from cortex.neuron.engine.roofline.step_work import StepWork
from cortex.neuron.engine.scheduling.picture_positions import PictureSpan

NewRow = tuple[int, EngineRequest, tuple[int, ...]]
"""(row, request, tokens drawn for it earlier)"""
NewPages = tuple[int, int, int, tuple[int, ...]]
"""(row, KV group, index of the first in the row's page table of the group, pages)"""
PageCopy = tuple[int, int, int]
"""(KV group, source, destination): pages."""
StateCopy = tuple[int, int]
"""(source, destination): slots of recurrent states; the first slots are the rows' own."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The inputs of a row: a token at each of `count` consecutive positions."""

    count: int
    tokens: tuple[int, ...] | None
    """Tokens known to the host. None: the row's latest token, drawn by an earlier step and still only on the device."""
    following: int | None = None
    """The token after these; None if the row draws it."""
    pictures: tuple[PictureSpan, ...] = ()
    """The positions that have vectors of pictures in place of their tokens' embeddings."""
    rope_lag: int = 0
    """By how much the rotation lags behind the first position, after pictures."""


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Log-probabilities of a prompt's own tokens."""

    following: tuple[int, ...]
    """The prompt tokens after the first positions of the row, one for each."""
    num_top: int = 0
    """How many of the most likely tokens are reported at each position."""


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """The outputs of a row. A chunk in the middle of a prompt has none: it only fills pages."""

    draws: int = 0
    """The number of last positions whose next tokens are drawn. If there are several, all but the first contain draft
    tokens; the tokens drawn up to the first wrong draft are accepted."""
    scores: PromptScoring | None = None


class StateCut(NamedTuple):
    """A place inside a row where the step also saves its recurrent state."""

    num_tokens: int
    """The tokens of the row before it: at least one, and not all."""
    slot: int
    """The checkpoint that gets the state."""


LATEST_TOKEN = RowInputs(1, None)
NO_OUTPUT = RowOutputs()
DRAW_ONE = RowOutputs(draws=1)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The part of a step for one sequence, from position `start` on."""

    row: int
    start: int
    inputs: RowInputs
    outputs: RowOutputs = NO_OUTPUT
    writes: bool = True
    """False if the KV of these positions is already in the pages (a fully cached prompt)."""
    decodes: bool = False
    """Whether the row continues a response: its tokens were drawn or drafted."""
    cut: StateCut | None = None

    @property
    def count(self) -> int:
        return self.inputs.count

    @property
    def drafted(self) -> tuple[int, ...]:
        """The draft tokens, which are checked by the draws before them."""
        tokens, draws = self.inputs.tokens, self.outputs.draws
        return tokens[self.count - draws + 1 :] if tokens is not None and draws > 1 else ()

    def num_accepted(self, drawn: Sequence[int]) -> int:
        """How many of the drawn tokens count: those up to the first that is not the draft token after it."""
        for index, token in enumerate(self.drafted):
            if drawn[index] != token:
                return index + 1
        return len(drawn)

    def num_computed(self, num_accepted: int) -> int:
        """The positions that are valid once `num_accepted` of its drawn tokens are. The KV of wrong draft tokens lies
        after them and is overwritten."""
        return self.inputs.count - self.outputs.draws + num_accepted


class NamedBlocks(NamedTuple):
    """KV pages of one group, or recurrent states (`host_pages`)."""

    part: int
    ids: tuple[int, ...]
    """Their places on the device; empty if irrelevant."""
    digests: tuple[Digest, ...]


BlockAction = Literal["name", "keep", "save", "ask", "fetch", "forget"]
"""`save` is `keep` for an idle model, which may take longer."""


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """An order to all ranks of a divided model about their blocks in host memory."""

    action: BlockAction
    blocks: tuple[NamedBlocks, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: everything that another rank would need to run it too."""

    rows: tuple[RowPlan, ...]
    """Rows of one token come first: the kernels treat all of them as decodes."""
    num_singles: int
    new_rows: tuple[NewRow, ...]
    """Rows assigned to sequences with this step."""
    new_pages: tuple[NewPages, ...]
    """Additions to the rows' page tables."""
    page_copies: tuple[PageCopy, ...] = ()
    """Pages to copy before the step: no source is a destination."""
    restores: tuple[StateCopy, ...] = ()
    """Recurrent states to copy before the step: from a checkpoint to a row, or from a row whose tokens may be rejected
    to a slot."""
    saves: tuple[StateCopy, ...] = ()
    """Recurrent states to copy after the step, from a row to a checkpoint. Rows save further ones at their cuts."""
    num_proposals: int | None = None
    """Draft tokens to compute for each row that draws, if the model has a proposer. 0: none, but later steps can
    propose. None: none, and later proposals for these sequences will be poor."""
    captures: bool = False
    """For a divided model: not a step but the capture of the next graph, which all ranks do together."""
    order: BlockOrder | None = None
    """For a divided model: not a step but this order."""

    @property
    def num_tokens(self) -> int:
        return self.num_singles + sum([row.inputs.count for row in self.rows[self.num_singles :]])

    @property
    def written_slots(self) -> Iterator[int]:
        """The slots of recurrent states that the step writes besides the rows' own."""
        yield from (slot for _, slot in (*self.restores, *self.saves))
        yield from (row.cut.slot for row in self.rows if row.cut is not None)

    @property
    def has_drafts(self) -> bool:
        """A row that checks drafts has at least two tokens."""
        return any(row.outputs.draws > 1 for row in self.rows[self.num_singles :])

    @property
    def only_decodes(self) -> bool:
        return all(row.decodes for row in self.rows)


CAPTURE = StepPlan((), 0, (), (), captures=True)


@dataclass(slots=True)
class StepDraft:
    """A step being planned."""

    rows: list[RowPlan] = field(default_factory=list)
    num_tokens: int = 0
    new_rows: list[NewRow] = field(default_factory=list)
    new_pages: list[NewPages] = field(default_factory=list)
    page_copies: list[PageCopy] = field(default_factory=list)
    restores: list[StateCopy] = field(default_factory=list)
    saves: list[StateCopy] = field(default_factory=list)
    being_computed: set[Digest] = field(default_factory=set)
    """Pages that this step fills, and tails that end in them: no other row of the step may read them."""

    def assign_row(self, row: int, request: EngineRequest, drawn: tuple[int, ...], holding: Holding) -> None:
        """The row begins with these pages. `drawn`: tokens drawn for the request earlier."""
        self.new_rows.append((row, request, drawn))
        for group, held in enumerate(holding):
            if held.pages:
                self.new_pages.append((row, group, held.first, tuple(held.pages)))

    def add(self, row: RowPlan) -> None:
        self.rows.append(row)
        self.num_tokens += row.inputs.count

    def finish(self) -> StepPlan | None:
        """The step; None if there is nothing to compute."""
        if not self.rows:
            return None
        singles = [row for row in self.rows if row.inputs.count == 1]
        others = [row for row in self.rows if row.inputs.count > 1] if len(singles) < len(self.rows) else []
        return StepPlan(
            rows=(*singles, *others),
            num_singles=len(singles),
            new_rows=tuple(self.new_rows),
            new_pages=tuple(self.new_pages),
            page_copies=tuple(self.page_copies),
            restores=tuple(self.restores),
            saves=tuple(self.saves),
        )


def step_shape(rows: Sequence[RowPlan], work: StepWork) -> StepShape:
    """The shape of a step of these rows, on which its time depends. `work`: of the model."""
    num_streams = context_tokens = prompt_tokens = 0
    worth = 0.0
    for row in rows:
        count = row.inputs.count
        if row.decodes:
            num_streams += count
            context_tokens += row.start
        else:
            prompt_tokens += count
            worth += work.prompt_worth(row.start, count)
    return StepShape(num_streams, context_tokens, prompt_tokens, worth)
