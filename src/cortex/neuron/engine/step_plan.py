"""One step as plain values, and the draft that the scheduler makes it from. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from cortex.neuron.engine.pages import Digest
from cortex.neuron.engine.request import EngineRequest

NewRow = tuple[int, EngineRequest, tuple[int, ...]]
"""(row, request, tokens drawn for it earlier)"""
NewPages = tuple[int, int, tuple[int, ...]]
"""(row, index of the first in the row's page table, pages)"""
StateCopy = tuple[int, int]
"""(source, destination): slots of recurrent states; the first slots are the rows' own."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What a step computes for one sequence: positions `start` up to `start + count`.

    `tokens` is None for a decode row: an earlier step drew its token, which never left the device.
    """

    row: int
    start: int
    count: int
    tokens: tuple[int, ...] | None
    draws: bool
    """Whether a token is drawn after the last position."""
    writes: bool = True
    """False if the KV of these positions is already in the pages (a fully cached prompt)."""
    scored: tuple[int, ...] = ()
    """The prompt tokens after the first of these positions, one for each, whose log-probabilities are computed."""
    num_likeliest: int = 0
    """How many of the likeliest tokens are reported beside each scored one."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: everything that another rank would need to run it too."""

    rows: tuple[RowPlan, ...]
    """Rows of one token come first: the kernels treat all of them as decodes."""
    num_singles: int
    new_rows: tuple[NewRow, ...]
    """Rows that a sequence gets with this step."""
    new_pages: tuple[NewPages, ...]
    """Additions to the rows' page tables."""
    restores: tuple[StateCopy, ...] = ()
    """Recurrent states to copy before the step, from a checkpoint to a row."""
    saves: tuple[StateCopy, ...] = ()
    """Recurrent states to copy after the step, from a row to a checkpoint."""
    captures: bool = False
    """Of a divided model: no step, but the capture of the next graph, which all ranks do together."""

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


CAPTURE = StepPlan((), 0, (), (), captures=True)


@dataclass(slots=True)
class StepDraft:
    """A step while it is planned."""

    rows: list[RowPlan] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    new_pages: list[NewPages] = field(default_factory=list)
    restores: list[StateCopy] = field(default_factory=list)
    saves: list[StateCopy] = field(default_factory=list)
    being_computed: set[Digest] = field(default_factory=set)
    """Pages that this step fills: no other row of the step may read them."""

    def finish(self) -> StepPlan | None:
        """The step; None if there is nothing to compute."""
        if not self.rows:
            return None
        return StepPlan(
            rows=tuple(sorted(self.rows, key=lambda row: row.count > 1)),
            num_singles=sum(row.count == 1 for row in self.rows),
            new_rows=tuple(self.new_rows),
            new_pages=tuple(self.new_pages),
            restores=tuple(self.restores),
            saves=tuple(self.saves),
        )
