"""GEMV with a packed matrix: what a single stream's decode step is made of.

Codes are multiplied as integers (`vector.py`), so that its time goes into the bytes of the matrix. The norm before
and the addition after are part of the same pass. Several programs share the columns of long rows.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from cortex.neuron.kernels.expert_pairs import ExpertPairs
from cortex.neuron.kernels.jit import (
    INTERPRETED,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch_options,
    num_processors,
    tl,
    triton,
)
from cortex.neuron.kernels.matrix import Epilogue, Prologue
from cortex.neuron.kernels.products.one_row import OneRowTiles, added_to_row, launch_one_row, store_row
from cortex.neuron.kernels.quantised.codes import PackedCodes
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.unpack import layout_options
from cortex.neuron.kernels.quantised.vector import norm_gains, prepared_vector, times_vector


def one_row_tiles(chunks: int, bits: int, rows: int, *, is_expert: bool) -> OneRowTiles:
    """The fastest of a sweep on Hopper. `rows`: of the matrix, or of each expert.

    Single warps with many rows each have the fewest instructions for a word, and need a matrix that fills the device
    with them. Fewer programs leave room for the next kernel, which loads before it waits.
    """
    is_tall = rows >= 16_384
    if chunks > 32:
        if bits == 5 or (bits == 6 and not is_tall):
            return OneRowTiles(4, 16, 2, 0, 128)
        if bits >= 6:
            return OneRowTiles(8 if bits == 6 else 4, 8, 1, 0, None)
        if chunks > 64:
            return OneRowTiles(4, 16, 2, 0, None)
        return OneRowTiles(16, 8, 1, 0, None) if is_tall else OneRowTiles(8, 16, 2, 0, None)
    warps = max(1, triton.next_power_of_2(chunks) // 8)
    if bits == 5:
        return OneRowTiles(4, 8 * warps, warps, 16 // warps, 128)
    if bits < 5 and warps == 4 and rows <= 4096 and not is_expert:
        return OneRowTiles(4, 8 * warps, warps, 4, 128)
    programs = 8 // warps if warps < 4 and bits < 5 and not is_tall and not is_expert else 12 // warps
    return OneRowTiles(4 if bits == 8 else 8, 8 * warps, warps, programs, 168)


def one_row_product(
    x: Tensor,
    codes: PackedCodes,
    out: Tensor,
    prologue: Prologue,
    epilogue: Epilogue,
    pairs: ExpertPairs | None = None,
) -> None:
    """See `Matrix.product`; the prologue has no activation. x: [1, inputs]; out: [1, outputs]

    With `pairs`, each of a row and one of its experts is a vector times that expert's rows of the matrix.
    x: [pairs / pairs.per_row, inputs]; out: [pairs, outputs of an expert]
    """
    chunks, norm = codes.low.shape[1] // 16, prologue.norm
    low, high = codes.low.view(torch.int32), codes.high.view(torch.int32) if codes.high.numel() else None
    is_paired = x.dtype == torch.bfloat16
    has_wide_norm = is_paired and norm is not None and norm.dtype == torch.float32  # zero-centred norms
    if norm is not None and is_paired:
        norm = norm.view(torch.int64 if has_wide_norm else torch.int32)
    rows = out.shape[1] * (1 if epilogue.activation is None else 2)
    tiles = one_row_tiles(chunks, codes.layout.bits, rows, is_expert=pairs is not None)
    launch_one_row(
        _one_row_kernel,
        x.view(torch.int32) if is_paired else x,
        (low, high, codes.scales),
        norm,
        prologue.eps,
        epilogue,
        out,
        tiles,
        pairs,
        INPUTS=codes.inputs,
        CHUNKS=chunks,
        PAIRED=is_paired,
        WIDE_NORM=has_wide_norm,
        LOW_WORDS=low.shape[1] // chunks,
        HIGH_WORDS=0 if high is None else high.shape[1] // chunks,
        BLOCK_CHUNKS=tiles.width,
        **layout_options(codes.layout) | {"PTX": not INTERPRETED},
    )


@jit(do_not_specialize=["num_blocks"])
def _one_row_kernel(
    x,
    low,
    high,
    scales,
    bias,
    norm_weight,
    residual,
    out,
    chosen,
    weights,
    outputs,
    num_blocks,
    eps,
    INPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAIRED: tl.constexpr,
    WIDE_NORM: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    LOW_WORDS: tl.constexpr,
    HIGH_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The words of a block of BLOCK_OUT rows are on their way while the ones before are multiplied, the first already
    before the vector is there.

    Where the vector fits, a program prepares it once and takes block after block. A longer vector goes by in pieces of
    BLOCK_CHUNKS chunks, with one block for each program.
    ACTIVATION: the matrix has twice `outputs` rows, the gate's first; a program takes as many of either.
    WHOLE: every block has all its rows, so that their distance is a constant in the machine code.
    LOW_WORDS, HIGH_WORDS: of a chunk, in either plane.
    PAIRS_PER_ROW: the second coordinate is a pair, whose expert's rows begin further down; 0: there are no pairs.
    """
    IS_EARLY: tl.constexpr = NORM and PAIRS_PER_ROW > 0
    if OVERLAP and PAIRS_PER_ROW == 0:
        gdc_launch_dependents()
    block, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PAIRS_PER_ROW > 0:
        x += pair // PAIRS_PER_ROW * (INPUTS // 2 if PAIRED else INPUTS)
    if IS_EARLY:  # the kernel before chose the experts, and lets this one start only after the rows are there
        gains = norm_gains(norm_weight, 0, INPUTS, PAIRED, NORM, WIDE_NORM, BLOCK_CHUNKS)
        vector, squares = prepared_vector(x, gains, 0, INPUTS, PAIRED, NORM, GROUP, ZERO, BLOCK_CHUNKS, PTX)
    if PAIRS_PER_ROW > 0:
        if OVERLAP:
            gdc_wait()
            gdc_launch_dependents()  # the next one may read the ids of the experts at once
        expert_row = tl.load(chosen + pair).to(tl.int64) * (outputs * (2 if ACTIVATION else 1))
        low += expert_row * (CHUNKS * LOW_WORDS)
        if HIGH_WORDS > 0:
            high += expert_row * (CHUNKS * HIGH_WORDS)
        scales += expert_row * (CHUNKS * 4 * SCALE_WORDS)
        out += pair * outputs
        if BIAS:
            bias += expert_row
    words = row_words(
        low, high, scales, block, num_blocks, outputs, 0,
        CHUNKS, LOW_WORDS, HIGH_WORDS, SCALE_WORDS, ACTIVATION, WHOLE, BLOCK_OUT, BLOCK_CHUNKS,
    )  # fmt: skip
    if not IS_EARLY:
        gains = norm_gains(norm_weight, 0, INPUTS, PAIRED, NORM, WIDE_NORM, BLOCK_CHUNKS)
        if OVERLAP and PAIRS_PER_ROW == 0:
            gdc_wait()
        vector, squares = prepared_vector(x, gains, 0, INPUTS, PAIRED, NORM, GROUP, ZERO, BLOCK_CHUNKS, PTX)
    share = 1.0
    if WEIGHTED:
        share = tl.load(weights + tl.program_id(1))
    factor = share
    if CHUNKS <= BLOCK_CHUNKS:
        if NORM:
            factor = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        while block < num_blocks:
            following = block + tl.num_programs(0)
            next_words = row_words(
                low, high, scales, following, num_blocks, outputs, 0,
                CHUNKS, LOW_WORDS, HIGH_WORDS, SCALE_WORDS, ACTIVATION, WHOLE, BLOCK_OUT, BLOCK_CHUNKS,
            )  # fmt: skip
            total = times_vector(words, vector, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK, PTX)
            added = added_to_row(bias, residual, block, outputs, BIAS, RESIDUAL, ACTIVATION, BLOCK_OUT) * share
            store_row(tl.sum(total, 1) * factor, added, out, block, outputs, BIAS or RESIDUAL, ACTIVATION, BLOCK_OUT)
            block = following
            words = next_words
    else:
        total = tl.zeros((BLOCK_OUT, BLOCK_CHUNKS * 4), tl.float32)
        for start in range(0, CHUNKS, BLOCK_CHUNKS):
            next_words = row_words(
                low, high, scales, block, num_blocks, outputs, start + BLOCK_CHUNKS,
                CHUNKS, LOW_WORDS, HIGH_WORDS, SCALE_WORDS, ACTIVATION, WHOLE, BLOCK_OUT, BLOCK_CHUNKS,
            )  # fmt: skip
            product = times_vector(words, vector, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK, PTX)
            total += tl.sum(tl.reshape(product, (BLOCK_OUT, BLOCK_CHUNKS * 4, 4)), 2)  # of the four units of a thread
            gains = norm_gains(norm_weight, start + BLOCK_CHUNKS, INPUTS, PAIRED, NORM, WIDE_NORM, BLOCK_CHUNKS)
            vector, more = prepared_vector(
                x, gains, start + BLOCK_CHUNKS, INPUTS, PAIRED, NORM, GROUP, ZERO, BLOCK_CHUNKS, PTX
            )
            squares += more
            words = next_words
        if NORM:
            factor = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        added = added_to_row(bias, residual, block, outputs, BIAS, RESIDUAL, ACTIVATION, BLOCK_OUT) * share
        store_row(tl.sum(total, 1) * factor, added, out, block, outputs, BIAS or RESIDUAL, ACTIVATION, BLOCK_OUT)


@jit
def row_words(
    low,
    high,
    scales,
    block,
    num_blocks,
    outputs,
    start,
    CHUNKS: tl.constexpr,
    LOW_WORDS: tl.constexpr,
    HIGH_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    """The words of a block of rows in BLOCK_CHUNKS chunks from `start` on: of both planes and of the scales.

    Undefined beyond the last block. Beyond the last chunk the scales are 0.
    """
    rows: tl.constexpr = BLOCK_OUT // 2 if ACTIVATION else BLOCK_OUT
    first = block.to(tl.int64) * rows
    line = tl.arange(0, BLOCK_OUT)
    if ACTIVATION:
        line = line % rows
    if not WHOLE:
        line = tl.minimum(line, tl.maximum(outputs - 1 - block * rows, 0))
    if ACTIVATION:
        line += tl.arange(0, BLOCK_OUT) // rows * outputs
    unit = tl.arange(0, BLOCK_CHUNKS * 16)[None, :]
    group = line[:, None] * (CHUNKS * 4) + (unit // 16) * 4 + unit % 4
    scale = scales + (first * (CHUNKS * 4) + start * 4 + group) * SCALE_WORDS
    exists = tl.full((1, 1), 0, tl.int32) + block < num_blocks
    inside = exists & (start * 16 + unit < CHUNKS * 16)
    other = None if CHUNKS % BLOCK_CHUNKS == 0 else 0
    word = _plane(low, first, line, start, exists, CHUNKS, LOW_WORDS, BLOCK_CHUNKS)
    above = word
    if HIGH_WORDS > 0:
        above = _plane(high, first, line, start, exists, CHUNKS, HIGH_WORDS, BLOCK_CHUNKS)
    scale_0 = tl.load(scale, mask=inside, other=other).to(tl.int32)
    scale_1 = scale_0
    if SCALE_WORDS == 2:
        scale_1 = tl.load(scale + 1, mask=inside, other=other)
    return word, above, scale_0, scale_1


@jit
def _plane(plane, first, line, start, exists, CHUNKS: tl.constexpr, WORDS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """The words of one plane, WORDS of a chunk: a word holds one, two or four units.

    A thread gets the words of the same four units from every plane. With more, the vector's values for them would not
    fit into its registers, and Triton takes as many as fill 16 bytes unless addresses have a smaller divisor.
    """
    word = start * WORDS + tl.arange(0, BLOCK_CHUNKS * WORDS)[None, :]
    where = first * (CHUNKS * WORDS) + line[:, None] * (CHUNKS * WORDS) + word
    if WORDS < 16:
        where = tl.multiple_of(where, (1, WORDS // 4))
    return tl.load(plane + where, mask=exists & (word < CHUNKS * WORDS))


PART_CHUNKS = 8
"""Chunks of 128 columns of a program: a thread of its only warp has four units of a row."""
_BLOCK_OUT = 8
_PROGRAMS_ON_PROCESSOR = 12
_REGISTERS = 168
"""So that these programs fit on a processor."""
_MAX_GROUPS = 4096
_MAX_GROUP_BLOCKS = 128


class LongRowParts(NamedTuple):
    """How the GEMV is cut into programs."""

    parts: int
    """Programs that share the columns of a row."""
    groups: int
    """Groups of programs that share the same rows."""


def has_long_rows(layout: Layout, chunks: int, outputs: int, processors: int) -> bool:
    """Whether a matrix is multiplied here: where a program of `one_row.py` does not hold the whole vector. By
    measurements on Hopper it is faster with every layout but that of two bits, which was not measured. The sums of
    a group's rows must fit into the registers of one warp; those of a large head on a small card do not."""
    num_blocks = -(-outputs // _BLOCK_OUT)
    is_long = chunks > 32 and layout.bits > 2
    return is_long and num_blocks <= _MAX_GROUP_BLOCKS * long_row_parts(chunks, num_blocks, processors).groups


def long_row_parts(chunks: int, num_blocks: int, processors: int) -> LongRowParts:
    """As many programs as run at once, or fewer if there are not as many blocks of rows."""
    parts = -(-chunks // PART_CHUNKS)
    return LongRowParts(parts, max(1, min(num_blocks, _MAX_GROUPS, _PROGRAMS_ON_PROCESSOR * processors // parts)))


def long_row_product(x: Tensor, codes: PackedCodes, out: Tensor, epilogue: Epilogue) -> None:
    """See `Matrix.product`; without a prologue and an activation. x: [1, inputs]; out: [1, outputs]"""
    chunks, outputs = codes.low.shape[1] // 16, codes.outputs
    low, high = codes.low.view(torch.int32), codes.high.view(torch.int32) if codes.high.numel() else None
    is_paired = x.dtype == torch.bfloat16
    num_blocks = triton.cdiv(outputs, _BLOCK_OUT)
    parts, groups = long_row_parts(chunks, num_blocks, num_processors(x.device))
    _long_row_kernel[(groups, parts)](
        x.view(torch.int32) if is_paired else x,
        low,
        high,
        codes.scales,
        epilogue.bias,
        epilogue.residual,
        out,
        torch.empty(parts, outputs, dtype=torch.float32, device=x.device),
        _counters(x.device),
        outputs,
        num_blocks,
        INPUTS=codes.inputs,
        CHUNKS=chunks,
        PARTS=parts,
        PAIRED=is_paired,
        BIAS=epilogue.bias is not None,
        RESIDUAL=epilogue.residual is not None,
        WHOLE=outputs % _BLOCK_OUT == 0,
        LOW_WORDS=low.shape[1] // chunks,
        HIGH_WORDS=0 if high is None else high.shape[1] // chunks,
        BLOCK_OUT=_BLOCK_OUT,
        GROUP_BLOCKS=triton.next_power_of_2(triton.cdiv(num_blocks, groups)),
        BLOCK_CHUNKS=PART_CHUNKS,
        num_warps=1,
        maxnreg=_REGISTERS,
        **layout_options(codes.layout) | {"PTX": not INTERPRETED},
        **launch_options(x.device),
    )


@cache
def _counters(device: torch.device) -> Tensor:
    """The number of finished parts of each group. Every launch resets them to zero, so that launches
    on two streams must not overlap: all models of a worker compute on one."""
    return torch.zeros(_MAX_GROUPS, dtype=torch.int32, device=device)


@jit(do_not_specialize=["num_blocks"])
def _long_row_kernel(
    x,
    low,
    high,
    scales,
    bias,
    residual,
    out,
    partial,
    counters,
    outputs,
    num_blocks,
    INPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WHOLE: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    LOW_WORDS: tl.constexpr,
    HIGH_WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    GROUP_BLOCKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The second coordinate is a part of BLOCK_CHUNKS chunks. The words of a block of BLOCK_OUT rows are on their way
    while the ones before are multiplied, the first already before the vector is there.

    WHOLE: every block has all its rows, so that their distance is a constant in the machine code.
    LOW_WORDS, HIGH_WORDS: of a chunk, in either plane.
    GROUP_BLOCKS: the blocks of a program, at most.
    """
    if OVERLAP:
        gdc_launch_dependents()
    group = tl.program_id(0)
    part = tl.program_id(1)
    start = part * BLOCK_CHUNKS
    block = group
    words = row_words(
        low, high, scales, block, num_blocks, outputs, start,
        CHUNKS, LOW_WORDS, HIGH_WORDS, SCALE_WORDS, 0, WHOLE, BLOCK_OUT, BLOCK_CHUNKS,
    )  # fmt: skip
    gains = norm_gains(None, start, INPUTS, PAIRED, False, False, BLOCK_CHUNKS)
    if OVERLAP:
        gdc_wait()
    vector, _ = prepared_vector(x, gains, start, INPUTS, PAIRED, False, GROUP, ZERO, BLOCK_CHUNKS, PTX)
    while block < num_blocks:
        following = block + tl.num_programs(0)
        next_words = row_words(
            low, high, scales, following, num_blocks, outputs, start,
            CHUNKS, LOW_WORDS, HIGH_WORDS, SCALE_WORDS, 0, WHOLE, BLOCK_OUT, BLOCK_CHUNKS,
        )  # fmt: skip
        total = tl.sum(times_vector(words, vector, LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK, PTX), 1)
        row = block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        tl.store(partial + part * outputs + row, total, mask=row < outputs)
        block = following
        words = next_words
    number = tl.arange(0, GROUP_BLOCKS * BLOCK_OUT)
    block = group + number // BLOCK_OUT * tl.num_programs(0)
    row = block * BLOCK_OUT + number % BLOCK_OUT
    inside = row < outputs
    total = tl.zeros((GROUP_BLOCKS * BLOCK_OUT,), tl.float32)
    if BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + row, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()
    if tl.atomic_add(counters + group, 1, sem="acq_rel") == PARTS - 1:
        for each in tl.static_range(PARTS):
            total += tl.load(partial + each * outputs + row, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(out + row, total.to(out.dtype.element_ty), mask=inside)
        tl.store(counters + group, 0)
