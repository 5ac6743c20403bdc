"""Codes of any width as codes of four bits, as `layout.py` describes."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.cpu.layout import GROUP, CpuLayout

_BYTES = 0x01010101
_ZERO = 8
"""The nibble that stands for 0."""


class Nibbles(NamedTuple):
    """Rows of a matrix whose codes have four bits."""

    code: Tensor
    """[rows, stored columns] uint8, 8 stands for 0"""
    scale: Tensor
    """[rows, stored columns / GROUP] float32"""
    constant: Tensor
    """[rows, columns / group] float32: multiplied by the sum of a group's inputs"""


def split(layout: CpuLayout, code: Tensor, scale: Tensor, minimum: Tensor) -> Nibbles:
    """code: [rows, columns] uint8; scale and minimum: [rows, columns / group] float32"""
    constant = minimum + (layout.center + layout.low_offset) * scale
    shift = layout.base.bit_length() - 1
    # Four codes at a time. The center becomes 8 in the high half: it is 8 · base, or fewer bits need no low half.
    words = code.contiguous().view(torch.int32)
    nibbles = ((words >> shift) & (_BYTES * (255 >> shift))) if shift else words
    if layout.center < _ZERO * layout.base:
        nibbles = nibbles + _BYTES * (_ZERO - layout.center)
    nibbles = nibbles.view(torch.uint8)
    if layout.planes == 1:
        return _padded(layout, Nibbles(nibbles, scale, constant))
    low = ((words & (_BYTES * (layout.base - 1))) + _BYTES * (_ZERO - layout.low_offset)).view(torch.uint8)
    if layout.group == GROUP:
        return Nibbles(torch.cat((nibbles, low), 1), torch.cat((scale * layout.base, scale), 1), constant)
    halves = [part.view(len(code), -1, 1, layout.group) for part in (nibbles, low)]
    return _padded(layout, Nibbles(torch.cat(halves, 2).flatten(1), scale, constant))


def _padded(layout: CpuLayout, rows: Nibbles) -> Nibbles:
    """Pads with zeros up to the fewest columns that are stored."""
    missing = layout.stored_columns(0) - rows.code.shape[1]
    if missing <= 0:
        return rows
    return rows._replace(code=F.pad(rows.code, (0, missing), value=8), scale=F.pad(rows.scale, (0, missing // GROUP)))


def spread(layout: CpuLayout, x: Tensor) -> Tensor:
    """The input that stored columns are multiplied by. x: [rows, columns] → [rows, stored columns]"""
    if layout.planes == 2 and layout.group == GROUP:
        return torch.cat((x, x), 1)
    if layout.planes == 2:
        groups = x.view(len(x), -1, 1, layout.group)
        x = torch.cat((groups * layout.base, groups), 2).flatten(1)
    missing = layout.stored_columns(0) - x.shape[1]
    return F.pad(x, (0, missing)) if missing > 0 else x


def merge(layout: CpuLayout, stored: Tensor, inputs: int) -> Tensor:
    """The weights of columns from those of stored columns. stored: [rows, stored columns] → [rows, inputs]"""
    stored = stored[:, : layout.planes * inputs]
    if layout.planes == 1:
        return stored
    if layout.group == GROUP:
        high, low = stored.chunk(2, 1)
        return high + low
    halves = stored.view(len(stored), -1, 2, layout.group)
    return (halves[:, :, 0] * layout.base + halves[:, :, 1]).flatten(1)
