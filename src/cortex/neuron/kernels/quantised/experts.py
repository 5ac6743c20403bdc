"""Grouped GEMM of packed experts for large batches: each expert's pairs, gathered into tiles, times its rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cortex.neuron.kernels.expert_pairs import PairLists
from cortex.neuron.kernels.jit import jit, num_processors, tl
from cortex.neuron.kernels.products.grouped import launch_grouped, own_pairs, store_pairs
from cortex.neuron.kernels.quantised.codes import PackedCodes
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.product import fitting_stages, program_bytes
from cortex.neuron.kernels.quantised.unpack import add_product, layout_options, operand, operand_row, restored
from cortex.neuron.kernels.shared_memory import SharedMemory, shared_memory

_BLOCK_OUT = 64
_WARPS = 4
_STAGES = 3
_MAX_TILE_PAIRS = 64


class PackedExpertTiles(NamedTuple):
    """How a grouped GEMM with experts is cut into programs."""

    pairs: int
    blocks: int
    """Blocks of 64 rows of the matrix, one after another in one program."""
    chunks: int
    """Chunks of 128 columns, at a time."""
    stages: int


def packed_expert_tiles(
    num_pairs: int,
    num_experts: int,
    outputs: int,
    chunks: int,
    layout: Layout,
    processors: int,
    shared: SharedMemory,
    *,
    gated: bool,
) -> PackedExpertTiles:
    """The fastest of a sweep on Hopper.

    With few pairs the bytes of the matrix count. So a program reads whole lines of the cache, which hold two chunks of
    a row, and takes several blocks of rows if one is short: to find its pairs takes as long as some steps.
    """
    wanted = -(-2 * num_pairs // num_experts)
    pairs = max(16, min(_MAX_TILE_PAIRS, 1 << (wanted - 1).bit_length()))
    rows = (1 + gated) * _BLOCK_OUT
    if shared.copies == 1 or pairs > 32 or chunks % 2 != 0:
        return PackedExpertTiles(pairs, 1, 1, fitting_stages(rows, pairs, 1, _STAGES, layout, shared))
    at_once = shared.num_bytes // program_bytes(rows, pairs, 2, _STAGES, layout, shared) * processors
    blocks, more, busy = 1, 2, min(num_pairs, num_experts)
    while more * chunks * (1 + gated) < 64 and outputs % (more * _BLOCK_OUT) == 0:
        programs = outputs // (more * _BLOCK_OUT) * busy
        if programs < 3 * processors:
            break
        if not at_once < programs < 2 * at_once:  # those would end with a round of few programs
            blocks = more
        more *= 2
    return PackedExpertTiles(pairs, blocks, 2, _STAGES)


def packed_grouped_product(
    x: Tensor,
    codes: PackedCodes,
    lists: PairLists,
    out: Tensor,
    *,
    pairs_per_row: int,
    activation: str | None,
    bias: Tensor | None = None,
) -> None:
    """See `ExpertMatrix.grouped`."""
    (num_pairs, outputs), num_experts = out.shape, len(lists.counts)
    chunks = codes.low.shape[1] // 16
    tiles = packed_expert_tiles(
        num_pairs,
        num_experts,
        outputs,
        chunks,
        codes.layout,
        num_processors(x.device),
        shared_memory(x.device),
        gated=activation is not None,
    )
    launch_grouped(
        _packed_grouped_kernel,
        (x, codes.low, codes.high, codes.scales, bias),
        lists,
        out,
        tile_pairs=tiles.pairs,
        block_out=_BLOCK_OUT,
        blocks=tiles.blocks,
        pairs_per_row=pairs_per_row,
        activation=activation,
        BIAS=bias is not None,
        INPUTS=codes.inputs,
        BLOCK_CHUNKS=tiles.chunks,
        BLOCKS=tiles.blocks,
        CHUNKS=chunks,
        WARPS=_WARPS,
        STAGES=tiles.stages,
        num_warps=_WARPS,
        num_stages=tiles.stages,
        **layout_options(codes.layout),
    )


@jit(do_not_specialize=["members_stride"])
def _packed_grouped_kernel(
    x,
    low,
    high,
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
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per tile of one expert's pairs and BLOCKS blocks of BLOCK_OUT rows of its matrix: out = (W xᵀ)ᵀ.

    With an ACTIVATION an expert has twice OUTPUTS rows, the gate's first; otherwise the product is scaled by the pair's
    weight. The steps of
    all blocks are one loop, so that the words of the next block are on their way while this one ends.
    """
    expert, pair, valid = own_pairs(counts, members, members_stride, EXPERTS, EXPERTS_BLOCK, BLOCK_PAIRS, OVERLAP)
    if expert >= EXPERTS:
        return
    source = x + (pair // PAIRS_PER_ROW).to(tl.int64)[None, :] * INPUTS
    expert_row = expert * (2 * OUTPUTS if ACTIVATION else OUTPUTS)
    steps: tl.constexpr = CHUNKS // BLOCK_CHUNKS
    total = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
    for step in tl.range(0, BLOCKS * steps, num_stages=STAGES):
        chunk = step % steps * BLOCK_CHUNKS
        block = (tl.program_id(0) * BLOCKS + step // steps) * BLOCK_OUT
        line = block + tl.arange(0, BLOCK_OUT)
        loaded = expert_row + (line if OUTPUTS % (BLOCKS * BLOCK_OUT) == 0 else tl.minimum(line, OUTPUTS - 1))
        column = chunk * 128 + tl.arange(0, BLOCK_CHUNKS * 128)
        inside = valid[None, :] if INPUTS % 128 == 0 else valid[None, :] & (column < INPUTS)[:, None]
        value = tl.load(source + column[:, None], mask=inside, other=0.0)  # [in, pairs]
        weights = operand(
            low, high, scales, loaded, chunk,
            CHUNKS, BLOCK_OUT, BLOCK_CHUNKS, WARPS, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK, SCALE_WORDS, PTX,
        )  # fmt: skip
        total = add_product(total, weights, value)
        if ACTIVATION:
            weights_up = operand(
                low, high, scales, loaded + OUTPUTS, chunk,
                CHUNKS, BLOCK_OUT, BLOCK_CHUNKS, WARPS, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK, SCALE_WORDS, PTX,
            )  # fmt: skip
            total_up = add_product(total_up, weights_up, value)
        if step % steps == steps - 1:
            total = restored(total, x.dtype.element_ty)
            total_up = restored(total_up, x.dtype.element_ty)
            output = block + operand_row(BLOCK_OUT, WARPS)
            store_pairs(
                total, total_up, bias, expert, out, pair_weights, pair, valid, output, OUTPUTS, ACTIVATION, BIAS
            )  # fmt: skip
            total = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
            total_up = tl.zeros((BLOCK_OUT, BLOCK_PAIRS), tl.float32)
