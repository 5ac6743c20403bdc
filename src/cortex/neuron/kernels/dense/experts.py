"""Grouped GEMM of dense experts for large batches: each expert's pairs, gathered into tiles, times its rows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import activate_reference
from cortex.neuron.kernels.jit import jit, tl, triton
from cortex.neuron.kernels.moe.pairs import PairLists
from cortex.neuron.kernels.products.grouped import Tiling, launch_grouped, own_pairs, store_pairs
from cortex.neuron.kernels.shared_memory import shared_memory


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
    inputs = x.shape[1]
    block_in, stages = tile.fitted(1 if activation is None else 2, x.element_size(), shared_memory(x.device))
    launch_grouped(
        _grouped_kernel,
        (x, weight, bias),
        lists,
        out,
        tile_pairs=tile.pairs,
        block_out=tile.outputs,
        pairs_per_row=pairs_per_row,
        activation=activation,
        BIAS=bias is not None,
        INPUTS=inputs,
        BLOCK_IN=max(16, min(block_in, triton.next_power_of_2(inputs))),
        num_warps=tile.warps,
        num_stages=stages,
    )


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
    OVERLAP: tl.constexpr,
):
    """One program per tile of one expert's pairs and BLOCK_OUT rows of its matrix: out = (W xᵀ)ᵀ.

    With an ACTIVATION an expert has twice OUTPUTS rows, the gate's first; otherwise the product is scaled by the pair's
    weight.
    """
    expert, pair, valid = own_pairs(counts, members, members_stride, EXPERTS, EXPERTS_BLOCK, BLOCK_PAIRS, OVERLAP)
    if expert >= EXPERTS:
        return
    row = (pair // PAIRS_PER_ROW).to(tl.int64)
    output = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    output_inside = output < OUTPUTS
    MATRICES: tl.constexpr = 2 if ACTIVATION else 1
    line = weight + expert * (MATRICES * OUTPUTS * INPUTS) + output[:, None] * INPUTS
    source = x + row[None, :] * INPUTS
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
