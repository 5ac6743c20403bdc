"""A packed matrix times one vector: what a single stream's decode step is made of.

Its time goes into the bytes of the matrix and, close behind, into the instructions that unpack it. So codes are not
converted to numbers: a code OR-ed into the mantissa of 1.0 is 1 + code · 2⁻ᵏ, which is multiplied as it stands, and the
sum of the ones is subtracted once per unit. The norm before and the addition after are part of the same pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import INTERPRETED, gdc_launch_dependents, gdc_wait, jit, launch_options, tl, triton
from cortex.neuron.kernels.quantised.packing import PackedMatrix


class OneRowTiles(NamedTuple):
    """How a product with one vector is cut into programs."""

    outputs: int
    chunks: int
    """Of 128 columns, at a time."""
    warps: int


def one_row_tiles(chunks: int, outputs: int) -> OneRowTiles:
    """The fastest of a sweep on Hopper."""
    steps = 32 if chunks % 32 == 0 or chunks > 64 else 16 if chunks > 8 else 8
    if chunks > 32:
        return OneRowTiles(4, steps, warps=steps // 8)
    return OneRowTiles(8 if outputs > 8192 else 4, steps, warps=steps // 8)


def one_row_product(
    x: Tensor,
    matrix: PackedMatrix,
    out: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
) -> None:
    """out = norm(x) Wᵀ + bias + residual. x: [1, inputs]; out and residual: [1, outputs]"""
    layout, chunks = matrix.layout, matrix.low.shape[1] // 16
    tiles = one_row_tiles(chunks, matrix.outputs)
    paired = x.dtype == torch.bfloat16
    _one_row_kernel[(triton.cdiv(matrix.outputs, tiles.outputs),)](
        x.view(torch.int32) if paired else x,
        matrix.low,
        matrix.low if matrix.high is None else matrix.high,
        matrix.scales,
        bias,
        norm_weight if norm_weight is None or not paired else norm_weight.view(torch.int32),
        residual,
        out,
        matrix.outputs,
        eps,
        INPUTS=matrix.inputs,
        CHUNKS=chunks,
        PAIRED=paired,
        BIAS=bias is not None,
        NORM=norm_weight is not None,
        RESIDUAL=residual is not None,
        LOW_BITS=layout.low_bits,
        HIGH_BITS=layout.high_bits,
        GROUP=layout.group,
        ZERO=-1 if layout.zero is None else layout.zero,
        SCALE_WORDS=layout.scale_words,
        BLOCK_OUT=tiles.outputs,
        BLOCK_CHUNKS=tiles.chunks,
        PTX=not INTERPRETED,
        num_warps=tiles.warps,
        **launch_options(x.device),
    )


_FIELD_PTX = "{{\n .reg .b32 one;\n mov.b32 one, 0x3F800000;\n lop3.b32 $0, $1, {mask:#x}, one, 0xEA;\n}}\n"
_HIGH_FIELD = tl.constexpr(_FIELD_PTX.format(mask=0xF0000)) if tl is not None else ""
_LOW_FIELD = tl.constexpr(_FIELD_PTX.format(mask=0xF000)) if tl is not None else ""


@jit
def _one_row_kernel(
    x,
    low,
    high,
    scales,
    bias,
    norm_weight,
    residual,
    out,
    outputs,
    eps,
    INPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    PTX: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per BLOCK_OUT rows of the matrix. The first tile is on its way before the vector is there."""
    if OVERLAP:
        gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_inside = row < outputs
    line = tl.minimum(row, outputs - 1).to(tl.int64)[:, None]
    unit = tl.arange(0, BLOCK_CHUNKS * 16)[None, :]
    where = line * (CHUNKS * 16) + unit
    scale = scales + (line * (CHUNKS * 4) + (unit // 16) * 4 + unit % 4) * SCALE_WORDS
    whole: tl.constexpr = CHUNKS % BLOCK_CHUNKS == 0
    word, above, scale_0, scale_1 = _units(low, high, scale, where, unit, 0, CHUNKS, HIGH_BITS, SCALE_WORDS, whole)
    if OVERLAP:
        gdc_wait()
    total = tl.zeros((BLOCK_OUT, BLOCK_CHUNKS * 16), tl.float32)
    squares = tl.zeros((BLOCK_CHUNKS * 16,), tl.float32)
    for start in tl.static_range(0, CHUNKS, BLOCK_CHUNKS):
        if start + BLOCK_CHUNKS < CHUNKS:
            next_word, next_above, next_0, next_1 = _units(
                low, high, scale, where, unit, start + BLOCK_CHUNKS,
                CHUNKS, HIGH_BITS, SCALE_WORDS, whole,
            )  # fmt: skip
        a0, a1, a2, a3, b0, b1, b2, b3 = _values(x, start, INPUTS, PAIRED, BLOCK_CHUNKS)
        if NORM:
            squares += a0 * a0 + a1 * a1 + a2 * a2 + a3 * a3 + b0 * b0 + b1 * b1 + b2 * b2 + b3 * b3
            w0, w1, w2, w3, v0, v1, v2, v3 = _values(norm_weight, start, INPUTS, PAIRED, BLOCK_CHUNKS)
            a0, a1, a2, a3 = a0 * w0, a1 * w1, a2 * w2, a3 * w3
            b0, b1, b2, b3 = b0 * v0, b1 * v1, b2 * v2, b3 * v3
        if LOW_BITS == 4:
            first, second = _nibbles(word, a0, a1, a2, a3, b0, b1, b2, b3, PTX)
        else:
            first, second = _fields(word, a0, a1, a2, a3, b0, b1, b2, b3, LOW_BITS)
        if HIGH_BITS == 4:
            high_first, high_second = _nibbles(above, a0, a1, a2, a3, b0, b1, b2, b3, PTX)
            first += high_first * 16.0
            second += high_second * 16.0
        elif HIGH_BITS > 0:
            high_first, high_second = _fields(above, a0, a1, a2, a3, b0, b1, b2, b3, HIGH_BITS)
            first += high_first * (1 << LOW_BITS)
            second += high_second * (1 << LOW_BITS)
        sum_first = (a0 + b0 + a1 + b1)[None, :]
        sum_second = (a2 + b2 + a3 + b3)[None, :]
        if ZERO >= 0:
            total += _low_half(scale_0) * (first - sum_first * ZERO) + _high_half(scale_0) * (
                second - sum_second * ZERO
            )
        elif GROUP == 32:
            total += _low_half(scale_0) * (first + second) + _high_half(scale_0) * (sum_first + sum_second)
        else:
            total += _low_half(scale_0) * first + _high_half(scale_0) * sum_first
            total += _low_half(scale_1) * second + _high_half(scale_1) * sum_second
        if start + BLOCK_CHUNKS < CHUNKS:
            word, above, scale_0, scale_1 = next_word, next_above, next_0, next_1
    y = tl.sum(total, 1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
    if BIAS:
        y += tl.load(bias + row, mask=row_inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + row, mask=row_inside, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=row_inside)


@jit
def _units(
    low,
    high,
    scale,
    where,
    unit,
    start,
    CHUNKS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The words of BLOCK_CHUNKS chunks from `start` on; beyond the last chunk zeros."""
    if WHOLE:
        inside = None
        other = None
    else:
        inside = start * 16 + unit < CHUNKS * 16
        other = 0
    word = tl.load(low + where + start * 16, mask=inside, other=other, eviction_policy="evict_first").to(tl.int32)
    above = word
    if HIGH_BITS > 0:
        above = tl.load(high + where + start * 16, mask=inside, other=other, eviction_policy="evict_first").to(tl.int32)
    scale_0 = tl.load(scale + start * 4 * SCALE_WORDS, mask=inside, other=other, eviction_policy="evict_first")
    scale_1 = scale_0
    if SCALE_WORDS == 2:
        scale_1 = tl.load(scale + start * 4 * 2 + 1, mask=inside, other=other, eviction_policy="evict_first")
    return word, above, scale_0, scale_1


@jit
def _values(x, start, INPUTS: tl.constexpr, PAIRED: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """A vector's numbers by the slots of the units they are multiplied with. → a_j (h = 0), b_j (h = 1): [units]"""
    pair = start * 64 + tl.arange(0, BLOCK_CHUNKS * 64)
    if PAIRED:
        p0, p1, p2, p3 = _by_slot(tl.load(x + pair, mask=pair * 2 < INPUTS, other=0), BLOCK_CHUNKS)
        a0, a1, a2, a3 = _low_half(p0), _low_half(p1), _low_half(p2), _low_half(p3)
        b0, b1, b2, b3 = _high_half(p0), _high_half(p1), _high_half(p2), _high_half(p3)
    else:
        inside = pair * 2 < INPUTS
        a0, a1, a2, a3 = _by_slot(tl.load(x + pair * 2, mask=inside, other=0.0).to(tl.float32), BLOCK_CHUNKS)
        b0, b1, b2, b3 = _by_slot(tl.load(x + pair * 2 + 1, mask=inside, other=0.0).to(tl.float32), BLOCK_CHUNKS)
    return a0, a1, a2, a3, b0, b1, b2, b3


@jit
def _by_slot(pairs, BLOCK_CHUNKS: tl.constexpr):
    """[chunks · (v, j, t)] → for each j: [chunks · (t, v)]"""
    pairs = tl.permute(tl.reshape(pairs, (BLOCK_CHUNKS, 4, 4, 4)), (0, 3, 1, 2))
    even, odd = tl.split(tl.reshape(pairs, (BLOCK_CHUNKS * 16, 2, 2)))
    p0, p2 = tl.split(even)
    p1, p3 = tl.split(odd)
    return p0, p1, p2, p3


@jit
def _nibbles(word, a0, a1, a2, a3, b0, b1, b2, b3, PTX: tl.constexpr):
    """Σ code · value over the slots of a 4-bit plane, for the first 16 columns of a group (j = 0, 1) and the others."""
    up = word << 8
    down = word >> 8
    first = _high_field(word << 16, PTX) * a0[None, :] - (a0 + b0)[None, :]
    first += _high_field(word, PTX) * b0[None, :]
    first_low = _low_field(up, PTX) * a1[None, :] - (a1 + b1)[None, :]
    first_low += _low_field(down, PTX) * b1[None, :]
    second = _high_field(up, PTX) * a2[None, :] - (a2 + b2)[None, :]
    second += _high_field(down, PTX) * b2[None, :]
    second_low = _low_field(word, PTX) * a3[None, :] - (a3 + b3)[None, :]
    second_low += _low_field(word >> 16, PTX) * b3[None, :]
    return first * 128.0 + first_low * 2048.0, second * 128.0 + second_low * 2048.0


@jit
def _fields(word, a0, a1, a2, a3, b0, b1, b2, b3, BITS: tl.constexpr):
    """The same for a plane of one or two bits."""
    first = _field(word, 0, BITS) * a0[None, :] + _field(word, 1, BITS) * a1[None, :]
    first += _field(word, 4, BITS) * b0[None, :] + _field(word, 5, BITS) * b1[None, :]
    second = _field(word, 2, BITS) * a2[None, :] + _field(word, 3, BITS) * a3[None, :]
    second += _field(word, 6, BITS) * b2[None, :] + _field(word, 7, BITS) * b3[None, :]
    return first, second


@jit
def _field(word, SLOT: tl.constexpr, BITS: tl.constexpr):
    return ((word >> (SLOT * BITS)) & ((1 << BITS) - 1)).to(tl.float32)


@jit
def _high_field(word, PTX: tl.constexpr):
    """1 + (bits 16–19) / 128"""
    if PTX:
        return tl.inline_asm_elementwise(_HIGH_FIELD, "=r,r", [word], dtype=tl.float32, is_pure=True, pack=1)
    return ((word & 0xF0000) | 0x3F800000).to(tl.float32, bitcast=True)


@jit
def _low_field(word, PTX: tl.constexpr):
    """1 + (bits 12–15) / 2048"""
    if PTX:
        return tl.inline_asm_elementwise(_LOW_FIELD, "=r,r", [word], dtype=tl.float32, is_pure=True, pack=1)
    return ((word & 0xF000) | 0x3F800000).to(tl.float32, bitcast=True)


@jit
def _low_half(words):
    return (words << 16).to(tl.float32, bitcast=True)


@jit
def _high_half(words):
    return (words & -65536).to(tl.float32, bitcast=True)
