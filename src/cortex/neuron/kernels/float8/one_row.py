"""GEMV with an FP8 matrix: the input row keeps its precision.

Four weights of the matrix are one word. A program prepares the row once, as float16 values in units of a sixteenth of
the largest, and takes block after block of rows of the matrix, the next one on its way while one is multiplied. Eight
products are added in float16, at most 448 x 16 each, so that nothing overflows. All other sums are in float32. The norm
before and the addition after are part of the pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import activate_reference
from cortex.neuron.kernels.expert_pairs import ExpertPairs
from cortex.neuron.kernels.float8.codes import Float8Codes, widened
from cortex.neuron.kernels.float8.support import has_float8_products
from cortex.neuron.kernels.jit import constant, gdc_launch_dependents, gdc_wait, jit, tl, triton
from cortex.neuron.kernels.matrix import Epilogue, Prologue
from cortex.neuron.kernels.norm import rms_norm_reference
from cortex.neuron.kernels.products.one_row import OneRowTiles, added_to_row, launch_one_row, store_row


def one_row_tiles(inputs: int) -> OneRowTiles:
    """The fastest of a sweep on Hopper. Longer rows go by in pieces."""
    words = triton.next_power_of_2(inputs // 4)
    if words > 2048:
        outputs, warps, programs = 2, 8, 2 if words <= 4096 else 0
    else:
        outputs, warps = 4, max(1, words // 256)
        programs = 16 // warps
    registers = 65536 // (programs * warps * 32) if programs else None
    return OneRowTiles(outputs, min(words, 4096), warps, programs, registers)


def one_row_float8_product(
    x: Tensor,
    codes: Float8Codes,
    out: Tensor,
    prologue: Prologue,
    epilogue: Epilogue,
    pairs: ExpertPairs | None = None,
) -> None:
    """See `Matrix.product`; the prologue has no activation. x: [1, inputs]; out: [1, outputs]

    With `pairs`, each of a row and one of its experts is a vector times that expert's rows of the matrix.
    x: [pairs / pairs.per_row, inputs]; out: [pairs, outputs of an expert]
    """
    norm = prologue.norm
    tiles = one_row_tiles(codes.inputs)
    launch_one_row(
        _one_row_kernel,
        x,
        (codes.codes.view(torch.int32), codes.scales),
        norm,
        prologue.eps,
        epilogue,
        out,
        tiles,
        pairs,
        INPUTS=codes.inputs,
        BLOCK=codes.layout.block,
        NATIVE=has_float8_products(x.device),
        WORDS=tiles.width,
    )


def one_row_reference(x: Tensor, codes: Float8Codes, prologue: Prologue, epilogue: Epilogue) -> Tensor:
    values = x.float()
    if prologue.norm is not None:
        values = rms_norm_reference(values, prologue.norm.float(), prologue.eps)
    y = F.linear(values, widened(codes))
    if epilogue.activation is not None:
        y = activate_reference(y, epilogue.activation)
    if epilogue.bias is not None:
        y += epilogue.bias
    return (y if epilogue.residual is None else y + epilogue.residual).to(x.dtype)


@jit
def wide(codes):
    """Float32 values of bytes: shifted, their exponent is 2¹²⁰ too small."""
    bits = codes.to(tl.int32)
    shifted = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return shifted.to(tl.float32, bitcast=True) * 1.329227995784916e36


_DOT = constant("""{
.reg .b16 low, high; .reg .b32 first, second, sum; .reg .f32 even, odd;
mov.b32 {low, high}, $4; cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high;
mul.rn.f16x2 sum, first, $8; fma.rn.f16x2 sum, second, $12, sum;
mov.b32 {low, high}, $5; cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high;
fma.rn.f16x2 sum, first, $9, sum; fma.rn.f16x2 sum, second, $13, sum;
mov.b32 {low, high}, $6; cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high;
fma.rn.f16x2 sum, first, $10, sum; fma.rn.f16x2 sum, second, $14, sum;
mov.b32 {low, high}, $7; cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high;
fma.rn.f16x2 sum, first, $11, sum; fma.rn.f16x2 sum, second, $15, sum;
mov.b32 {low, high}, sum; cvt.f32.f16 even, low; cvt.f32.f16 odd, high;
add.f32 $0, even, odd; mov.f32 $1, 0f00000000; mov.f32 $2, 0f00000000; mov.f32 $3, 0f00000000;
}""")
"""Four words of one row of the matrix, which a thread has loaded at once: their sum stands at the first."""


@jit
def _dot(words, first, second, NATIVE: tl.constexpr):
    """Sums of the weights in words times the values of the row. words: [rows, words] → [rows, words / 4] float32"""
    if NATIVE:
        kinds: tl.constexpr = "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r"
        sums = tl.inline_asm_elementwise(_DOT, kinds, [words, first, second], tl.float32, is_pure=True, pack=4)
    else:
        sums = wide(words & 0xFF) * _half(first) + wide((words >> 8) & 0xFF) * _half(first >> 16)
        sums += wide((words >> 16) & 0xFF) * _half(second) + wide((words >> 24) & 0xFF) * _half(second >> 16)
    return tl.sum(tl.reshape(sums, (words.shape[0], words.shape[1] // 4, 4)), 2)


@jit
def _half(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _pair(low, high):
    """Two float16 values in a word."""
    return _bits(low) | (_bits(high) << 16)


@jit
def _bits(number):
    return number.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@jit
def _prepared(x, gain, start, INPUTS: tl.constexpr, NORM: tl.constexpr, WORDS: tl.constexpr):
    """The row's values from column `start` on, times `gain`, as pairs of float16: columns 0 and 1 of each word, then
    2 and 3; their unit; and the sum of squares without `gain`."""
    column = start + tl.arange(0, 4 * WORDS)
    value = tl.load(x + column, mask=column < INPUTS, other=0.0).to(tl.float32)
    squares = 0.0
    if NORM:
        squares = tl.sum(value * value, 0)
        value *= gain
    unit = tl.maximum(tl.max(tl.abs(value), 0), 1e-30) / 16
    even, odd = tl.split(tl.reshape(value * (1.0 / unit), (WORDS, 2, 2)))
    value_0, value_2 = tl.split(even)
    value_1, value_3 = tl.split(odd)
    return _pair(value_0, value_1)[None, :], _pair(value_2, value_3)[None, :], unit, squares


@jit
def _gain(norm_weight, start, INPUTS: tl.constexpr, NORM: tl.constexpr, WORDS: tl.constexpr):
    gain = 1.0
    if NORM:
        column = start + tl.arange(0, 4 * WORDS)
        gain = tl.load(norm_weight + column, mask=column < INPUTS, other=0.0).to(tl.float32)
    return gain


@jit
def _matrix_rows(block, outputs, ACTIVATION: tl.constexpr, WHOLE: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Which rows of the matrix a block has."""
    rows: tl.constexpr = BLOCK_OUT // 2 if ACTIVATION else BLOCK_OUT
    line = tl.arange(0, BLOCK_OUT)
    row = block * rows + line % rows
    if not WHOLE:
        row = tl.minimum(row, outputs - 1)
    if ACTIVATION:
        row += line // rows * outputs
    return row


@jit
def _words(
    weight,
    scales,
    block,
    num_blocks,
    outputs,
    start,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The words of a block of rows from column `start` on, and a scale for each sixteen columns.

    Undefined beyond the last block. Beyond the last column the row's values are 0. Scales of rows are repeated: the
    sums take the layout of what they are multiplied with, and in this one few threads exchange them to add them up.
    """
    row = _matrix_rows(block, outputs, ACTIVATION, WHOLE, BLOCK_OUT)[:, None]
    exists = tl.full((1, 1), 0, tl.int32) + block < num_blocks
    word = start // 4 + tl.arange(0, WORDS)[None, :]
    inside = exists if INPUTS % (4 * WORDS) == 0 else exists & (word < INPUTS // 4)
    other: tl.constexpr = None if INPUTS % (4 * WORDS) == 0 else 0
    where = weight + row.to(tl.int64) * (INPUTS // 4) + word
    words = tl.load(where, mask=inside, other=other, eviction_policy="evict_first")
    down: tl.constexpr = BLOCK if BLOCK > 0 else 1
    across: tl.constexpr = BLOCK if BLOCK > 0 else INPUTS
    part = start // 16 + tl.arange(0, WORDS // 4)[None, :]
    scale = scales + row // down * (INPUTS // across) + part // (across // 16)
    return words, tl.load(scale, mask=exists & (part * 16 < INPUTS), other=0.0)


@jit(do_not_specialize=["num_blocks"])
def _one_row_kernel(
    x,
    weight,
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
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for one or more blocks of BLOCK_OUT rows of the matrix, or for one if the row goes by in pieces.

    With an ACTIVATION half of the rows are the gate's. WHOLE: every block has all its rows. PAIRS_PER_ROW: the second
    coordinate is a pair, whose expert's rows begin further down; 0: there are no pairs.
    """
    if OVERLAP and PAIRS_PER_ROW == 0:
        gdc_launch_dependents()
    if PAIRS_PER_ROW > 0:
        if OVERLAP:
            gdc_wait()  # the kernel before chose the experts
            gdc_launch_dependents()  # the next one may read their ids at once
        pair = tl.program_id(1).to(tl.int64)
        expert_row = tl.load(chosen + pair).to(tl.int64) * (outputs * (2 if ACTIVATION else 1))
        weight += expert_row * (INPUTS // 4)
        scales += expert_row // BLOCK * (INPUTS // BLOCK) if BLOCK > 0 else expert_row
        x += pair // PAIRS_PER_ROW * INPUTS
        out += pair * outputs
        if BIAS:
            bias += expert_row
    block = tl.program_id(0)
    words, scale = _words(
        weight, scales, block, num_blocks, outputs, 0, INPUTS, BLOCK, ACTIVATION, WHOLE, BLOCK_OUT, WORDS
    )  # fmt: skip
    gain = _gain(norm_weight, 0, INPUTS, NORM, WORDS)
    if OVERLAP and PAIRS_PER_ROW == 0:
        gdc_wait()
    share = 1.0
    if WEIGHTED:
        share = tl.load(weights + tl.program_id(1))
    factor = share
    first, second, unit, squares = _prepared(x, gain, 0, INPUTS, NORM, WORDS)
    if INPUTS <= 4 * WORDS:
        factor *= unit
        if NORM:
            factor *= tl.rsqrt(squares / INPUTS + eps)
        while block < num_blocks:
            following = block + tl.num_programs(0)
            added = added_to_row(bias, residual, block, outputs, BIAS, RESIDUAL, ACTIVATION, BLOCK_OUT) * share
            next_words, next_scale = _words(
                weight, scales, following, num_blocks, outputs, 0, INPUTS, BLOCK, ACTIVATION, WHOLE, BLOCK_OUT, WORDS
            )  # fmt: skip
            y = tl.sum(_dot(words, first, second, NATIVE) * scale, 1) * factor
            store_row(y, added, out, block, outputs, BIAS or RESIDUAL, ACTIVATION, BLOCK_OUT)
            block = following
            words, scale = next_words, next_scale
    else:
        added = added_to_row(bias, residual, block, outputs, BIAS, RESIDUAL, ACTIVATION, BLOCK_OUT) * share
        total = tl.zeros((BLOCK_OUT, WORDS // 4), tl.float32)
        for start in tl.static_range(0, INPUTS, 4 * WORDS):
            if start + 4 * WORDS < INPUTS:
                next_words, next_scale = _words(
                    weight, scales, block, num_blocks, outputs, start + 4 * WORDS,
                    INPUTS, BLOCK, ACTIVATION, WHOLE, BLOCK_OUT, WORDS,
                )  # fmt: skip
            if start > 0:
                gain = _gain(norm_weight, start, INPUTS, NORM, WORDS)
                first, second, unit, more = _prepared(x, gain, start, INPUTS, NORM, WORDS)
                squares += more
            total += _dot(words, first, second, NATIVE) * (scale * unit)
            if start + 4 * WORDS < INPUTS:
                words, scale = next_words, next_scale
        if NORM:
            factor *= tl.rsqrt(squares / INPUTS + eps)
        store_row(tl.sum(total, 1) * factor, added, out, block, outputs, BIAS or RESIDUAL, ACTIVATION, BLOCK_OUT)
