"""The codes and scales of a packed matrix, how they are packed and unpacked: plain torch, on any device. On a GPU
`pack_rows.py` fills them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.products.small_batch import COUNTED_ROWS
from cortex.neuron.kernels.quantised.layout import SCALED_COLUMNS, UNIT, Layout, padded
from cortex.neuron.kernels.quantised.pack_rows import pack_codes, pack_values
from cortex.neuron.kernels.quantised.quantise import quantised

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
    """[outputs, columns / 32 · scale words]: two bfloat16 values in an int32, or one in an int16"""
    counters: Tensor
    """[blocks of COUNTED_ROWS rows] int32, all 0 between products: how many parts of a sum are done"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What holds the weights."""
        return self.low, self.high, self.scales

    def put_codes(self, first_row: int, code: Tensor, scale: Tensor, minimum: Tensor) -> None:
        """Fill rows from `first_row` on with `scale · code + minimum`.

        code: [rows, inputs] uint8; scale and minimum: [rows, inputs / group] float32. Where the layout has a zero, the
        minimum must be `-zero · scale`: it is not stored. With a codebook, every code must be `zero` plus one of
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
        if has_kernels(values):
            pack_values(values, self.layout, *rows)
        else:
            pack_codes_reference(*quantised(values, self.layout), self.layout, *rows)

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
    scales = matrix.scales[rows].contiguous().view(torch.bfloat16).float()
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
