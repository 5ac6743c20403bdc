"""GEMV and small-batch GEMM, as in decode steps. They are bound by the bytes of the matrix, so the norm before
and the gate or addition after are fused into the same pass.

One row: each program reads whole rows of the matrix and sums. The scale of the norm is a common factor of each dot
product and is applied at the end. Several rows: the matrix is the left operand of a tensor-core product, the rows,
padded to 16 or 32, are the right one. The norm is a separate launch: fused, each program would repeat it for all rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import activate_reference, activated, activation_number
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.matrix import Epilogue, Prologue
from cortex.neuron.kernels.norm import rms_norm, rms_norm_reference
from cortex.neuron.kernels.products.one_row import added_to_row
from cortex.neuron.kernels.products.small_batch import launch_small_batch, store_batch
from cortex.neuron.kernels.shared_memory import loop_over_columns, shared_memory


class Blocks(NamedTuple):
    """The tile of one program."""

    outputs: int
    inputs: int
    """Per iteration of the loop."""
    warps: int
    stages: int


def beats_library(rows: int, inputs: int) -> bool:
    """Whether these kernels were measured to be faster than norm, library GEMM and addition in sequence."""
    return rows <= 16 or (rows <= 32 and inputs <= 8192)


def small_product(x: Tensor, weight: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor) -> None:
    """See `Matrix.product`. The prologue has no activation. x: [rows, in], weight: [out, in]"""
    rows, inputs = x.shape
    if rows == 1:
        _one_row_product(x, weight, prologue, epilogue, out)
        return
    if prologue.norm is not None:
        x = rms_norm(x, prologue.norm, prologue.eps)
    block_rows = max(16, triton.next_power_of_2(rows))
    is_gated = epilogue.activation is not None
    blocks = small_batch_blocks(rows, inputs, out.shape[1], gated=is_gated)
    column_bytes = ((1 + is_gated) * blocks.outputs + block_rows) * x.element_size()
    block_in, stages = loop_over_columns(blocks.inputs, blocks.stages, column_bytes, shared_memory(x.device))
    launch_small_batch(
        _small_batch_kernel,
        (triton.cdiv(out.shape[1], blocks.outputs),),
        (x, weight),
        epilogue,
        out,
        INPUTS=inputs,
        ROWS=block_rows,
        BLOCK_IN=block_in,
        BLOCK_OUT=blocks.outputs,
        num_warps=blocks.warps,
        num_stages=stages,
    )


def small_product_reference(x: Tensor, weight: Tensor, prologue: Prologue, epilogue: Epilogue) -> Tensor:
    if prologue.norm is not None:
        x = rms_norm_reference(x, prologue.norm, prologue.eps)
    y = F.linear(x, weight, epilogue.bias)
    if epilogue.activation is not None:
        y = activate_reference(y, epilogue.activation)
    return y if epilogue.residual is None else y + epilogue.residual


def _one_row_product(x: Tensor, weight: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor) -> None:
    inputs, outputs, block_out = x.shape[1], out.shape[1], 2
    _one_row_kernel[(triton.cdiv(outputs, block_out),)](
        x,
        weight,
        epilogue.bias,
        prologue.norm,
        epilogue.residual,
        out,
        outputs,
        prologue.eps,
        INPUTS=inputs,
        BIAS=epilogue.bias is not None,
        NORM=prologue.norm is not None,
        RESIDUAL=epilogue.residual is not None,
        ACTIVATION=activation_number(epilogue.activation),
        BLOCK_IN=min(2048 if prologue.norm is None else 4096, triton.next_power_of_2(inputs)),
        BLOCK_OUT=block_out,
        num_warps=4,
        **launch_options(x.device),
    )


def small_batch_blocks(rows: int, inputs: int, outputs: int, *, gated: bool) -> Blocks:
    """The fastest blocks of a sweep on Hopper. Devices with less shared memory reduce them. A product of tiles takes 16
    inputs or more."""
    if gated or outputs > 65_536:
        blocks = Blocks(128, 128, warps=8, stages=3)
    elif outputs > 4096 or rows > 16:
        blocks = Blocks(64, 256, warps=4, stages=4)
    else:
        blocks = Blocks(16, 512, warps=2, stages=4)
    return blocks._replace(inputs=max(16, min(blocks.inputs, triton.next_power_of_2(inputs))))


@jit
def _one_row_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    outputs,
    eps,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """One program per BLOCK_OUT rows of the matrix. The next tile is loaded while this one is summed."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_inside = row < outputs
    line = weight + row.to(tl.int64)[:, None] * INPUTS
    line_up = line + outputs.to(tl.int64) * INPUTS
    column = tl.arange(0, BLOCK_IN)
    inside = row_inside[:, None] & (column < INPUTS)[None, :]
    tile = tl.load(line + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    if ACTIVATION:
        tile_up = tl.load(line_up + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        gdc_wait()
    added = added_to_row(bias, residual, tl.program_id(0), outputs, BIAS, RESIDUAL, 0, BLOCK_OUT)
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    squares = tl.zeros((BLOCK_IN,), tl.float32)
    for start in tl.static_range(0, INPUTS, BLOCK_IN):
        here = start + column
        value = tl.load(x + here, mask=here < INPUTS, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm_weight + here, mask=here < INPUTS, other=0.0).to(tl.float32)
        if start + BLOCK_IN < INPUTS:
            there = here + BLOCK_IN
            inside = row_inside[:, None] & (there < INPUTS)[None, :]
            next_tile = tl.load(line + there[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            if ACTIVATION:
                next_up = tl.load(line_up + there[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        total += tile.to(tl.float32) * value[None, :]
        if ACTIVATION:
            total_up += tile_up.to(tl.float32) * value[None, :]
        if start + BLOCK_IN < INPUTS:
            tile = next_tile
            if ACTIVATION:
                tile_up = next_up
    y = tl.sum(total, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        y *= scale
    if ACTIVATION:
        y = activated(y, tl.sum(total_up, 1) * scale, ACTIVATION)
    tl.store(out + row, (y + added).to(out.dtype.element_ty), mask=row_inside)


@jit(do_not_specialize=["rows"])
def _small_batch_kernel(
    x,
    weight,
    bias,
    residual,
    out,
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
):
    """One program per BLOCK_OUT rows of the matrix, all rows of x: out = (W xᵀ)ᵀ."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    output_inside = output < outputs
    row = tl.arange(0, ROWS)
    row_inside = row < rows
    line = weight + output.to(tl.int64)[:, None] * INPUTS
    line_up = line + outputs.to(tl.int64) * INPUTS
    total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    for start in range(0, INPUTS, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        if INPUTS % BLOCK_IN == 0:
            inside = output_inside[:, None]
            x_inside = row_inside[None, :]
        else:
            inside = output_inside[:, None] & (column < INPUTS)[None, :]
            x_inside = row_inside[None, :] & (column < INPUTS)[:, None]
        tile = tl.load(line + column[None, :], mask=inside, other=0.0)
        value = tl.load(x + row[None, :] * INPUTS + column[:, None], mask=x_inside, other=0.0)  # [in, rows]
        total = tl.dot(tile, value, total)
        if ACTIVATION:
            tile_up = tl.load(line_up + column[None, :], mask=inside, other=0.0)
            total_up = tl.dot(tile_up, value, total_up)
    if ACTIVATION:
        total = activated(total, total_up, ACTIVATION)
    store_batch(
        total, bias, residual, out, output, row, rows, outputs, out_stride, residual_stride, BIAS, RESIDUAL
    )  # fmt: skip
