"""A packed matrix times one vector: what a single stream's decode step is made of.

Its time goes into the bytes of the matrix and, close behind, into the instructions that unpack it. So codes are not
converted to numbers: a code put into the mantissa of 1.0 is 1 + code · 2⁻¹⁵, which is multiplied as it stands, and the
sum of the ones is subtracted once per unit. The norm before and the addition after are part of the same pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import (
    INTERPRETED,
    constant,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    launch_options,
    tl,
    triton,
)
from cortex.neuron.kernels.norm import rms_norm
from cortex.neuron.kernels.quantised.packing import PackedMatrix
from cortex.neuron.kernels.quantised.unpack import high_half, low_half


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
    _launch(x, matrix, out, bias, norm_weight, eps, residual)


def gated_one_row_product(x: Tensor, gate_up: PackedMatrix, out: Tensor, norm_weight: Tensor, eps: float) -> None:
    """out = silu(norm(x) Gᵀ) · norm(x) Uᵀ. x: [1, inputs]; gate_up: [2 · outputs, inputs]; out: [1, outputs]"""
    _launch(x, gate_up, out, None, norm_weight, eps, None, gated=True)


def expert_rows_product(
    x: Tensor,
    matrix: PackedMatrix,
    out: Tensor,
    chosen: Tensor,
    weights: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    *,
    pairs_per_row: int,
) -> None:
    """Each pair of a row and one of its experts: a vector times that expert's rows of the matrix.

    Without `weights` the rows are gate and up: out = silu(norm(x) Gᵀ) · norm(x) Uᵀ; with them out = weight · x Wᵀ.
    x: [pairs / pairs_per_row, inputs]; out: [pairs, outputs]; chosen, weights: [pairs]
    """
    pairs = ExpertPairs(chosen, weights, len(out), pairs_per_row)
    _launch(x, matrix, out, None, norm_weight, eps, None, gated=weights is None, pairs=pairs)


class ExpertPairs(NamedTuple):
    """Which expert each pair takes, and with which weight."""

    chosen: Tensor
    weights: Tensor | None
    num_pairs: int
    per_row: int


def _launch(
    x: Tensor,
    matrix: PackedMatrix,
    out: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    *,
    gated: bool = False,
    pairs: ExpertPairs | None = None,
) -> None:
    layout, chunks = matrix.layout, matrix.low.shape[1] // 16
    outputs = out.shape[1]
    tiles = one_row_tiles(chunks, (2 * outputs if gated else outputs) * (pairs.num_pairs if pairs else 1))
    paired = x.dtype == torch.bfloat16
    if norm_weight is not None and norm_weight.dtype != x.dtype:  # zero-centred norms are kept in float32
        x, norm_weight = rms_norm(x, norm_weight, eps), None
    rows = tiles.outputs // 2 if gated else tiles.outputs
    _one_row_kernel[(triton.cdiv(outputs, rows), pairs.num_pairs if pairs else 1)](
        x.view(torch.int32) if paired else x,
        matrix.low,
        matrix.high,
        matrix.scales,
        bias,
        norm_weight if norm_weight is None or not paired else norm_weight.view(torch.int32),
        residual,
        out,
        pairs.chosen if pairs else None,
        pairs.weights if pairs else None,
        outputs,
        eps,
        INPUTS=matrix.inputs,
        CHUNKS=chunks,
        PAIRED=paired,
        BIAS=bias is not None,
        NORM=norm_weight is not None,
        RESIDUAL=residual is not None,
        GATED=gated,
        PAIRS_PER_ROW=pairs.per_row if pairs else 0,
        WEIGHTED=pairs is not None and pairs.weights is not None,
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


_CODE_PTX = "prmt.b32 $0, $1, $2, 0x76{byte}4;"
_CODE_0, _CODE_1, _CODE_2, _CODE_3 = (constant(_CODE_PTX.format(byte=byte)) for byte in range(4))


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
    chosen,
    weights,
    outputs,
    eps,
    INPUTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    WEIGHTED: tl.constexpr,
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
    """One program per BLOCK_OUT rows of the matrix. The first tile is on its way before the vector is there.

    GATED: the matrix has twice `outputs` rows, the gate's first; a program takes as many of either.
    PAIRS_PER_ROW: the second coordinate is a pair, whose expert's rows begin further down; 0: there are no pairs.
    """
    if OVERLAP:
        gdc_launch_dependents()
    one = 0x3F800000 + (
        outputs >> 30
    )  # computed, so that it stays in a register: a constant would be fetched each time
    if GATED:
        half: tl.constexpr = BLOCK_OUT // 2
        tile = tl.arange(0, BLOCK_OUT)
        line = tl.minimum(tl.program_id(0) * half + tile % half, outputs - 1) + tile // half * outputs
        row = tl.program_id(0) * half + tl.arange(0, half)
    else:
        row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        line = tl.minimum(row, outputs - 1)
    row_inside = row < outputs
    line = line.to(tl.int64)[:, None]
    if PAIRS_PER_ROW > 0:
        if OVERLAP:
            gdc_wait()  # the kernel before chose the experts
        pair = tl.program_id(1).to(tl.int64)
        line += tl.load(chosen + pair).to(tl.int64) * (outputs * (2 if GATED else 1))
        x += pair // PAIRS_PER_ROW * (INPUTS // 2 if PAIRED else INPUTS)
        out += pair * outputs
    unit = tl.arange(0, BLOCK_CHUNKS * 16)[None, :]
    where = line * (CHUNKS * 16) + unit
    scale = scales + (line * (CHUNKS * 4) + (unit // 16) * 4 + unit % 4) * SCALE_WORDS
    whole: tl.constexpr = CHUNKS % BLOCK_CHUNKS == 0
    word, above, scale_0, scale_1 = _units(
        low, high, scale, where, unit, 0, CHUNKS, LOW_BITS, HIGH_BITS, SCALE_WORDS, whole
    )
    if OVERLAP and PAIRS_PER_ROW == 0:
        gdc_wait()
    total = tl.zeros((BLOCK_OUT, BLOCK_CHUNKS * 16), tl.float32)
    squares = tl.zeros((BLOCK_CHUNKS * 16,), tl.float32)
    for start in tl.static_range(0, CHUNKS, BLOCK_CHUNKS):
        if start + BLOCK_CHUNKS < CHUNKS:
            next_word, next_above, next_0, next_1 = _units(
                low, high, scale, where, unit, start + BLOCK_CHUNKS,
                CHUNKS, LOW_BITS, HIGH_BITS, SCALE_WORDS, whole,
            )  # fmt: skip
        a0, a1, a2, a3, b0, b1, b2, b3 = _values(x, start, INPUTS, PAIRED, BLOCK_CHUNKS)
        if NORM:
            squares += a0 * a0 + a1 * a1 + a2 * a2 + a3 * a3 + b0 * b0 + b1 * b1 + b2 * b2 + b3 * b3
            w0, w1, w2, w3, v0, v1, v2, v3 = _values(norm_weight, start, INPUTS, PAIRED, BLOCK_CHUNKS)
            a0, a1, a2, a3 = a0 * w0, a1 * w1, a2 * w2, a3 * w3
            b0, b1, b2, b3 = b0 * v0, b1 * v1, b2 * v2, b3 * v3
        even, odd = _code_bytes(word, above, LOW_BITS, HIGH_BITS)
        first = _code(even, one, 0, PTX) * a0[None, :] - (a0 + b0 + a1 + b1)[None, :]
        first += _code(even, one, 2, PTX) * b0[None, :]
        first += _code(odd, one, 0, PTX) * a1[None, :]
        first += _code(odd, one, 2, PTX) * b1[None, :]
        second = _code(even, one, 1, PTX) * a2[None, :] - (a2 + b2 + a3 + b3)[None, :]
        second += _code(even, one, 3, PTX) * b2[None, :]
        second += _code(odd, one, 1, PTX) * a3[None, :]
        second += _code(odd, one, 3, PTX) * b3[None, :]
        sum_first = (a0 + b0 + a1 + b1)[None, :]
        sum_second = (a2 + b2 + a3 + b3)[None, :]
        if ZERO >= 0:
            total += low_half(scale_0) * (first * 32768.0 - sum_first * ZERO)
            total += high_half(scale_0) * (second * 32768.0 - sum_second * ZERO)
        elif GROUP == 32:
            total += low_half(scale_0) * ((first + second) * 32768.0)
            total += high_half(scale_0) * (sum_first + sum_second)
        else:
            total += low_half(scale_0) * (first * 32768.0) + high_half(scale_0) * sum_first
            total += low_half(scale_1) * (second * 32768.0) + high_half(scale_1) * sum_second
        if start + BLOCK_CHUNKS < CHUNKS:
            word, above, scale_0, scale_1 = next_word, next_above, next_0, next_1
    y = tl.sum(total, 1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, BLOCK_OUT // 2)), (1, 0)))
        y = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        y *= tl.load(weights + tl.program_id(1))
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
    LOW_BITS: tl.constexpr,
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
    if HIGH_BITS > 0 or LOW_BITS == 8:
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
        a0, a1, a2, a3 = low_half(p0), low_half(p1), low_half(p2), low_half(p3)
        b0, b1, b2, b3 = high_half(p0), high_half(p1), high_half(p2), high_half(p3)
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
def _code_bytes(low, high, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr):
    """The codes of a unit as bytes: slots j = 0, 2 and j = 1, 3. Bytes 0 and 1 are of h = 0, bytes 2 and 3 of h = 1."""
    if LOW_BITS == 8:
        even, odd = low, high
    elif LOW_BITS == 4:
        even, odd = low & 0x0F0F0F0F, (low >> 4) & 0x0F0F0F0F
    else:
        both = _spread(low & 0xFF, (low >> 8) & 0xFF)
        even = (both & 0x00030003) | ((both >> 4) & 0x03000300)
        odd = ((both >> 2) & 0x00030003) | ((both >> 6) & 0x03000300)
    if HIGH_BITS == 2:
        both = _spread(high & 0xFF, (high >> 8) & 0xFF)
        even |= ((both & 0x00030003) | ((both >> 4) & 0x03000300)) << LOW_BITS
        odd |= (((both >> 2) & 0x00030003) | ((both >> 6) & 0x03000300)) << LOW_BITS
    elif HIGH_BITS == 1:
        both = _spread(high & 0x0F, (high >> 4) & 0x0F)
        even |= ((both & 0x00010001) | ((both >> 2) & 0x01000100)) << LOW_BITS
        odd |= (((both >> 1) & 0x00010001) | ((both >> 3) & 0x01000100)) << LOW_BITS
    return even, odd


@jit
def _spread(first, second):
    """Bytes first, first, second, second."""
    return first * 0x0101 + second * 0x01010000


@jit
def _code(codes, one, BYTE: tl.constexpr, PTX: tl.constexpr):
    """1 + code · 2⁻¹⁵. `one`: the bits of 1.0"""
    if PTX:
        asm: tl.constexpr = _CODE_0 if BYTE == 0 else _CODE_1 if BYTE == 1 else _CODE_2 if BYTE == 2 else _CODE_3
        return tl.inline_asm_elementwise(asm, "=r,r,r", [codes, one], dtype=tl.float32, is_pure=True, pack=1)
    return ((((codes >> (BYTE * 8)) & 0xFF) << 8) | one).to(tl.float32, bitcast=True)
