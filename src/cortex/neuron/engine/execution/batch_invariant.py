"""Batch-invariant steps: the result for a token depends on its own sequence only, not on the rest of the batch.

Libraries and kernels choose how they split a sum by the shape of the batch. So the same row gives slightly different
values in different batches, and in a prompt or a response. Here every batch has the same shape: the tokens of a step,
of prompts and responses alike, are cut into blocks of a fixed size, and the last one is padded. The kernels that read
`Batch.batch_invariant` do the rest. A CPU computes one token at a time, as a decode step of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.execution.inputs import StepInputs
from cortex.neuron.engine.kv.pages import PADDING_PAGE
from cortex.neuron.engine.scheduling.step_plan import RowPlan
from cortex.neuron.kernels.batch import Batch, PictureVectors, PrefillRow, prefill_tiles
from cortex.neuron.kernels.jit import has_kernels

BLOCK_TOKENS: Final = 128
"""On a GPU. A GEMM with this many rows still takes about as long as reading the matrix does."""

Upload = Callable[[NDArray[Any]], Tensor]


def block_tokens(device: torch.device) -> int:
    """The number of tokens that this device computes at a time."""
    return BLOCK_TOKENS if device.type == "cuda" else 1


class Part(NamedTuple):
    """Consecutive tokens of one row in a block: `num_tokens` from position `start`, at `first` in the step."""

    row: int
    start: int
    num_tokens: int
    first: int


def cut(rows: Sequence[RowPlan], size: int) -> list[list[Part]]:
    """The tokens of a step in blocks of `size`, the last one maybe shorter. Pure."""
    blocks: list[list[Part]] = []
    room = first = 0
    for row in rows:
        done = 0
        while done < row.count:
            if not room:
                blocks.append([])
                room = size
            count = min(room, row.count - done)
            blocks[-1].append(Part(row.row, row.start + done, count, first))
            done, first, room = done + count, first + count, room - count
    return blocks


def batches(
    rows: Sequence[RowPlan],
    size: int,
    inputs: StepInputs,
    tokens: Tensor,
    tables: Sequence[Tensor],
    upload: Upload,
    pictures: PictureVectors | None = None,
) -> Iterator[tuple[Batch, int]]:
    """Each block of a step, and how many of its tokens are not padding. `tokens`: those of the step, on the device.

    `tables`: the page tables of each KV group, whose last row is the padding row. Blocks must be computed in order:
    later ones attend to earlier.
    """
    make = _padded if has_kernels(tokens) else _single
    for block in cut(rows, size):
        count, first = sum(part.num_tokens for part in block), block[0].first
        batch = make(block, size, inputs, tokens, tables, upload)
        if pictures is not None:
            batch = replace(batch, pictures=pictures.within(first, first + count))
        yield batch, count


def _padded(
    block: Sequence[Part], size: int, inputs: StepInputs, tokens: Tensor, tables: Sequence[Tensor], upload: Upload
) -> Batch:
    begin, end = block[0].first, block[-1].first + block[-1].num_tokens
    padding = size - (end - begin)
    counts = [*(part.num_tokens for part in block), *[1] * padding]
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    row_ids = [*(part.row for part in block), *[len(tables[0]) - 1] * padding]
    starts = [*(part.start for part in block), *[0] * padding]
    lengths = np.array(starts) + counts
    slots, *others = upload(np.pad(inputs.slots[:, begin:end], ((0, 0), (0, padding)), constant_values=PADDING_PAGE))
    return Batch(
        tokens=F.pad(tokens[begin:end], (0, padding)),
        positions=upload(np.pad(inputs.positions[begin:end], (0, padding))),
        slots=slots,
        rows=upload(np.array(row_ids, dtype=np.int64)),
        lengths=upload(lengths.astype(np.int32)),
        page_table=tables[0],
        num_decodes=0,
        max_length=int(lengths.max()),
        prefills=tuple(map(PrefillRow, row_ids, starts, counts, offsets[:-1].tolist())),
        prefill_offsets=upload(offsets.astype(np.int32)),
        prefill_tiles=upload(prefill_tiles(counts)),
        batch_invariant=True,
        rope=None if inputs.rope is None else upload(np.pad(inputs.rope[begin:end], (0, padding))),
    ).with_groups(others, tables[1:])


def _single(
    block: Sequence[Part], size: int, inputs: StepInputs, tokens: Tensor, tables: Sequence[Tensor], upload: Upload
) -> Batch:
    (part,) = block
    assert size == part.num_tokens == 1
    here = slice(part.first, part.first + 1)
    slots, *others = upload(inputs.slots[:, here])
    return Batch(
        tokens=tokens[here],
        positions=upload(inputs.positions[here]),
        slots=slots,
        rows=upload(np.array([part.row])),
        lengths=upload(np.array([part.start + 1], dtype=np.int32)),
        page_table=tables[0],
        num_decodes=1,
        max_length=part.start + 1,
        batch_invariant=True,
        rope=None if inputs.rope is None else upload(inputs.rope[here]),
    ).with_groups(others, tables[1:])


def in_blocks(function: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """`function` of every row of x, which sees `size` rows at a time. x: [rows, …] → [rows, …]"""
    parts = []
    for block in x.split(size):
        padding = size - len(block)
        parts.append(function(F.pad(block, (0, 0, 0, padding)))[: len(block)])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
