"""Draft tokens that are computed on the device, after the draw of a step and before the host reads it.

The proposer absorbs the tokens of the step and those that were drawn after them. Then it continues each row that drew,
one token at a time, from the last drawn token that was accepted. Later steps recompute positions beyond the accepted
ones, so nothing of a rejected token remains. The model's output does not depend on proposals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.execution.graphs import DRAFT_SIZES, Capture, GraphSizes, Outputs, SizedGraphs
from cortex.neuron.engine.execution.inputs import StepInputs
from cortex.neuron.engine.kv.pages import PADDING_PAGE
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.greedy import argmax
from cortex.neuron.layers.parallel import ParallelGroup
from cortex.neuron.models.proposer import Proposer

Upload = Callable[[NDArray[Any]], Tensor]
ABSORB_SIZES = (1, *DRAFT_SIZES)
EXTEND_SIZES = (1, 2, 4, 8, 16, 32)


class Proposals:
    """Drafts tokens with a proposer. Belongs to the engine thread."""

    def __init__(
        self,
        proposer: Proposer,
        page_table: Tensor,
        page_tokens: int,
        context_tokens: int,
        hidden: tuple[int, torch.dtype],
        upload: Upload,
        capture: Capture | None,
        *,
        has_axes: bool = False,
    ) -> None:
        """`page_table`: of the first KV group. `hidden`: the size and dtype of the model's hidden states. `capture`:
        how passes are captured as graphs; None: they are not. `has_axes`: whether rotations follow the axes of
        pictures."""
        self._proposer = proposer
        self._page_table = page_table
        self._page_tokens = page_tokens
        self._context_tokens = context_tokens
        self._upload = upload
        self._has_axes = has_axes and proposer.starts_from_hidden
        self._absorbing: _Graphs | None = None
        self._extending: _Graphs | None = None
        if capture is not None:
            size, dtype = hidden
            absorbed, extended = (GraphSizes(sizes[-1], sizes) for sizes in (ABSORB_SIZES, EXTEND_SIZES))
            shared = (dtype, page_table, capture, proposer.group)
            self._absorbing = _Graphs(self._absorb_step, 6, absorbed, size, *shared)
            self._extending = _Graphs(self._extend_step, 5, extended, proposer.carried_size, *shared)

    @property
    def graphs(self) -> list[SizedGraphs]:
        return [graphs for graphs in (self._absorbing, self._extending) if graphs is not None]

    def run(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        tokens: Tensor,
        batch: Callable[[], Batch],
        drawn: Tensor | None,
        hidden: Tensor,
        page_ends: NDArray[np.int64],
    ) -> Tensor | None:
        """The draft tokens of the rows that draw, `plan.num_proposals` each; None if there are none.

        `tokens`: of the step, on the device. `batch`: makes the batch of the step. `drawn`: the tokens that were drawn.
        `hidden`: see `Proposer.absorb`. `page_ends`: the positions that the pages of each row reach."""
        following = self._upload(following_tokens(plan, inputs))
        if drawn is not None:
            following[self._upload(inputs.last)] = drawn
        count = plan.num_proposals or 0
        proposed: Tensor | None = None
        if self._absorbing is not None and plan.only_decodes and self._absorbing.fits(len(tokens)):
            owners = np.repeat(inputs.rows, np.diff(inputs.offsets))
            rotated = inputs.positions if inputs.rope is None else inputs.rope
            given = self._upload(np.stack((owners, inputs.positions, inputs.slots[0], rotated)))
            carried, proposed = self._absorbing.replay(torch.cat((given, tokens[None], following[None])), hidden)
        else:
            carried = self._proposer.absorb(following, hidden, replace(batch(), tokens=tokens, groups=()))
        if not count or drawn is None:
            return None
        rows, picked, draws = self._accepted(plan, inputs, tokens, drawn)
        limits = self._upload(page_ends[rows])
        positions = self._upload(inputs.positions)[picked] + 1
        rope = positions if inputs.rope is None else self._upload(inputs.rope)[picked] + 1
        row_ids, latest = self._upload(rows), drawn[draws]
        carried = carried[picked]
        found: list[Tensor] = []
        if self._proposer.starts_from_hidden:
            latest = argmax(self._proposer.logits(carried))[0] if proposed is None else proposed[picked]
            found.append(latest)
        while len(found) < count:
            integers = torch.stack((row_ids, positions, limits, rope, latest))
            if self._extending is not None and self._extending.fits(len(rows)):
                carried, latest = (output.clone() for output in self._extending.replay(integers, carried))
            else:
                carried, latest = self._extend_step(integers, carried)
            found.append(latest)
            positions, rope = positions + 1, rope + 1
        return torch.stack(found, dim=1)

    def _accepted(
        self, plan: StepPlan, inputs: StepInputs, tokens: Tensor, drawn: Tensor
    ) -> tuple[NDArray[np.int64], Tensor, Tensor]:
        """The rows that draw, each with the index of its last accepted position in the step and the index of the token
        drawn there among the draws."""
        counts = np.array([row.outputs.draws for row in plan.rows if row.outputs.draws])
        rows = np.array([row.row for row in plan.rows if row.outputs.draws])
        firsts = np.concatenate((np.zeros(1, np.int64), counts.cumsum()[:-1]))
        draws, last = self._upload(firsts), self._upload(inputs.last)
        if counts.max() > 1:
            steps = np.arange(counts.max() - 1)
            is_checked = self._upload(steps < (counts - 1)[:, None])
            places = np.minimum(firsts[:, None] + steps, len(inputs.last) - 2)
            checking = self._upload(places)
            is_right = (drawn[checking] == tokens[last[checking + 1]]) & is_checked
            draws = draws + is_right.long().cumprod(dim=1).sum(dim=1)
        return rows, last[draws], draws

    def _absorb_step(self, integers: Tensor, hidden: Tensor) -> Outputs:
        """In graphs. integers: rows, positions, slots, positions of the rotation, tokens and following tokens."""
        rows, positions, slots, rope, tokens, following = integers.unbind()
        batch = self._batch(tokens, rows, positions, slots, rope, shares_rows=True)
        carried = self._proposer.absorb(following, hidden, batch)
        if not self._proposer.starts_from_hidden:
            return carried, following
        return carried, argmax(self._proposer.logits(carried))[0]

    def _extend_step(self, integers: Tensor, carried: Tensor) -> Outputs:
        """integers: rows, positions, the ends of the rows' pages, positions of the rotation, and tokens. Values without
        a page are dropped."""
        rows, positions, limits, rope, tokens = integers.unbind()
        positions, rope = (each.clamp(max=self._context_tokens - 1) for each in (positions, rope))
        pages = self._page_table[rows, positions // self._page_tokens].long()
        slots = torch.where(positions < limits, pages * self._page_tokens + positions % self._page_tokens, PADDING_PAGE)
        carried = self._proposer.extend(tokens, carried, self._batch(tokens, rows, positions, slots, rope))
        return carried, argmax(self._proposer.logits(carried))[0]

    def _batch(
        self, tokens: Tensor, rows: Tensor, positions: Tensor, slots: Tensor, rope: Tensor, *, shares_rows: bool = False
    ) -> Batch:
        return Batch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            rows=rows,
            lengths=(positions + 1).to(torch.int32),
            page_table=self._page_table,
            num_decodes=len(rows),
            max_length=self._context_tokens,
            shares_rows=shares_rows,
            rope=rope if self._has_axes else None,
        )


class _Graphs(SizedGraphs):
    """Graphs of one pass of a proposer: its inputs are integers, [count, rows], the first being the row in the page
    table, and what is carried, [rows, size]."""

    def __init__(
        self,
        step: Callable[[Tensor, Tensor], Outputs],
        num_integers: int,
        sizes: GraphSizes,
        columns: int,
        dtype: torch.dtype,
        page_table: Tensor,
        capture: Capture,
        group: ParallelGroup,
    ) -> None:
        super().__init__(sizes, capture, group, page_table.device)
        self._run = step
        self._num_integers = num_integers
        self._columns = columns
        self._dtype = dtype
        self._padding_row = len(page_table) - 1

    def replay(self, integers: Tensor, carried: Tensor) -> Outputs:
        """For a number of rows that `fits`. The outputs are valid until the next replay, in stream order."""
        count = len(carried)
        captured = self._serving(count)
        memory, states = captured.inputs
        memory[0].fill_(self._padding_row)
        memory[1:].zero_()
        memory[:, :count].copy_(integers)
        states[:count].copy_(carried)
        captured.graph.replay(count)
        return tuple(output[:count] for output in captured.outputs)

    def _inputs(self, size: int) -> tuple[Tensor, ...]:
        memory = torch.zeros((self._num_integers, size), dtype=torch.int64, device=self._device)
        memory[0] = self._padding_row
        return memory, torch.zeros((size, self._columns), dtype=self._dtype, device=self._device)

    def _step(self, *inputs: Tensor) -> Outputs:
        integers, carried = inputs
        return self._run(integers, carried)


def following_tokens(plan: StepPlan, inputs: StepInputs) -> NDArray[np.int64]:
    """The token after each token of a step, if the host knows it; 0 if it is drawn."""
    following = np.append(inputs.tokens[1:], 0)
    for row, end in zip(plan.rows, inputs.offsets[1:], strict=True):
        following[end - 1] = row.inputs.following or 0
    return following
