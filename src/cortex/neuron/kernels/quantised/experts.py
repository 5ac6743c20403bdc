"""Packed experts of large batches: the pairs of each expert, gathered into tiles, times its rows of the matrix."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.moe.grouped import find_tile, max_tiles
from cortex.neuron.kernels.moe.routing import PairLists
from cortex.neuron.kernels.quantised.packing import PackedMatrix
from cortex.neuron.kernels.quantised.product import fitting_stages, operand, operand_row
from cortex.neuron.kernels.quantised.unpack import layout_options
from cortex.neuron.kernels.shared_memory import shared_memory

_BLOCK_OUT = 64
_WARPS = 4
_STAGES = 3
_MAX_TILE_PAIRS = 64


def packed_grouped_product(
    x: Tensor,
    matrix: PackedMatrix,
    num_experts: int,
    lists: PairLists,
    out: Tensor,
    *,
    pairs_per_row: int,
    gated: bool,
) -> None:
    """silu(x Gᵀ) · x Uᵀ by pair, where each expert's rows are G above U, or weight · x Wᵀ.

    x: [pairs / pairs_per_row, inputs]; out: [pairs, outputs]
    """
    num_pairs, outputs = out.shape
    wanted = -(-2 * num_pairs // num_experts)
    tile_pairs = max(16, min(_MAX_TILE_PAIRS, 1 << (wanted - 1).bit_length()))
    wanted_stages = _STAGES + (gated and num_pairs < num_experts)
    stages = fitting_stages((1 + gated) * _BLOCK_OUT, tile_pairs, wanted_stages, shared_memory(x.device))
    _packed_grouped_kernel[(triton.cdiv(outputs, _BLOCK_OUT), max_tiles(num_pairs, num_experts, tile_pairs))](
        x,
        matrix.low,
        matrix.high,
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
        BLOCK_PAIRS=tile_pairs,
        BLOCK_OUT=_BLOCK_OUT,
        CHUNKS=matrix.low.shape[1] // 16,
        WARPS=_WARPS,
        STAGES=stages,
        num_warps=_WARPS,
        num_stages=stages,
        **layout_options(matrix.layout),
        **launch_options(x.device),
    )


@jit(do_not_specialize=["members_stride"])
def _packed_grouped_kernel(
    x,
    low,
    high,
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
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    LEVELS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of one expert's pairs and BLOCK_OUT rows of its matrix: out = (W xᵀ)ᵀ.

    GATED has twice OUTPUTS rows, the gate's first; otherwise the product is scaled by the pair's weight.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    expert, first, num_pairs = find_tile(counts, EXPERTS, EXPERTS_BLOCK, BLOCK_PAIRS)
    if expert >= EXPERTS:
        return
    expert = expert.to(tl.int64)
    place = first + tl.arange(0, BLOCK_PAIRS)
    valid = place < num_pairs
    pair = tl.load(members + expert * members_stride + place, mask=valid, other=0)
    source = x + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * INPUTS
    matrices: tl.constexpr = 2 if GATED else 1
    block = tl.program_id(0) * BLOCK_OUT
    loaded = expert * (matrices * OUTPUTS) + tl.minimum(block + tl.arange(0, BLOCK_OUT), OUTPUTS - 1)
    total = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        column = chunk * 128 + tl.arange(0, 128)
        inside = valid[None, :] if INPUTS % 128 == 0 else valid[None, :] & (column < INPUTS)[:, None]
        value = tl.load(source + column[:, None], mask=inside, other=0.0)  # [in, pairs]
        weights = operand(
            low, high, scales, loaded, chunk,
            CHUNKS, BLOCK_OUT, 1, WARPS, LOW_BITS, HIGH_BITS, GROUP, ZERO, LEVELS, SCALE_WORDS, PTX,
        )  # fmt: skip
        total = tl.dot(weights.to(value.dtype), value, total)
        if GATED:
            weights_up = operand(
                low, high, scales, loaded + OUTPUTS, chunk,
                CHUNKS, BLOCK_OUT, 1, WARPS, LOW_BITS, HIGH_BITS, GROUP, ZERO, LEVELS, SCALE_WORDS, PTX,
            )  # fmt: skip
            total_up = tl.dot(weights_up.to(value.dtype), value, total_up)
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    else:
        total *= tl.load(pair_weights + pair, mask=valid, other=0.0)[None, :]
    output = block + operand_row(BLOCK_OUT, WARPS)
    where = pair.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(out + where, total.to(out.dtype.element_ty), mask=(output < OUTPUTS)[:, None] & valid[None, :])
