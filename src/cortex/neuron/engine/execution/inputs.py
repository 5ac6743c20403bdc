"""A step's inputs on the host: each token's position and KV slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from cortex.neuron.engine.kv.pages import PADDING_PAGE
from cortex.neuron.engine.scheduling.picture_positions import PictureSpan
from cortex.neuron.engine.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class PictureInputs:
    """The pictures of a step."""

    spans: tuple[PictureSpan, ...]
    index: NDArray[np.int64]
    """[vectors]: the tokens of the step that have a vector of a picture, ascending"""
    offsets: tuple[int, ...]
    """[spans + 1]: where the vectors of each span begin"""
    axes: NDArray[np.int64] | None
    """[3, positions]: where the positions of all spans are in time, rows and columns, for the rotation; None: the
    rotation follows positions"""

    @property
    def counts(self) -> list[tuple[int, int]]:
        """For each span, the first of its picture's vectors and how many of them there are."""
        found = []
        for span, (start, end) in zip(self.spans, pairwise(self.offsets), strict=True):
            before = span.first
            if span.grid.num_tokens > span.grid.num_features:
                before -= span.first // (span.grid.num_tokens // span.grid.rows)  # the ends of rows have no vectors
            found.append((before, end - start))
        return found

    @classmethod
    def of(cls, plan: StepPlan, offsets: NDArray[np.int64], *, has_axes: bool) -> PictureInputs | None:
        spans: list[PictureSpan] = []
        index: list[NDArray[np.int64]] = []
        axes: list[NDArray[np.int64]] = []
        for row, offset in zip(plan.rows, offsets, strict=False):
            for span in row.inputs.pictures:
                here = np.asarray(span.grid.feature_offsets(), dtype=np.int64) - span.first
                spans.append(span)
                index.append(here[(here >= 0) & (here < span.count)] + offset + span.offset)
                if has_axes:
                    place = np.arange(span.first, span.first + span.count)
                    row_of, column_of = np.divmod(place, span.grid.columns)
                    axes.append(span.rope + np.stack((np.zeros_like(place), row_of, column_of)))
        if not spans:
            return None
        bounds = (0, *np.cumsum([len(part) for part in index]).tolist())
        return cls(tuple(spans), np.concatenate(index), bounds, np.concatenate(axes, axis=1) if axes else None)


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
    """The tokens after which tokens are drawn: the last ones of each row that draws."""
    cuts: NDArray[np.int32]
    """[rows, 2]: after how many tokens of each row its recurrent state is also saved (0: nowhere), and the slot"""
    rope: NDArray[np.int64] | None = None
    """The row of the rotations' tables for each token; None: its position."""
    pictures: PictureInputs | None = None
    reach: NDArray[np.int32] | None = None
    """How many positions of its row each token sees, if those of a picture see each other; None: up to itself"""

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        pages: Sequence[NDArray[np.int32]],
        page_tokens: int,
        num_rope_positions: int | None = None,
        *,
        whole_pictures: bool = False,
    ) -> StepInputs:
        """`pages`: the rows' page tables in each KV group, including this plan's new pages. `num_rope_positions`: the
        rows of the rotations' tables, after which come those of pictures; None: pictures have no axes.
        `whole_pictures`: whether the positions of a picture see each other."""
        rows = np.array([row.row for row in plan.rows], np.int64)
        draws = [row.outputs.draws for row in plan.rows]
        if len(plan.rows) == 1:  # a prompt alone waits for this, and few operations take half of the time
            start, count = plan.rows[0].start, plan.rows[0].inputs.count
            lengths, offsets = np.array((start + count,), np.int32), np.array((0, count))
            positions, owners = np.arange(start, start + count), rows
            last = np.arange(count - draws[0], count)
        else:
            counts = np.array([row.inputs.count for row in plan.rows], np.int64)
            starts = np.array([row.start for row in plan.rows], np.int64)
            lengths, offsets = (starts + counts).astype(np.int32), np.zeros(len(rows) + 1, np.int64)
            np.cumsum(counts, out=offsets[1:])
            order = np.arange(offsets[-1])
            positions, owners = order - np.repeat(offsets[:-1] - starts, counts), np.repeat(rows, counts)
            last = (order >= np.repeat(offsets[1:] - np.array(draws), counts)).nonzero()[0]
        columns, places = np.divmod(positions, page_tokens)
        slots = np.empty((len(pages), len(positions)), np.int64)
        for group, table in enumerate(pages):
            slots[group] = table[owners, columns]
        slots *= page_tokens
        slots += places
        tokens, cuts = np.zeros(len(positions), dtype=np.int64), np.zeros((len(rows), 2), dtype=np.int32)
        for index, row in enumerate(plan.rows):
            if row.inputs.tokens is not None:
                tokens[offsets[index] : offsets[index + 1]] = row.inputs.tokens
            if row.cut is not None:
                cuts[index] = row.cut
            if not row.writes:
                slots[:, offsets[index] : offsets[index + 1]] = PADDING_PAGE
        on_device = np.array([row.inputs.tokens is None for row in plan.rows], bool)
        return cls(
            rows=rows,
            lengths=lengths,
            offsets=offsets,
            tokens=tokens,
            positions=positions,
            slots=slots,
            drawn_before=offsets[:-1][on_device],
            last=last,
            cuts=cuts,
            rope=None if num_rope_positions is None else _rope(plan, offsets, positions, num_rope_positions),
            pictures=PictureInputs.of(plan, offsets, has_axes=num_rope_positions is not None),
            reach=_reach(plan, offsets, positions) if whole_pictures else None,
        )


def _reach(plan: StepPlan, offsets: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32] | None:
    if not any(row.inputs.pictures for row in plan.rows):
        return None
    reach = (positions + 1).astype(np.int32)
    for row, offset in zip(plan.rows, offsets, strict=False):
        for span in row.inputs.pictures:
            first = offset + span.offset
            reach[first : first + span.count] = row.start + span.offset + span.count
    return reach


def _rope(
    plan: StepPlan, offsets: NDArray[np.int64], positions: NDArray[np.int64], num_positions: int
) -> NDArray[np.int64]:
    rope, num_placed = positions.copy(), 0
    for row, offset in zip(plan.rows, offsets, strict=False):
        inputs = row.inputs
        if inputs.rope_lag:
            rope[offset : offset + inputs.count] -= inputs.rope_lag
        for span in inputs.pictures:
            end = offset + span.offset + span.count
            rope[end - span.count : end] = num_positions + num_placed + np.arange(span.count)
            rope[end : offset + inputs.count] = positions[end : offset + inputs.count] - span.lag
            num_placed += span.count
    return rope
