"""Eight-bit floating-point experts of large batches: the pairs of each expert, gathered into tiles, times its matrix.

As with one matrix (`product.py`), FP8 tensor cores multiply rows of eight bits, and other cards widen the matrix in the
tile. With a scale for each block the sums of a block's columns are scaled and added in float32. A row has one scale for
all of its columns here: scales of each 128 columns would have to be gathered by pair in every step, and floating-point
numbers lose nothing by a common one unless they are 28,000 times smaller than the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.float8.layout import GROUP
from cortex.neuron.kernels.float8.matrix import Float8Matrix
from cortex.neuron.kernels.float8.one_row import wide
from cortex.neuron.kernels.float8.rows import Float8Rows
from cortex.neuron.kernels.jit import jit, launch_options, tl, triton
from cortex.neuron.kernels.moe.grouped import MAX_STAGES, max_tiles, own_pairs, store_pairs, tiling
from cortex.neuron.kernels.moe.routing import PairLists
from cortex.neuron.kernels.shared_memory import loop_over_columns, shared_memory

_MAX_WIDENED_PAIRS = 64


def float8_grouped_product(
    x: Float8Rows | Tensor,
    matrix: Float8Matrix,
    num_experts: int,
    lists: PairLists,
    out: Tensor,
    *,
    pairs_per_row: int,
    gated: bool,
) -> None:
    """silu(x Gᵀ) · x Uᵀ by pair, where each expert's rows are G above U, or weight · x Wᵀ.

    x: [pairs / pairs_per_row, inputs], of eight bits with one scale for each row, or of another type, to which the
    matrix is widened; out: [pairs, outputs]
    """
    num_pairs, outputs = out.shape
    tile = tiling(num_pairs, num_experts)
    if isinstance(x, Float8Rows):
        rows, scales, codes = x.codes, x.scales, matrix.codes
        tile_pairs, block_out, warps = tile.pairs, tile.outputs, tile.warps
        column_bytes = (1 + gated) * block_out + tile_pairs
    else:
        rows, scales, codes = x, None, matrix.codes.view(torch.uint8)
        tile_pairs, block_out, warps = min(tile.pairs, _MAX_WIDENED_PAIRS), 64, 4
        column_bytes = (1 + gated) * block_out * (1 + x.element_size()) + tile_pairs * x.element_size()
    block_in, stages = loop_over_columns(GROUP, MAX_STAGES, column_bytes, shared_memory(out.device))
    _grouped_kernel[(triton.cdiv(outputs, block_out), max_tiles(num_pairs, num_experts, tile_pairs))](
        rows,
        scales,
        codes,
        matrix.scales,
        lists.weights,
        lists.counts,
        lists.members,
        out,
        lists.members.stride(0),
        INPUTS=matrix.inputs,
        OUTPUTS=outputs,
        EXPERTS=num_experts,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        PAIRS_PER_ROW=pairs_per_row,
        GATED=gated,
        BLOCK=matrix.layout.block,
        NATIVE=scales is not None,
        BLOCK_PAIRS=tile_pairs,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
        **launch_options(out.device),
    )


@jit(do_not_specialize=["members_stride"])
def _grouped_kernel(
    x,
    x_scales,
    weight,
    scales,
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
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of one expert's pairs and BLOCK_OUT rows of its matrix: out = (W xᵀ)ᵀ.

    GATED has twice OUTPUTS rows, the gate's first; otherwise the product is scaled by the pair's weight. With BLOCK,
    the rows of a program and the columns of a step have one scale.
    """
    expert, pair, valid = own_pairs(counts, members, members_stride, EXPERTS, EXPERTS_BLOCK, BLOCK_PAIRS, OVERLAP)
    if expert >= EXPERTS:
        return
    row = (pair // PAIRS_PER_ROW).to(tl.int64)
    source = x + row[None, :] * INPUTS
    matrices: tl.constexpr = 2 if GATED else 1
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
        if GATED:
            tile_up = tl.load(line + OUTPUTS * INPUTS + column[None, :], mask=output_inside[:, None], other=0.0)
            factor_up = tile_up if NATIVE else wide(tile_up).to(value.dtype)
        if BLOCK > 0:
            across: tl.constexpr = INPUTS // BLOCK
            scale = scales + (expert_row + block) // BLOCK * across + start // BLOCK
            total += tl.dot(factor, value) * tl.load(scale)
            if GATED:
                total_up += tl.dot(factor_up, value) * tl.load(scale + OUTPUTS // BLOCK * across)
        else:
            total = tl.dot(factor, value, total)
            if GATED:
                total_up = tl.dot(factor_up, value, total_up)
    if BLOCK == 0:
        scale = scales + expert_row + output
        total *= tl.load(scale, mask=output_inside, other=0.0)[:, None]
        if GATED:
            total_up *= tl.load(scale + OUTPUTS, mask=output_inside, other=0.0)[:, None]
    if NATIVE:
        row_scale = tl.load(x_scales + row, mask=valid, other=0.0)[None, :]
        total *= row_scale
        total_up *= row_scale
    store_pairs(total, total_up, out, pair_weights, pair, valid, output, OUTPUTS, GATED)
