"""A step's inputs on the host: the position of each token, and the slot of its KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cortex.neuron.engine.pages import PADDING_PAGE
from cortex.neuron.engine.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Arrays over a plan's rows, and over its tokens in row order."""

    rows: NDArray[np.int64]
    lengths: NDArray[np.int32]
    """Positions that each row attends to, including its own tokens."""
    offsets: NDArray[np.int64]
    """[rows + 1]: where each row's tokens begin."""
    tokens: NDArray[np.int64]
    """Zero for tokens that were drawn on the device, at `drawn_before`."""
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    """[KV groups, tokens]"""
    drawn_before: NDArray[np.int64]
    last: NDArray[np.int64]
    """The tokens that are drawn after: the last ones of each row that draws."""

    @classmethod
    def of(cls, plan: StepPlan, pages: Sequence[NDArray[np.int32]], page_tokens: int) -> StepInputs:
        """`pages`: the rows' page tables in each KV group, including this plan's new pages."""
        num_rows = len(plan.rows)
        rows = np.fromiter((row.row for row in plan.rows), np.int64, num_rows)
        counts = np.fromiter((row.count for row in plan.rows), np.int64, num_rows)
        starts = np.fromiter((row.start for row in plan.rows), np.int64, num_rows)
        offsets = np.concatenate((np.zeros(1, np.int64), counts.cumsum()))
        positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, counts)
        owners, columns = np.repeat(rows, counts), positions // page_tokens
        page = np.stack([table[owners, columns] for table in pages]).astype(np.int64)
        slots = page * page_tokens + positions % page_tokens
        tokens = np.zeros(offsets[-1], dtype=np.int64)
        for index, row in enumerate(plan.rows):
            if row.inputs.tokens is not None:
                tokens[offsets[index] : offsets[index + 1]] = row.inputs.tokens
            if not row.writes:
                slots[:, offsets[index] : offsets[index + 1]] = PADDING_PAGE
        draws = np.fromiter((row.outputs.draws for row in plan.rows), np.int64, num_rows)
        is_last = np.arange(offsets[-1]) >= np.repeat(offsets[1:] - draws, counts)
        on_device = np.fromiter((row.inputs.tokens is None for row in plan.rows), bool, num_rows)
        return cls(
            rows=rows,
            lengths=(starts + counts).astype(np.int32),
            offsets=offsets,
            tokens=tokens,
            positions=positions,
            slots=slots,
            drawn_before=offsets[:-1][on_device],
            last=is_last.nonzero()[0],
        )
