"""The GEMV of a single row. Each program reads whole rows of the matrix and sums. The scale of the norm is a common
factor of each dot product and is applied at the end."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.activations import activated, activation_number
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.matrix import Epilogue, Prologue
from cortex.neuron.kernels.products.one_row import added_to_row


def one_row_product(x: Tensor, weight: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor) -> None:
    """See `Matrix.product`. The prologue has no activation. x: [1, in], weight: [out, in]"""
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
