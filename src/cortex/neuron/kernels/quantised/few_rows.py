"""Small-batch GEMM: a packed matrix of more than four bits times two to eight rows, as in a decode step.

A program takes sixteen rows of the matrix after the other, and a stretch of their columns. Its warps share the columns,
so the rows' values for them stay in registers from the first row to the last, and words go from memory into
registers, without a barrier between them and the tensor cores. The words of the next sixteen rows are on their way
while these are multiplied.

The sums over each stretch are written as they are. What comes after the product adds them, in a fixed order. So does
the norm before it: the vectors are multiplied by its weights, and the sums by its factor, which the squares of all
stretches make up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortex.neuron.kernels.activations import activated, activation_number
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, jit, launch_options, num_processors, tl, triton
from cortex.neuron.kernels.matrix import Epilogue, Prologue
from cortex.neuron.kernels.quantised.codes import PackedCodes
from cortex.neuron.kernels.quantised.layout import Layout
from cortex.neuron.kernels.quantised.unpack import add_product, layout_options, restored, unpack_units

MAX_FEW_ROWS = 8
"""The columns of the smallest product of tensor cores."""
_MOST_OUTPUTS = {3: 65_536, 5: 65_536, 6: 16_384, 8: 65_536}
"""By the bits of the codes: matrices with more are multiplied in `product.py`."""
_TILE_ROWS = 16
"""The rows of that product."""


class FewRowsTiles(NamedTuple):
    """How a small-batch GEMM is cut into programs."""

    chunks: int
    """Chunks of 128 columns, for each program."""
    warps: int
    programs: int
    """Programs on each processor."""
    registers: int
    """The most registers of a thread, so that the programs fit."""


def max_few_rows(layout: Layout, outputs: int) -> int:
    """How many rows are multiplied here. Matrices with one plane are faster in `product.py`, by measurements, and so
    are those with many outputs, where the parts of the sums are as many bytes as a part of the matrix."""
    most_outputs = _MOST_OUTPUTS.get(layout.bits, 0)
    return MAX_FEW_ROWS if outputs <= most_outputs else 1


def few_rows_tiles(layout: Layout) -> FewRowsTiles:
    """The fastest of a sweep on Hopper. Codes of eight bits take more registers."""
    return FewRowsTiles(8, 4, 3, 168) if layout.low_bits == 8 else FewRowsTiles(8, 4, 4, 128)


class ProductParts(NamedTuple):
    """The sums over each stretch of columns."""

    products: Tensor
    """[stretches, rows, outputs] float32"""
    squares: Tensor | None
    """Sums of the squared inputs, [stretches, rows] float32; None: there is no norm."""


def few_rows_product(x: Tensor, codes: PackedCodes, out: Tensor, prologue: Prologue, epilogue: Epilogue) -> None:
    """See `Matrix.product`; the prologue has no activation. x: [at most 8, inputs]. `out` may be the residual."""
    parts = _products(x, codes, prologue.norm)
    (rows, outputs), bias, residual = out.shape, epilogue.bias, epilogue.residual
    block = 1024 if epilogue.activation is None else 512
    _sum_kernel[(rows, triton.cdiv(outputs, block))](
        parts.products,
        parts.squares,
        bias,
        residual,
        out,
        outputs,
        out.stride(0),
        0 if residual is None else residual.stride(0),
        prologue.eps,
        INPUTS=codes.inputs,
        PARTS=len(parts.products),
        NORM=parts.squares is not None,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        ACTIVATION=activation_number(epilogue.activation),
        BLOCK=block,
        num_warps=4,
        **launch_options(out.device),
    )


def _products(x: Tensor, codes: PackedCodes, norm_weight: Tensor | None) -> ProductParts:
    rows, layout = len(x), codes.layout
    tiles = few_rows_tiles(layout)
    chunks = codes.low.shape[1] // 16
    num_parts, num_blocks = triton.cdiv(chunks, tiles.chunks), triton.cdiv(codes.outputs, _TILE_ROWS)
    products = torch.empty(num_parts, rows, codes.outputs, dtype=torch.float32, device=x.device)
    squares = None if norm_weight is None else products.new_empty(num_parts, rows)
    programs = min(num_blocks, max(1, tiles.programs * num_processors(x.device) // num_parts))
    _few_rows_kernel[(programs, num_parts)](
        x,
        codes.low,
        codes.high,
        codes.scales,
        norm_weight,
        products,
        squares,
        rows,
        codes.outputs,
        num_blocks,
        INPUTS=codes.inputs,
        CHUNKS=chunks,
        PART_CHUNKS=tiles.chunks,
        WARPS=tiles.warps,
        NORM=norm_weight is not None,
        WHOLE=codes.outputs % _TILE_ROWS == 0,
        TILE_ROWS=_TILE_ROWS,
        ROWS=MAX_FEW_ROWS,
        num_warps=tiles.warps,
        maxnreg=tiles.registers,
        **layout_options(layout),
        **launch_options(x.device),
    )
    return ProductParts(products, squares)


@jit(do_not_specialize=["rows", "num_blocks"])
def _few_rows_kernel(
    x,
    low,
    high,
    scales,
    norm_weight,
    products,
    squares,
    rows,
    outputs,
    num_blocks,
    INPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PART_CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The second coordinate is a stretch of PART_CHUNKS chunks, of which each warp takes some.

    WHOLE: every block has all its rows, so that their distance is a constant in the machine code.
    """
    if OVERLAP:
        gdc_launch_dependents()
    part = tl.program_id(1)
    turn = tl.arange(
        0, PART_CHUNKS
    )  # warps take turns; so that each reads whole lines of the cache, theirs are adjacent
    chunk = part * PART_CHUNKS + turn % WARPS * (PART_CHUNKS // WARPS) + turn // WARPS
    block = tl.program_id(0)
    words = _words(
        low, high, scales, block, chunk, outputs, num_blocks,
        CHUNKS, PART_CHUNKS, WHOLE, TILE_ROWS, LOW_BITS, HIGH_BITS, SCALE_WORDS,
    )  # fmt: skip
    if OVERLAP:
        gdc_wait()
    row = tl.arange(0, ROWS)
    column = chunk[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (row < rows)[None, None, :]
    if INPUTS % (PART_CHUNKS * 128) != 0:
        inside = inside & (column < INPUTS)[:, :, None]
    vectors = tl.load(x + row[None, None, :] * INPUTS + column[:, :, None], mask=inside, other=0.0)
    if NORM:
        if block == 0:
            exact = tl.reshape(vectors.to(tl.float32), (PART_CHUNKS * 128, ROWS))
            tl.store(squares + part * rows + row, tl.sum(exact * exact, 0), mask=row < rows)
        gain = tl.load(norm_weight + column, mask=column < INPUTS, other=0.0).to(tl.float32)
        vectors = (vectors.to(tl.float32) * gain[:, :, None]).to(x.dtype.element_ty)
    vectors = tl.reshape(vectors, (PART_CHUNKS, 4, 2, 2, 4, 2, ROWS))  # chunk, v, j1, j0, t, h, row
    # A thread supplies four columns next to each other to the tensor cores: in this order, those of its units.
    vectors = tl.permute(vectors, (0, 1, 2, 4, 3, 5, 6))
    vectors = tl.reshape(vectors, (PART_CHUNKS, 128, ROWS))
    while block < num_blocks:
        following = block + tl.num_programs(0)
        next_words = _words(
            low, high, scales, following, chunk, outputs, num_blocks,
            CHUNKS, PART_CHUNKS, WHOLE, TILE_ROWS, LOW_BITS, HIGH_BITS, SCALE_WORDS,
        )  # fmt: skip
        upper = unpack_units(
            words[0], words[1], words[2], words[3], LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK, PTX
        )  # fmt: skip
        lower = unpack_units(
            words[4], words[5], words[6], words[7], LOW_BITS, HIGH_BITS, GROUP, ZERO, CODEBOOK, PTX
        )  # fmt: skip
        weights = tl.reshape(tl.join(upper, lower), (8, PART_CHUNKS, 4, 4, 2, 2, 2, 2))
        # row, chunk, t, v, h, j0, j1, half → chunk, half, row, v, j1, t, j0, h
        weights = tl.permute(weights, (1, 7, 0, 3, 6, 2, 5, 4))
        weights = tl.reshape(weights, (PART_CHUNKS, TILE_ROWS, 128))
        total = add_product(tl.zeros((PART_CHUNKS, TILE_ROWS, ROWS), tl.float32), weights, vectors)
        total = restored(tl.sum(total, 0), x.dtype.element_ty)  # [matrix rows, rows]
        output = block * TILE_ROWS + tl.arange(0, TILE_ROWS)
        stored = (row < rows)[None, :]
        if not WHOLE:
            stored = stored & (output < outputs)[:, None]
        tl.store(products + (part * rows + row)[None, :] * outputs + output[:, None], total, mask=stored)
        block = following
        words = next_words


@jit
def _words(
    low,
    high,
    scales,
    block,
    chunk,
    outputs,
    num_blocks,
    CHUNKS: tl.constexpr,
    PART_CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
):
    """The words of sixteen rows: of both planes and of the scales of the upper eight, then of the lower eight.

    Those of the last block beyond it. Beyond the last chunk the scales are 0.
    """
    first = tl.minimum(block, num_blocks - 1).to(tl.int64) * TILE_ROWS
    low += first * (CHUNKS * 16)
    high += first * (CHUNKS * 16)
    scales += first * (CHUNKS * 4 * SCALE_WORDS)
    last = (outputs - 1 - first).to(tl.int32)
    upper = _half(low, high, scales, 0, chunk, last, CHUNKS, PART_CHUNKS, WHOLE, LOW_BITS, HIGH_BITS, SCALE_WORDS)
    lower = _half(low, high, scales, 8, chunk, last, CHUNKS, PART_CHUNKS, WHOLE, LOW_BITS, HIGH_BITS, SCALE_WORDS)
    return upper + lower


@jit
def _half(
    low,
    high,
    scales,
    first,
    chunk,
    last,
    CHUNKS: tl.constexpr,
    PART_CHUNKS: tl.constexpr,
    WHOLE: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
):
    """The words of eight rows. → [8, chunks, 16] each. The rows come first, so that a warp loads eight of them."""
    line = first + tl.arange(0, 8)
    if not WHOLE:
        line = tl.minimum(line, last)
    unit = tl.arange(0, 16)[None, None, :]
    # The compiler sees four in a row, and gives a thread four units of any plane.
    where = line[:, None, None] * (CHUNKS * 16) + chunk[None, :, None] * 16 + (unit // 4 * 4 + unit % 4)
    scale = scales + (line[:, None, None] * (CHUNKS * 4) + chunk[None, :, None] * 4 + unit % 4) * SCALE_WORDS
    inside = None
    other = None
    if CHUNKS % PART_CHUNKS != 0:
        inside = (chunk < CHUNKS)[None, :, None]
        other = 0
    word = tl.load(low + where, mask=inside, other=other).to(tl.int32)
    above = word
    if HIGH_BITS > 0 or LOW_BITS == 8:
        above = tl.load(high + where, mask=inside, other=other).to(tl.int32)
    scale_0 = tl.load(scale, mask=inside, other=other).to(tl.int32)
    scale_1 = scale_0
    if SCALE_WORDS == 2:
        scale_1 = tl.load(scale + 1, mask=inside, other=other)
    return word, above, scale_0, scale_1


@jit
def _sum_kernel(
    products,
    squares,
    bias,
    residual,
    out,
    outputs,
    out_stride,
    residual_stride,
    eps,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row and BLOCK outputs. ACTIVATION: a row has twice as many products, the gate's first."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    columns = 2 * outputs if ACTIVATION else outputs
    factor = 1.0
    if NORM:
        factor = _norm_factor(squares, row, eps, INPUTS, PARTS)
    total = _sum(products, row, output, inside, columns, PARTS, BLOCK) * factor
    if ACTIVATION:
        up = _sum(products, row, outputs + output, inside, columns, PARTS, BLOCK) * factor
        total = activated(total, up, ACTIVATION)
    if BIAS:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        total += tl.load(residual + row * residual_stride + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + output, total.to(out.dtype.element_ty), mask=inside)


@jit
def _sum(products, row, column, inside, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds all parts of a row in these columns, in order."""
    rows = tl.num_programs(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(products + (part * rows + row) * columns + column, mask=inside, other=0.0)
    return total


@jit
def _norm_factor(squares, row, eps, INPUTS: tl.constexpr, PARTS: tl.constexpr):
    total = 0.0
    for part in tl.static_range(PARTS):
        total += tl.load(squares + part * tl.num_programs(0) + row)
    return tl.rsqrt(total / INPUTS + eps)
