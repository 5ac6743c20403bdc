"""Grouped GEMM of FP8 experts for large batches: the pairs of each expert, gathered into tiles, times its matrix.

As with one matrix (`product.py`), FP8 tensor cores multiply rows of eight bits, and other cards widen the matrix in the
tile. With a scale for each block the sums of a block's columns are scaled and added in float32. A row has one scale for
all of its columns here: scales of each 128 columns would have to be gathered by pair in every step, and floating-point
values lose nothing by a common one unless they are 28,000 times smaller than the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.expert_pairs import PairLists
from cortex.neuron.kernels.float8.codes import Float8Codes
from cortex.neuron.kernels.float8.layout import GROUP
from cortex.neuron.kernels.float8.one_row import wide
from cortex.neuron.kernels.jit import jit, tl
from cortex.neuron.kernels.products.grouped import MAX_STAGES, Tiling, launch_grouped, own_pairs, store_pairs
from cortex.neuron.kernels.shared_memory import loop_over_columns, shared_memory

_MAX_WIDENED_PAIRS = 64


def float8_grouped_product(
    x: Tensor,
    x_scales: Tensor | None,
    codes: Float8Codes,
    lists: PairLists,
    out: Tensor,
    tile: Tiling,
    *,
    pairs_per_row: int,
    activation: str | None,
    bias: Tensor | None = None,
) -> None:
    """See `ExpertMatrix.grouped`. `x_scales`: one for each row of eight bits (`rows.py`); None: the rows are of
    another type, to which the matrix is widened."""
    matrices = 1 if activation is None else 2
    if x_scales is not None:
        values, tile_pairs, block_out, warps = codes.codes, tile.pairs, tile.outputs, tile.warps
        column_bytes = matrices * block_out + tile_pairs
    else:
        values, tile_pairs = codes.codes.view(torch.uint8), min(tile.pairs, _MAX_WIDENED_PAIRS)
        block_out, warps = 64, 4
        column_bytes = matrices * block_out * (1 + x.element_size()) + tile_pairs * x.element_size()
    block_in, stages = loop_over_columns(GROUP, MAX_STAGES, column_bytes, shared_memory(out.device))
    launch_grouped(
        _grouped_kernel,
        (x, x_scales, values, codes.scales, bias),
        lists,
        out,
        tile_pairs=tile_pairs,
        block_out=block_out,
        pairs_per_row=pairs_per_row,
        activation=activation,
        BIAS=bias is not None,
        INPUTS=codes.inputs,
        BLOCK=codes.layout.block,
        NATIVE=x_scales is not None,
        BLOCK_IN=block_in,
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
    )


@jit(do_not_specialize=["members_stride"])
def _grouped_kernel(
    x,
    x_scales,
    weight,
    scales,
    bias,
    pair_weights,
    counts,
    members,
    out,
    members_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of one expert's pairs and BLOCK_OUT rows of its matrix: out = (W xᵀ)ᵀ.

    With an ACTIVATION an expert has twice OUTPUTS rows, the gate's first; otherwise the product is scaled by the pair's
    weight. With BLOCK,
    the rows of a program and the columns of a step have one scale.
    """
    expert, pair, valid = own_pairs(counts, members, members_stride, EXPERTS, EXPERTS_BLOCK, BLOCK_PAIRS, OVERLAP)
    if expert >= EXPERTS:
        return
    row = (pair // PAIRS_PER_ROW).to(tl.int64)
    source = x + row[None, :] * INPUTS
    matrices: tl.constexpr = 2 if ACTIVATION else 1
    block = tl.program_id(0) * BLOCK_OUT
    output = block + tl.arange(0, BLOCK_OUT)
    output_inside = output < OUTPUTS
    expert_row = expert * (matrices * OUTPUTS)
    line = weight + (expert_row + output[:, None]) * INPUTS
    total = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_IN, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_IN)
        value = tl.load(source + column[:, None], mask=valid[None, :], other=0.0)  # [in, pairs]
        tile = tl.load(line + column[None, :], mask=output_inside[:, None], other=0.0)
        factor = tile if NATIVE else wide(tile).to(value.dtype)
        if ACTIVATION:
            tile_up = tl.load(line + OUTPUTS * INPUTS + column[None, :], mask=output_inside[:, None], other=0.0)
            factor_up = tile_up if NATIVE else wide(tile_up).to(value.dtype)
        if BLOCK > 0:
            across: tl.constexpr = INPUTS // BLOCK
            scale = scales + (expert_row + block) // BLOCK * across + start // BLOCK
            total += tl.dot(factor, value) * tl.load(scale)
            if ACTIVATION:
                total_up += tl.dot(factor_up, value) * tl.load(scale + OUTPUTS // BLOCK * across)
        else:
            total = tl.dot(factor, value, total)
            if ACTIVATION:
                total_up = tl.dot(factor_up, value, total_up)
    if BLOCK == 0:
        scale = scales + expert_row + output
        total *= tl.load(scale, mask=output_inside, other=0.0)[:, None]
        if ACTIVATION:
            total_up *= tl.load(scale + OUTPUTS, mask=output_inside, other=0.0)[:, None]
    if NATIVE:
        row_scale = tl.load(x_scales + row, mask=valid, other=0.0)[None, :]
        total *= row_scale
        total_up *= row_scale
    store_pairs(
        total, total_up, bias, expert, out, pair_weights, pair, valid, output, OUTPUTS, ACTIVATION, BIAS
    )  # fmt: skip
