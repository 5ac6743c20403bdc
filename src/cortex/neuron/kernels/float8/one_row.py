"""A matrix of eight-bit floating-point numbers times one row, which stays as it is.

The numbers of the matrix are widened and summed in float32. The norm before and the addition after are part of the
pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.float8.matrix import Float8Matrix, widened
from cortex.neuron.kernels.float8.support import has_float8_products
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.moe.routing import ExpertPairs
from cortex.neuron.kernels.norm import rms_norm, rms_norm_reference
from cortex.neuron.kernels.silu import silu_mul_reference


class OneRowTiles(NamedTuple):
    outputs: int
    inputs: int
    warps: int


def one_row_tiles(outputs: int, inputs: int) -> OneRowTiles:
    """The fastest of a sweep on Hopper."""
    if inputs > 8192:
        return OneRowTiles(4, 4096, 8)
    columns = min(2048, triton.next_power_of_2(inputs))
    return OneRowTiles(8 if outputs > 4096 else 4, columns, max(1, columns // 512))


def one_row_float8_product(
    x: Tensor,
    matrix: Float8Matrix,
    out: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    *,
    gated: bool = False,
) -> None:
    """out = norm(x) Wᵀ + bias + residual, or with `gated` silu(norm(x) Gᵀ) · norm(x) Uᵀ, where W is G above U.

    x: [1, inputs]; out and residual: [1, outputs]
    """
    _launch(x, matrix, out, bias, norm_weight, eps, residual, gated=gated)


def expert_rows_float8_product(
    x: Tensor,
    matrix: Float8Matrix,
    out: Tensor,
    pairs: ExpertPairs,
    norm_weight: Tensor | None,
    eps: float,
) -> None:
    """Each pair of a row and one of its experts: a vector times that expert's rows of the matrix.

    x: [pairs / pairs.per_row, inputs]; out: [pairs, outputs]
    """
    _launch(x, matrix, out, None, norm_weight, eps, None, gated=pairs.weights is None, pairs=pairs)


def _launch(
    x: Tensor,
    matrix: Float8Matrix,
    out: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    *,
    gated: bool,
    pairs: ExpertPairs | None = None,
) -> None:
    if norm_weight is not None and norm_weight.dtype != x.dtype:  # zero-centred norms are kept in float32
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    outputs, is_native = out.shape[1], has_float8_products(x.device)
    tiles = one_row_tiles(outputs, matrix.inputs)
    _one_row_kernel[(triton.cdiv(outputs, tiles.outputs // (2 if gated else 1)), len(out))](
        x,
        matrix.codes if is_native else matrix.codes.view(torch.uint8),
        matrix.scales,
        bias,
        norm_weight,
        residual,
        out,
        pairs.chosen if pairs else None,
        pairs.weights if pairs else None,
        outputs,
        eps,
        INPUTS=matrix.inputs,
        BLOCK=matrix.layout.block,
        NATIVE=is_native,
        BIAS=bias is not None,
        NORM=norm_weight is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        PAIRS_PER_ROW=pairs.per_row if pairs else 0,
        WEIGHTED=pairs is not None and pairs.weights is not None,
        BLOCK_OUT=tiles.outputs,
        BLOCK_IN=tiles.inputs,
        num_warps=tiles.warps,
        **launch_options(x.device),
    )


def one_row_reference(
    x: Tensor,
    matrix: Float8Matrix,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    *,
    gated: bool = False,
) -> Tensor:
    values = x.float() if norm_weight is None else rms_norm_reference(x.float(), norm_weight.float(), eps)
    y = F.linear(values, widened(matrix))
    y = silu_mul_reference(y) if gated else y
    if bias is not None:
        y += bias
    return (y if residual is None else y + residual).to(x.dtype)


@jit
def wide(codes, NATIVE: tl.constexpr):
    """Float32 numbers of eight-bit ones. Cards that do not know the type get bytes: shifted, their exponent is 2¹²⁰ too
    small."""
    if NATIVE:
        numbers = codes.to(tl.float32)
    else:
        bits = codes.to(tl.int32)
        shifted = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        numbers = shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return numbers


@jit
def _one_row_kernel(
    x,
    weight,
    scales,
    bias,
    norm_weight,
    residual,
    out,
    chosen,
    weights,
    outputs,
    eps,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_OUT rows of the matrix. The next tile is loaded while this one is summed.

    A thread sums sixteen columns, which is what it loads at once. GATED: half of the rows are the gate's.
    PAIRS_PER_ROW: the second coordinate is a pair, whose expert's rows begin further down; 0: there are no pairs.
    """
    if OVERLAP:
        gdc_launch_dependents()
    if PAIRS_PER_ROW > 0:
        if OVERLAP:
            gdc_wait()  # the kernel before chose the experts
        pair = tl.program_id(1).to(tl.int64)
        expert_row = tl.load(chosen + pair).to(tl.int64) * (outputs * (2 if GATED else 1))
        weight += expert_row * INPUTS
        scales += expert_row // BLOCK * (INPUTS // BLOCK) if BLOCK > 0 else expert_row
        x += pair // PAIRS_PER_ROW * INPUTS
        out += pair * outputs
    rows: tl.constexpr = BLOCK_OUT // 2 if GATED else BLOCK_OUT
    line = tl.arange(0, BLOCK_OUT)
    row = tl.program_id(0) * rows + line % rows
    row_inside = row < outputs
    if GATED:
        row += line // rows * outputs
    where = weight + row.to(tl.int64)[:, None] * INPUTS
    column = tl.arange(0, BLOCK_IN)
    inside = row_inside[:, None] & (column < INPUTS)[None, :]
    tile = tl.load(where + column[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
    if OVERLAP and PAIRS_PER_ROW == 0:
        gdc_wait()
    total = tl.zeros((BLOCK_OUT, BLOCK_IN // 16), tl.float32)
    squares = tl.zeros((BLOCK_IN // 16,), tl.float32)
    for start in tl.static_range(0, INPUTS, BLOCK_IN):
        here = start + column
        value = tl.load(x + here, mask=here < INPUTS, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(value * value, (BLOCK_IN // 16, 16)), 1)
            value *= tl.load(norm_weight + here, mask=here < INPUTS, other=0.0).to(tl.float32)
        if start + BLOCK_IN < INPUTS:
            there = here + BLOCK_IN
            inside = row_inside[:, None] & (there < INPUTS)[None, :]
            next_tile = tl.load(where + there[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        sums = tl.sum(tl.reshape(wide(tile, NATIVE) * value[None, :], (BLOCK_OUT, BLOCK_IN // 16, 16)), 2)
        if BLOCK > 0:
            part = start // 16 + tl.arange(0, BLOCK_IN // 16)
            scale = scales + (row // BLOCK)[:, None] * (INPUTS // BLOCK) + (part // (BLOCK // 16))[None, :]
            sums *= tl.load(scale, mask=row_inside[:, None] & (part * 16 < INPUTS)[None, :], other=0.0)
        total += sums
        if start + BLOCK_IN < INPUTS:
            tile = next_tile
    y = tl.sum(total, 1)
    if BLOCK == 0:
        y *= tl.load(scales + row, mask=row_inside, other=0.0)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, rows)), (1, 0)))
        y = gate * tl.sigmoid(gate) * up
    output = tl.program_id(0) * rows + tl.arange(0, rows)
    output_inside = output < outputs
    if BIAS:
        y += tl.load(bias + output, mask=output_inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + output, mask=output_inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        y *= tl.load(weights + pair)
    tl.store(out + output, y.to(out.dtype.element_ty), mask=output_inside)
