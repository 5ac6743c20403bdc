"""Grouped GEMM of dense experts for large batches: each expert's pairs, gathered into tiles, times its rows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import activate_reference
from cortex.neuron.kernels.expert_pairs import PairLists
from cortex.neuron.kernels.jit import jit, num_processors, tl, triton
from cortex.neuron.kernels.products.grouped import Tiling, launch_grouped, own_pairs, store_pairs
from cortex.neuron.kernels.shared_memory import shared_memory

_MAX_STEPS = 48
"""The steps of the loop of a program that takes several blocks of rows."""


def dense_grouped_product(
    x: Tensor,
    weight: Tensor,
    lists: PairLists,
    out: Tensor,
    tile: Tiling,
    *,
    pairs_per_row: int,
    activation: str | None,
    bias: Tensor | None = None,
) -> None:
    """See `ExpertMatrix.grouped`. weight: [rows of all experts, inputs]"""
    (num_pairs, outputs), inputs = out.shape, x.shape[1]
    block_in, stages = tile.fitted(1 if activation is None else 2, x.element_size(), shared_memory(x.device))
    block_in = max(16, min(block_in, triton.next_power_of_2(inputs)))
    busy = min(num_pairs, len(lists.counts))
    blocks = row_blocks(triton.cdiv(inputs, block_in), outputs, tile.outputs, busy, num_processors(x.device))
    launch_grouped(
        _grouped_kernel,
        (x, weight, bias),
        lists,
        out,
        tile_pairs=tile.pairs,
        block_out=tile.outputs,
        blocks=blocks,
        pairs_per_row=pairs_per_row,
        activation=activation,
        BIAS=bias is not None,
        INPUTS=inputs,
        BLOCK_IN=block_in,
        BLOCKS=blocks,
        num_warps=tile.warps,
        num_stages=stages,
    )


def row_blocks(steps: int, outputs: int, block_out: int, busy: int, processors: int) -> int:
    """The number of blocks of an expert's rows that one program takes. Where a block has few steps, a program of one
    block spends its time on finding its pairs, its first load and its last store. `busy`: experts that have pairs."""
    blocks = 1
    while 2 * blocks * steps <= _MAX_STEPS and outputs % (2 * blocks * block_out) == 0:
        if outputs // (2 * blocks * block_out) * busy < 3 * processors:
            break
        blocks *= 2
    return blocks


def grouped_reference(
    x: Tensor,
    weight: Tensor,
    lists: PairLists,
    out: Tensor,
    *,
    pairs_per_row: int,
    activation: str | None,
    bias: Tensor | None = None,
) -> None:
    num_experts = len(lists.counts)
    biases = [None] * num_experts if bias is None else bias.chunk(num_experts)
    experts = zip(weight.chunk(num_experts), biases, lists.members, lists.counts.tolist(), strict=True)
    for rows, added, members, count in experts:
        pairs = members[:count].long()
        y = F.linear(x[pairs // pairs_per_row], rows, added)
        weights = lists.weights.flatten()[pairs, None]
        out[pairs] = y * weights if activation is None else activate_reference(y, activation)


@jit(do_not_specialize=["members_stride"])
def _grouped_kernel(
    x,
    weight,
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
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of one expert's pairs and BLOCKS blocks of BLOCK_OUT rows of its matrix: out = (W xᵀ)ᵀ.

    With an ACTIVATION an expert has twice OUTPUTS rows, the gate's first; otherwise the product is scaled by the pair's
    weight. The steps of all blocks are one loop, so that the next block is on its way while this one ends.
    """
    expert, pair, valid = own_pairs(counts, members, members_stride, EXPERTS, EXPERTS_BLOCK, BLOCK_PAIRS, OVERLAP)
    if expert >= EXPERTS:
        return
    MATRICES: tl.constexpr = 2 if ACTIVATION else 1
    weight += expert * (MATRICES * OUTPUTS * INPUTS)
    source = x + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * INPUTS
    for block in tl.range(0, BLOCKS, flatten=True):
        output = (tl.program_id(0) * BLOCKS + block) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        output_inside = output < OUTPUTS
        line = weight + output[:, None] * INPUTS
        total = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
        total_up = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
        for start in range(0, INPUTS, BLOCK_IN):
            column = start + tl.arange(0, BLOCK_IN)
            if INPUTS % BLOCK_IN == 0:
                inside = output_inside[:, None]
                x_inside = valid[None, :]
            else:
                inside = output_inside[:, None] & (column < INPUTS)[None, :]
                x_inside = valid[None, :] & (column < INPUTS)[:, None]
            tile = tl.load(line + column[None, :], mask=inside, other=0.0)
            value = tl.load(source + column[:, None], mask=x_inside, other=0.0)  # [in, pairs]
            total = tl.dot(tile, value, total)
            if ACTIVATION:
                tile_up = tl.load(line + OUTPUTS * INPUTS + column[None, :], mask=inside, other=0.0)
                total_up = tl.dot(tile_up, value, total_up)
        store_pairs(
            total, total_up, bias, expert, out, pair_weights, pair, valid, output, OUTPUTS, ACTIVATION, BIAS
        )  # fmt: skip
