"""GEMV with a packed matrix of long rows, whose columns several programs share: a down projection in a decode step.

The vector does not fit into one program. Each program prepares a part of it once, as in `one_row.py`, and takes that
part of block after block of rows. It is a single warp, so that no barrier separates its loads from its sums. The sums
over parts are written as they are, and the program that finishes last adds them, in a fixed order.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

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
from cortex.neuron.kernels.matrix import Epilogue
from cortex.neuron.kernels.quantised.codes import PackedCodes
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.one_row import row_words
from cortex.neuron.kernels.quantised.unpack import layout_options
from cortex.neuron.kernels.quantised.vector import norm_gains, prepared_vector, times_vector

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
