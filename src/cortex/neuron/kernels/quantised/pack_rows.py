"""Rows of a packed matrix written in one pass on a GPU: from dense weights, or from codes and scales.

`codes.py` and `quantise.py` do the same in plain torch, in a hundred operations for each piece of a tensor, whose
launches take longer than reading the file.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cortex.neuron.kernels.jit import constant, jit, tl, triton
from cortex.neuron.kernels.quantised.layout import SCALED_COLUMNS, UNIT, Layout
from cortex.neuron.kernels.quantised.quantise import FITTED_BITS, TINY, extra_steps

_BLOCKS = 64
"""Blocks of 32 columns that a program takes."""
_COLUMNS = constant(SCALED_COLUMNS)
_TINY = constant(TINY)
_TO_INTEGER = constant(float(1 << 23))
"""A float32 in its neighbourhood has no fraction: adding it rounds to the nearest integer, halves to the even one."""


def pack_values(values: Tensor, layout: Layout, low: Tensor, high: Tensor, scales: Tensor) -> None:
    """Quantise dense rows. values: [rows, inputs]; the others: the same rows of the packed matrix"""
    options = {"EXTRA": extra_steps(layout), "FITTED": layout.bits <= FITTED_BITS}
    _launch(_values_kernel, (values.contiguous(),), layout, low, high, scales, options)


def pack_codes(
    code: Tensor, scale: Tensor, minimum: Tensor, layout: Layout, low: Tensor, high: Tensor, scales: Tensor
) -> None:
    """code: [rows, inputs] uint8, as stored; scale, minimum: [rows, groups]; the others: the same rows of the matrix"""
    parts = (code.contiguous(), scale.contiguous(), minimum.contiguous())
    _launch(_codes_kernel, parts, layout, low, high, scales, {})


def _launch(
    kernel: Any,
    sources: tuple[Tensor, ...],
    layout: Layout,
    low: Tensor,
    high: Tensor,
    scales: Tensor,
    options: dict[str, Any],
) -> None:
    num_blocks = low.shape[1] * UNIT // SCALED_COLUMNS
    total = len(low) * num_blocks
    kernel[(triton.cdiv(total, _BLOCKS),)](
        *sources,
        low,
        high,
        scales,
        total,
        sources[0].shape[1] // SCALED_COLUMNS,
        num_blocks,
        LOW_BITS=layout.low_bits,
        HIGH_BITS=layout.high_bits,
        GROUP=layout.group,
        ZERO=-1 if layout.zero is None else layout.zero,
        CODEBOOK=bool(layout.codebook),
        BLOCKS=_BLOCKS,
        **options,
    )


@jit
def _values_kernel(
    values,
    low_plane,
    high_plane,
    scales,
    total,
    stored_blocks,
    num_blocks,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    EXTRA: tl.constexpr,
    FITTED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """values: [rows, stored_blocks · 32]"""
    groups: tl.constexpr = _COLUMNS // GROUP
    bits: tl.constexpr = LOW_BITS + HIGH_BITS
    block, source, has_source = _places(total, stored_blocks, num_blocks, BLOCKS)
    offset = source[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
    x = tl.load(values + offset, mask=has_source[:, None], other=0.0).to(tl.float32)
    x = tl.reshape(x, (BLOCKS, groups, GROUP))
    low, high, sums = tl.min(x, 2), tl.max(x, 2), tl.sum(x, 2)
    scale, minimum, error = _fit(x, low, high, sums, 0, bits, GROUP, ZERO, FITTED)
    other_scale, other_minimum, other_error = _fit(x, low, high, sums, EXTRA, bits, GROUP, ZERO, FITTED)
    is_better = other_error < error
    scale, minimum = tl.where(is_better, other_scale, scale), tl.where(is_better, other_minimum, minimum)
    code = _codes(x, scale, minimum, bits).to(tl.int32)
    # A number that is not finite leaves none of its group: sums are not finite either.
    scale = tl.where(sums - sums == 0, scale, float("nan"))
    code = tl.reshape(code, (BLOCKS, _COLUMNS))
    _store_codes(low_plane, high_plane, code, block, has_source, total, LOW_BITS, HIGH_BITS, CODEBOOK, BLOCKS)
    _store_scales(scales, scale, minimum, block, has_source, total, GROUP, ZERO)


@jit
def _codes_kernel(
    codes,
    group_scales,
    group_minimums,
    low_plane,
    high_plane,
    scales,
    total,
    stored_blocks,
    num_blocks,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """codes: [rows, stored_blocks · 32]"""
    groups: tl.constexpr = _COLUMNS // GROUP
    block, source, has_source = _places(total, stored_blocks, num_blocks, BLOCKS)
    offset = source[:, None] * _COLUMNS + tl.arange(0, _COLUMNS)[None, :]
    code = tl.load(codes + offset, mask=has_source[:, None], other=0).to(tl.int32)
    _store_codes(low_plane, high_plane, code, block, has_source, total, LOW_BITS, HIGH_BITS, CODEBOOK, BLOCKS)
    group = source[:, None] * groups + tl.arange(0, groups)[None, :]
    scale = tl.load(group_scales + group, mask=has_source[:, None], other=0.0)
    minimum = tl.load(group_minimums + group, mask=has_source[:, None], other=0.0)
    _store_scales(scales, scale, minimum, block, has_source, total, GROUP, ZERO)


@jit
def _places(total, stored_blocks, num_blocks, BLOCKS: tl.constexpr):
    """The program's blocks of the packed rows, those of the source, and whether the source has them."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row, column = block // num_blocks, block % num_blocks
    return block, row * stored_blocks + column, (block < total) & (column < stored_blocks)


@jit
def _fit(
    x,
    low,
    high,
    sums,
    EXTRA: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    FITTED: tl.constexpr,
):
    """See `quantise.py`. x: [blocks, groups, GROUP]; low, high, sums: [blocks, groups]"""
    steps: tl.constexpr = (1 << BITS) - 1
    if ZERO >= 0:
        scale = tl.where(high > -low, high, low) * (-1 / (ZERO + EXTRA))
        minimum = scale
    else:
        scale = (high - low) * (1 / (steps + EXTRA))
        minimum = (low + high - scale * steps) * 0.5
    scale, minimum = _stored(scale, minimum, ZERO)
    code = _codes(x, scale, minimum, BITS)
    if FITTED:
        products = tl.sum(code * x, 2)
        if ZERO >= 0:
            distance = code - ZERO
            scale = tl.div_rn(products - ZERO * sums, tl.maximum(tl.sum(distance * distance, 2), 1.0))
            minimum = scale
        else:
            code_sum = tl.sum(code, 2)
            spread = GROUP * tl.sum(code * code, 2) - code_sum * code_sum
            slope = tl.div_rn(GROUP * products - code_sum * sums, tl.maximum(spread, 1.0))
            scale = tl.where(spread > 0, slope, scale)
            minimum = (sums - scale * code_sum) * (1 / GROUP)
        scale, minimum = _stored(scale, minimum, ZERO)
        code = _codes(x, scale, minimum, BITS)
    residual = code * scale[:, :, None] + minimum[:, :, None] - x
    return scale, minimum, tl.sum(residual * residual, 2)


@jit
def _stored(scale, minimum, ZERO: tl.constexpr):
    scale = _bfloat16_bits(scale).to(tl.float32, bitcast=True)
    scale = tl.where(tl.abs(scale) < _TINY, 1.0, scale)
    if ZERO >= 0:
        return scale, scale * -ZERO
    return scale, _bfloat16_bits(minimum).to(tl.float32, bitcast=True)


@jit
def _codes(x, scale, minimum, BITS: tl.constexpr):
    """In float32."""
    steps: tl.constexpr = (1 << BITS) - 1
    code = (x - minimum[:, :, None]) * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, :, None]
    return tl.minimum(tl.maximum(code, 0.0), steps * 1.0) + _TO_INTEGER - _TO_INTEGER


@jit
def _bfloat16_bits(number):
    """The bits of a number rounded to bfloat16, in the upper half of 32. NaN stays NaN; rounding could make it 0."""
    bits = number.to(tl.int32, bitcast=True)
    return tl.where(number == number, (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536, 0x7FC00000)


@jit
def _store_codes(
    low_plane,
    high_plane,
    code,
    block,
    has_source,
    total,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    CODEBOOK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """code: [blocks, 32] int32. A block has four units: those of 4 · t + v, where v is its place in the chunk."""
    code = tl.where(has_source[:, None], code, 0)
    column = tl.arange(0, _COLUMNS)[None, :]
    h, j0, j1 = column % 2, column // 8 % 2, column // 16
    unit = (block // 4 * 16 + block % 4)[:, None] + 4 * tl.arange(0, 4)[None, :]
    inside = (block < total)[:, None]
    if LOW_BITS == 8:
        byte = code << ((h * 2 + j1) * 8)
        low, high = _words(tl.where(j0 == 0, byte, 0), BLOCKS), _words(tl.where(j0 == 1, byte, 0), BLOCKS)
        tl.store(low_plane + unit, low, mask=inside)
        tl.store(high_plane + unit, high, mask=inside)
    else:
        slot = j0 * 4 + h * 2 + j1 if CODEBOOK else h * 4 + j1 * 2 + j0
        low = _words((code & ((1 << LOW_BITS) - 1)) << (slot * LOW_BITS), BLOCKS)
        tl.store(low_plane + unit, low.to(low_plane.dtype.element_ty), mask=inside)
        if HIGH_BITS > 0:
            high = _words((code >> LOW_BITS) << (slot * HIGH_BITS), BLOCKS)
            tl.store(high_plane + unit, high.to(high_plane.dtype.element_ty), mask=inside)


@jit
def _words(parts, BLOCKS: tl.constexpr):
    """The parts of each unit put together. parts: [blocks, 32], no two with the same bits → [blocks, 4]"""
    parts = tl.reshape(parts, (BLOCKS, 4, 4, 2))  # j1 and j0, t, h
    return tl.sum(tl.sum(parts, 3), 1)


@jit
def _store_scales(scales, scale, minimum, block, has_source, total, GROUP: tl.constexpr, ZERO: tl.constexpr):
    """scale, minimum: [blocks, groups]"""
    groups: tl.constexpr = _COLUMNS // GROUP
    group = tl.arange(0, groups)[None, :]
    scale = tl.where(has_source[:, None], _bfloat16_bits(scale), 0)
    if ZERO >= 0:
        word = tl.sum(tl.where(group == 0, (scale >> 16) & 0xFFFF, scale), 1)
        tl.store(scales + block, word.to(scales.dtype.element_ty), mask=block < total)
    else:
        minimum = tl.where(has_source[:, None], _bfloat16_bits(minimum), 0)
        word = ((scale >> 16) & 0xFFFF) | minimum
        tl.store(scales + block[:, None] * groups + group, word, mask=(block < total)[:, None])
