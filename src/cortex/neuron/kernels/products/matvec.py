"""Matrix products for small batches, as in decode steps. They are bound by the bytes of the matrix, so the norm before
and the gate or addition after are fused into the same pass.

One row: each program reads whole rows of the matrix and sums. The scale of the norm is a common factor of each dot
product and is applied at the end. Several rows: the matrix is the left operand of a tensor-core product, the rows,
padded to 16 or 32, are the right one. The norm is a separate launch: fused, each program would repeat it for all rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.norm import rms_norm, rms_norm_reference
from cortex.neuron.kernels.shared_memory import loop_over_columns, shared_memory
from cortex.neuron.kernels.silu import silu_mul_reference


class Blocks(NamedTuple):
    """The tile of one program."""

    outputs: int
    inputs: int
    """Per iteration of the loop."""
    warps: int
    stages: int


def beats_library(rows: int, inputs: int) -> bool:
    """Whether these kernels were measured to be faster than norm, library product and addition in sequence."""
    return rows <= 16 or (rows <= 32 and inputs <= 8192)


def matvec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
) -> Tensor:
    """norm(x) Wᵀ + bias + residual. x: [rows, in], weight: [out, in] → [rows, out]"""
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, norm_weight, eps, residual, out, gated=False)
    return out


def matvec_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
) -> Tensor:
    if norm_weight is not None:
        x = rms_norm_reference(x, norm_weight, eps)
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


def gated_matvec(x: Tensor, gate_up: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """silu(norm(x) Gᵀ) · norm(x) Uᵀ. x: [rows, in], gate_up: [2 · out, in] → [rows, out]"""
    out = torch.empty((len(x), len(gate_up) // 2), dtype=x.dtype, device=x.device)
    _launch(x, gate_up, None, norm_weight, eps, None, out, gated=True)
    return out


def gated_matvec_reference(x: Tensor, gate_up: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    return silu_mul_reference(F.linear(rms_norm_reference(x, norm_weight, eps), gate_up))


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
) -> None:
    rows, inputs = x.shape
    outputs = out.shape[1]
    options = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "GATED": gated, "INPUTS": inputs}
    options |= launch_options(x.device)
    if rows == 1:
        block_in = min(2048 if norm_weight is None else 4096, triton.next_power_of_2(inputs))
        block_out = 2
        _one_row_kernel[(triton.cdiv(outputs, block_out),)](
            x,
            weight,
            bias,
            norm_weight,
            residual,
            out,
            outputs,
            eps,
            **options,
            NORM=norm_weight is not None,
            BLOCK_IN=block_in,
            BLOCK_OUT=block_out,
            num_warps=4,
        )
        return
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    block_rows = max(16, triton.next_power_of_2(rows))
    blocks = small_batch_blocks(rows, inputs, outputs, gated=gated)
    column_bytes = ((1 + gated) * blocks.outputs + block_rows) * x.element_size()
    block_in, stages = loop_over_columns(blocks.inputs, blocks.stages, column_bytes, shared_memory(x.device))
    _small_batch_kernel[(triton.cdiv(outputs, blocks.outputs),)](
        x,
        weight,
        bias,
        residual,
        out,
        rows,
        outputs,
        **options,
        ROWS=block_rows,
        BLOCK_IN=block_in,
        BLOCK_OUT=blocks.outputs,
        num_warps=blocks.warps,
        num_stages=stages,
    )


def small_batch_blocks(rows: int, inputs: int, outputs: int, *, gated: bool) -> Blocks:
    """The fastest blocks of a sweep on Hopper. Devices with less shared memory reduce them."""
    if gated or outputs > 65_536:
        blocks = Blocks(128, 128, warps=8, stages=3)
    elif outputs > 4096 or rows > 16:
        blocks = Blocks(64, 256, warps=4, stages=4)
    else:
        blocks = Blocks(16, 512, warps=2, stages=4)
    return blocks._replace(inputs=min(blocks.inputs, triton.next_power_of_2(inputs)))


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
    GATED: tl.constexpr,
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
    if GATED:
        tile_up = tl.load(line_up + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        gdc_wait()
    # Loaded here, where the latency is hidden; the products come at the end.
    added = tl.zeros((BLOCK_OUT,), tl.float32)
    if BIAS:
        added += tl.load(bias + row, mask=row_inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        added += tl.load(residual + row, mask=row_inside, other=0.0).to(tl.float32)
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
            if GATED:
                next_up = tl.load(line_up + there[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        total += tile.to(tl.float32) * value[None, :]
        if GATED:
            total_up += tile_up.to(tl.float32) * value[None, :]
        if start + BLOCK_IN < INPUTS:
            tile = next_tile
            if GATED:
                tile_up = next_up
    y = tl.sum(total, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        y *= scale
    if GATED:
        y = y * tl.sigmoid(y) * (tl.sum(total_up, 1) * scale)
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
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
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
        if GATED:
            tile_up = tl.load(line_up + column[None, :], mask=inside, other=0.0)
            total_up = tl.dot(tile_up, value, total_up)
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    if BIAS:
        total += tl.load(bias + output, mask=output_inside, other=0.0).to(tl.float32)[:, None]
    where = row[None, :] * outputs + output[:, None]
    inside = output_inside[:, None] & row_inside[None, :]
    if RESIDUAL:
        total += tl.load(residual + where, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=inside)
