"""GEMMs of a few rows: a program multiplies blocks of rows of the matrix with all rows of x on tensor cores. Where
several programs divide the columns, the one that ends last adds their sums."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.activations import activated
from cortex.neuron.kernels.dense.blocks import small_batch_blocks
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, num_processors, tl, triton
from cortex.neuron.kernels.matrix import Epilogue
from cortex.neuron.kernels.products.small_batch import launch_small_batch, split_sum, store_batch
from cortex.neuron.kernels.shared_memory import loop_over_columns, shared_memory


def small_batch_product(x: Tensor, weight: Tensor, counters: Tensor, epilogue: Epilogue, out: Tensor) -> None:
    """See `Matrix.product`. x: [rows, in], weight: [out, in]; counters: [blocks of COUNTED_ROWS rows], zeros"""
    (rows, inputs), outputs = x.shape, out.shape[1]
    block_rows = max(16, triton.next_power_of_2(rows))
    matrices = 1 if epilogue.activation is None else 2
    blocks = small_batch_blocks(rows, inputs, outputs, num_processors(x.device), gated=matrices == 2)
    column_bytes = (matrices * (blocks.outputs + blocks.more_outputs) + block_rows) * x.element_size()
    block_in, stages = loop_over_columns(blocks.inputs, blocks.stages, column_bytes, shared_memory(x.device))
    tiles, partial = blocks.programs(outputs) // blocks.split, out
    if blocks.split > 1:
        sizes = tiles, blocks.split, matrices * (blocks.outputs + blocks.more_outputs), block_rows
        partial = torch.empty(sizes, dtype=torch.float32, device=x.device)
    launch_small_batch(
        _small_batch_kernel,
        (tiles, blocks.split),
        (x, weight),
        epilogue,
        out,
        (partial, counters),
        INPUTS=inputs,
        ROWS=block_rows,
        BLOCK_IN=block_in,
        BLOCK_OUT=blocks.outputs,
        MORE_OUT=blocks.more_outputs,
        SPLIT=blocks.split,
        num_warps=blocks.warps,
        num_stages=stages,
    )


@jit
def _line(weight, first, column, outputs, HEIGHT: tl.constexpr, MATRICES: tl.constexpr, INPUTS: tl.constexpr):
    """Rows of the matrix: HEIGHT from `first` on, in a gated one as many of the gate's and of up's.
    → (where each is at a column, which exist), both [MATRICES · HEIGHT, 1]"""
    number = tl.arange(0, MATRICES * HEIGHT)[:, None]
    output = first + number % HEIGHT
    here = output + number // HEIGHT * outputs
    return weight + (here.to(tl.int64) * INPUTS + column), output < outputs


@jit
def _add_product(total, tile, value, IS_LEFT: tl.constexpr):
    """IS_LEFT: the rows of x are the left operand, which has 64 rows or more."""
    return tl.dot(value, tl.trans(tile), total) if IS_LEFT else tl.dot(tile, tl.trans(value), total)


@jit
def _finished(total, HEIGHT: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr):
    """→ [HEIGHT, ROWS]"""
    if ACTIVATION:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, HEIGHT, ROWS)), (1, 2, 0)))
        total = activated(gate, up, ACTIVATION)
    return total


@jit(do_not_specialize=["rows"])
def _small_batch_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    partial,
    counters,
    rows,
    outputs,
    out_stride,
    residual_stride,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    MORE_OUT: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One program per BLOCK_OUT and MORE_OUT outputs and one of SPLIT stretches of the columns, all rows of x."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(0)
    part = tl.program_id(1)
    stretch: tl.constexpr = INPUTS // SPLIT
    matrices: tl.constexpr = 2 if ACTIVATION else 1
    is_left: tl.constexpr = ROWS >= 64
    first = block * (BLOCK_OUT + MORE_OUT)
    line, inside = _line(weight, first, part * stretch, outputs, BLOCK_OUT, matrices, INPUTS)
    if MORE_OUT > 0:
        more_line, more_inside = _line(weight, first + BLOCK_OUT, part * stretch, outputs, MORE_OUT, matrices, INPUTS)
    row = tl.arange(0, ROWS)
    source = x + row[:, None] * INPUTS + part * stretch
    if is_left:
        total = tl.zeros((ROWS, matrices * BLOCK_OUT), tl.float32)
    else:
        total = tl.zeros((matrices * BLOCK_OUT, ROWS), tl.float32)
    if MORE_OUT > 0:
        if is_left:
            more = tl.zeros((ROWS, matrices * MORE_OUT), tl.float32)
        else:
            more = tl.zeros((matrices * MORE_OUT, ROWS), tl.float32)
    for start in range(0, stretch, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)[None, :]
        column_inside = column < INPUTS
        x_inside = row[:, None] < rows
        tile_inside = inside
        if INPUTS % BLOCK_IN != 0:
            x_inside = x_inside & column_inside
            tile_inside = tile_inside & column_inside
        tile = tl.load(line + column, mask=tile_inside, other=0.0)
        value = tl.load(source + column, mask=x_inside, other=0.0)
        total = _add_product(total, tile, value, is_left)
        if MORE_OUT > 0:
            more_tile_inside = more_inside
            if INPUTS % BLOCK_IN != 0:
                more_tile_inside = more_tile_inside & column_inside
            more_tile = tl.load(more_line + column, mask=more_tile_inside, other=0.0)
            more = _add_product(more, more_tile, value, is_left)
    if is_left:
        total = tl.trans(total)
    if MORE_OUT > 0 and is_left:
        more = tl.trans(more)
    is_last = True
    if SPLIT > 1:
        place = tl.arange(0, matrices * BLOCK_OUT)[:, None] * ROWS + row[None, :]
        size: tl.constexpr = matrices * (BLOCK_OUT + MORE_OUT) * ROWS
        parts = partial + block * (SPLIT * size)
        if MORE_OUT > 0:
            more_parts = parts + matrices * BLOCK_OUT * ROWS
            more_parts += tl.arange(0, matrices * MORE_OUT)[:, None] * ROWS + row[None, :]
            tl.store(more_parts + part * size, more)
        is_last, total = split_sum(total, parts + place, size, part, None, counters + block, SPLIT)
    if is_last:
        store_batch(
            _finished(total, BLOCK_OUT, ROWS, ACTIVATION), bias, residual, out, first + tl.arange(0, BLOCK_OUT), row,
            rows, outputs, out_stride, residual_stride, BIAS, RESIDUAL,
        )  # fmt: skip
        if MORE_OUT > 0:
            if SPLIT > 1:
                more = tl.zeros_like(more)
                for other in tl.static_range(SPLIT):
                    more += tl.load(more_parts + other * size, cache_modifier=".cg")
            store_batch(
                _finished(more, MORE_OUT, ROWS, ACTIVATION), bias, residual, out,
                first + BLOCK_OUT + tl.arange(0, MORE_OUT), row,
                rows, outputs, out_stride, residual_stride, BIAS, RESIDUAL,
            )  # fmt: skip
