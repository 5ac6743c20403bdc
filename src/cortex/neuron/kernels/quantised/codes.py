"""The codes and scales of a packed matrix, how they are packed and unpacked: plain torch, on any device. On a GPU a
kernel fills rows in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import INTERPRETED, constant, has_kernels, jit, tl, triton
from cortex.neuron.kernels.products.small_batch import COUNTED_ROWS
from cortex.neuron.kernels.quantised.layout import OWN_ZERO, SCALED_COLUMNS, UNIT, Layout, padded
from cortex.neuron.kernels.quantised.quantise import FITTED_BITS, TINY, extra_steps, kept_scale, quantised, zeros_of

_BLOCKS = 1024 if INTERPRETED else 64
"""Blocks of 32 columns that a program takes. Interpreted, a program takes as long with few."""
_COLUMNS = constant(SCALED_COLUMNS)
_TINY = constant(TINY)
_OWN_ZERO = constant(OWN_ZERO)
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
        ZERO=layout.zero_option,
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
def _kept_bits(scale):
    """The bits of a scale rounded to 24 bits, in the upper ones of 32. NaN stays NaN."""
    bits = scale.to(tl.int32, bitcast=True)
    return tl.where(scale == scale, (bits + 0x7F + ((bits >> 8) & 1)) & -256, 0x7FC00000)


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
    if ZERO == _OWN_ZERO:
        zero = tl.div_rn(-minimum, tl.where(scale == 0, 1.0, scale))
        zero = (tl.minimum(tl.maximum(zero, 0.0), 255.0) + _TO_INTEGER - _TO_INTEGER).to(tl.int32)
        word = tl.where(has_source[:, None], _kept_bits(scale) | zero, 0)
        tl.store(scales + block[:, None] + group, word, mask=(block < total)[:, None])
        return
    scale = tl.where(has_source[:, None], _bfloat16_bits(scale), 0)
    if ZERO >= 0:
        word = tl.sum(tl.where(group == 0, (scale >> 16) & 0xFFFF, scale), 1)
        tl.store(scales + block, word.to(scales.dtype.element_ty), mask=block < total)
    else:
        minimum = tl.where(has_source[:, None], _bfloat16_bits(minimum), 0)
        word = ((scale >> 16) & 0xFFFF) | minimum
        tl.store(scales + block[:, None] * groups + group, word, mask=(block < total)[:, None])


_PLANE_TYPES = {0: torch.uint8, 1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """[outputs, inputs] in the layout's planes. The tensors are allocated once and filled by pieces."""

    layout: Layout
    outputs: int
    inputs: int
    low: Tensor
    """[outputs, units]"""
    high: Tensor
    """[outputs, units]; empty where the layout has one plane"""
    scales: Tensor
    """[outputs, columns / 32 · scale words]: two bfloat16 values in an int32, one in an int16, or the upper 24 bits of
    a float32 and a zero in an int32"""
    counters: Tensor
    """[blocks of COUNTED_ROWS rows] int32, all 0 between products: how many parts of a sum are done"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the weights."""
        return self.low, self.high, self.scales

    def put_codes(self, first_row: int, code: Tensor, scale: Tensor, minimum: Tensor) -> None:
        """Fill rows from `first_row` on with `scale · code + minimum`.

        code: [rows, inputs] uint8; scale and minimum: [rows, inputs / group] float32. Where the layout has a zero, the
        minimum must be `-zero · scale`: it is not stored. Where groups have zeros, it must be that of an integer from 0
        to 255. With a codebook, every code must be `zero` plus one of
        them.
        """
        rows = self._rows(first_row, len(code))
        if self.layout.codebook:
            code = _codes_of_levels(self.layout, code.device)[code.int()]
        if has_kernels(code):
            pack_codes(code, scale, minimum, self.layout, *rows)
        else:
            pack_codes_reference(code, scale, minimum, self.layout, *rows)

    def put_values(self, first_row: int, values: Tensor) -> None:
        """Quantise dense rows and fill rows from `first_row` on with them. values: [rows, inputs]"""
        rows = self._rows(first_row, len(values))
        if has_kernels(values) and not self.layout.has_zeros:
            pack_values(values, self.layout, *rows)
        else:
            self.put_codes(first_row, *quantised(values, self.layout))

    def _rows(self, first_row: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the planes and scales."""
        rows = slice(first_row, first_row + count)
        return self.low[rows], self.high[rows], self.scales[rows]


def pack_codes_reference(
    code: Tensor, scale: Tensor, minimum: Tensor, layout: Layout, low: Tensor, high: Tensor, scales: Tensor
) -> None:
    """See `pack_codes`."""
    columns = low.shape[1] * UNIT
    units = _units(_pad(code, columns))
    if layout.codebook:
        units = torch.cat((units[..., 0::2], units[..., 1::2]), -1)
    if layout.low_bits == 8:
        for odd, plane in enumerate((low, high)):
            plane.copy_(_byte_plane(units[..., odd::2]))
    else:
        low.copy_(_plane(units & ((1 << layout.low_bits) - 1), layout.low_bits))
        if layout.high_bits:
            high.copy_(_plane(units >> layout.low_bits, layout.high_bits))
    groups = columns // layout.group
    if layout.has_zeros:
        zero = zeros_of(scale, minimum).int()
        scales.copy_(_pad(kept_scale(scale).view(torch.int32) | zero, groups))
        return
    scale, minimum = _pad(scale, groups).bfloat16(), _pad(minimum, groups).bfloat16()
    stored = scale if layout.zero is not None else torch.stack((scale, minimum), -1).flatten(1)
    scales.copy_(stored.contiguous().view(scales.dtype))


def empty_codes(layout: Layout, outputs: int, inputs: int, device: torch.device) -> PackedCodes:
    """Memory for a matrix, contents undefined until all rows are put."""
    columns = padded(inputs)

    def plane(bits: int) -> Tensor:
        return torch.empty(outputs, columns // UNIT if bits else 0, dtype=_PLANE_TYPES[bits], device=device)

    return PackedCodes(
        layout,
        outputs,
        inputs,
        plane(layout.low_bits),
        plane(8 if layout.low_bits == 8 else layout.high_bits),
        torch.empty(
            outputs,
            columns // SCALED_COLUMNS * layout.scale_words,
            dtype=torch.int16 if layout.scale_bytes == 2 else torch.int32,
            device=device,
        ),
        torch.zeros(-(-outputs // COUNTED_ROWS), dtype=torch.int32, device=device),
    )


def unpacked(matrix: PackedCodes, rows: Tensor | slice = slice(None)) -> Tensor:
    """The rows' weights in float32, exactly as products see them before they round to bfloat16. → [rows, inputs]"""
    layout = matrix.layout
    low, high = matrix.low[rows], matrix.high[rows]
    if layout.low_bits == 8:
        code = _columns(torch.stack((_bytes(low), _bytes(high)), -1).flatten(2))
    elif layout.codebook:
        code = _columns(_slots(low, 4).unflatten(-1, (2, 4)).transpose(-1, -2).flatten(2))
    else:
        code = _columns(_slots(low, layout.low_bits))
        if layout.high_bits:
            code |= _columns(_slots(high, layout.high_bits)) << layout.low_bits
    words = matrix.scales[rows].contiguous()
    if layout.has_zeros:
        grouped = code.view(len(code), -1, layout.group).float() - (words & 0xFF)[..., None]
        weights = grouped * (words & ~0xFF).view(torch.float32)[..., None]
        return weights.view(len(code), -1)[:, : matrix.inputs]
    scales = words.view(torch.bfloat16).float()
    if layout.codebook:
        values = torch.tensor(layout.codebook, dtype=torch.float32, device=code.device)[code.int()]
    else:
        values = code.float() - (layout.zero or 0)
    grouped = values.view(len(code), -1, layout.group)
    if layout.zero is not None:
        weights = grouped * scales[..., None]
    else:
        weights = grouped * scales[:, 0::2, None] + scales[:, 1::2, None]
    return weights.view(len(code), -1)[:, : matrix.inputs]


def _pad(tensor: Tensor, columns: int) -> Tensor:
    missing = columns - tensor.shape[1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _units(code: Tensor) -> Tensor:
    """[rows, columns] → [rows, units, 8], the slots of a unit last."""
    chunks = code.view(len(code), -1, 4, 2, 2, 4, 2)  # chunk, v, j1, j0, t, h
    return chunks.permute(0, 1, 5, 2, 6, 3, 4).reshape(len(code), -1, UNIT)  # chunk, t, v, (h, j1, j0)


def _columns(units: Tensor) -> Tensor:
    """The inverse of `_units`."""
    slots = units.view(len(units), -1, 4, 4, 2, 2, 2)  # chunk, t, v, h, j1, j0
    return slots.permute(0, 1, 3, 5, 6, 2, 4).reshape(len(units), -1)


def _plane(units: Tensor, bits: int) -> Tensor:
    """[rows, units, 8] of integers of `bits` bits → [rows, units] words."""
    word = torch.zeros(units.shape[:2], dtype=torch.int32, device=units.device)
    for slot in range(UNIT):
        word |= units[..., slot].int() << (slot * bits)
    return word.to(_PLANE_TYPES[bits])


def _byte_plane(slots: Tensor) -> Tensor:
    """[rows, units, 4] codes of eight bits, by h and half of j → [rows, units] words"""
    return slots.contiguous().view(torch.int32)[..., 0]


def _bytes(plane: Tensor) -> Tensor:
    """The inverse of `_byte_plane`."""
    return plane.contiguous().view(torch.uint8).view(*plane.shape, 4)


def _slots(plane: Tensor, bits: int) -> Tensor:
    """The inverse of `_plane`."""
    shifts = torch.arange(0, UNIT * bits, bits, dtype=torch.int32, device=plane.device)
    return ((plane.int()[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8)


@cache
def _codes_of_levels(layout: Layout, device: torch.device) -> Tensor:
    """[256] uint8: the four bits for `zero + value`."""
    assert layout.zero is not None
    codes = torch.zeros(256, dtype=torch.uint8, device=device)
    for code, value in enumerate(layout.codebook):
        codes[layout.zero + value] = code
    return codes
