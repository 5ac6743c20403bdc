"""Matrices of four-bit codes for ARM processors, whose GEMMs quantise the input to eight bits (KleidiAI)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.cpu.layout import (
    GROUP,
    ROW_BLOCK,
    CpuLayout,
    dynamic_row_bytes,
    padded_rows,
)
from cortex.neuron.kernels.cpu.matrix import CpuMatrix
from cortex.neuron.kernels.matrix import Epilogue, Prologue
from cortex.neuron.kernels.norm import rms_norm_in_two
from cortex.neuron.private_api.torch import four_bit_product, pack_four_bits

_LOOKUP_ROWS = 8
"""Rows whose packed bytes are independent of other rows, on every processor."""
_BYTES = 0x01010101
_ZERO = 8
"""The nibble that stands for 0."""


class DynamicMatrix(CpuMatrix):
    """The library's packed form does not depend on how many rows are packed at once, as long as they are whole blocks:
    so it is filled, and looked up, in parts."""

    def __init__(self, layout: CpuLayout, outputs: int, inputs: int, device: torch.device) -> None:
        super().__init__(layout, outputs, inputs, device)
        self._stored_rows, self._stored_columns = padded_rows(outputs), layout.stored_columns(inputs)
        num_bytes = self._stored_rows * dynamic_row_bytes(self._stored_columns)
        self._packed = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        """The packed bytes, in the order of the library."""
        self._constants: Tensor | None = None
        """[padded rows, inputs / group] float32, column by column: so GEMVs are fastest"""
        if layout.has_constants:
            self._constants = torch.empty(inputs // layout.group, self._stored_rows, device=device).t()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self._packed,) if self._constants is None else (self._packed, self._constants)

    def rounds(self, dtype: torch.dtype) -> bool:  # noqa: ARG002
        return False

    def put_codes(self, first_row: int, code: Tensor, scale: Tensor, minimum: Tensor) -> None:
        nibbles = _split(self.layout, code, scale, minimum)
        missing = -len(code) % ROW_BLOCK
        q, plane_scale, constant = (F.pad(part, (0, 0, 0, missing)) if missing else part for part in nibbles)
        rows, columns = q.shape
        row_bytes = dynamic_row_bytes(columns)
        packed = _packed(q, plane_scale.bfloat16())
        self._packed[first_row * row_bytes : (first_row + rows) * row_bytes] = packed
        if self._constants is not None:
            self._constants[first_row : first_row + rows] = constant

    def fuses(self, prologue: Prologue, x: Tensor) -> bool:  # noqa: ARG002
        """The factor of a norm is multiplied into the result of the GEMM."""
        return prologue.activation is None

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self._rows(ids).to(dtype)

    def _product(self, x: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor | None) -> Tensor:
        scale = 1.0
        if prologue.norm is not None:
            x, scale = rms_norm_in_two(x, prologue.norm, prologue.eps)
        y = self._scaled_product(x, scale)
        for added in (epilogue.bias, epilogue.residual):
            if added is not None:
                y = y.add_(added)
        return y if out is None else out.copy_(y)

    def _scaled_product(self, x: Tensor, scale: float) -> Tensor:
        """`scale` · x Wᵀ. x: [rows, inputs] → [rows, outputs], of the dtype of x

        Uses few operations: each has a fixed cost, which is most of the time of a small model.
        """
        if x.dtype != torch.float32:
            return self._scaled_product(x.float(), scale).to(x.dtype)
        stored = (x if self._stored_columns == self.inputs else _spread(self.layout, x)).contiguous()
        y = four_bit_product(stored, self._packed, GROUP, self._stored_columns, self._stored_rows)
        if self._constants is None:
            y = y if scale == 1 else y.mul_(scale)
        elif x.shape[0] == 1:  # vector products have the lowest fixed cost of the ways to add
            sums = x.reshape(-1, self.layout.group).mv(_ones(self.layout.group))
            y.view(-1).addmv_(self._constants, sums, beta=scale, alpha=scale)
        else:
            sums = x.reshape(x.shape[0], -1, self.layout.group).sum(-1)
            y.addmm_(sums, self._constants.t(), beta=scale, alpha=scale)
        return y if self._stored_rows == self.outputs else y[:, : self.outputs]

    def _rows(self, ids: Tensor) -> Tensor:
        """ids: [n] → [n, inputs] float32"""
        layout = self.layout
        places = _Places.of(self._stored_columns)
        blocks = self._packed.view(-1, _LOOKUP_ROWS * dynamic_row_bytes(self._stored_columns))[ids // _LOOKUP_ROWS]
        within = ids % _LOOKUP_ROWS
        q, scale = places.codes(blocks, within), places.scales(blocks, within)
        weights = (q.view(len(q), -1, GROUP) * scale[..., None]).flatten(1)
        if self._constants is None:
            return _merge(layout, weights, self.inputs)
        groups = _merge(layout, weights, self.inputs).view(len(q), -1, layout.group)
        return (groups + self._constants[ids][..., None]).flatten(1)


class _Nibbles(NamedTuple):
    """Rows of a matrix whose codes have four bits."""

    code: Tensor
    """[rows, stored columns] uint8, 8 stands for 0"""
    scale: Tensor
    """[rows, stored columns / GROUP] float32"""
    constant: Tensor
    """[rows, columns / group] float32: multiplied by the sum of a group's inputs"""


def _split(layout: CpuLayout, code: Tensor, scale: Tensor, minimum: Tensor) -> _Nibbles:
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
        return _padded(layout, _Nibbles(nibbles, scale, constant))
    low = ((words & (_BYTES * (layout.base - 1))) + _BYTES * (_ZERO - layout.low_offset)).view(torch.uint8)
    if layout.group == GROUP:
        return _Nibbles(torch.cat((nibbles, low), 1), torch.cat((scale * layout.base, scale), 1), constant)
    halves = [part.view(len(code), -1, 1, layout.group) for part in (nibbles, low)]
    return _padded(layout, _Nibbles(torch.cat(halves, 2).flatten(1), scale, constant))


def _padded(layout: CpuLayout, rows: _Nibbles) -> _Nibbles:
    """Pads with zeros up to the fewest columns that are stored."""
    missing = layout.stored_columns(0) - rows.code.shape[1]
    if missing <= 0:
        return rows
    return rows._replace(code=F.pad(rows.code, (0, missing), value=8), scale=F.pad(rows.scale, (0, missing // GROUP)))


def _spread(layout: CpuLayout, x: Tensor) -> Tensor:
    """The input that stored columns are multiplied by. x: [rows, columns] → [rows, stored columns]"""
    if layout.planes == 2 and layout.group == GROUP:
        return torch.cat((x, x), 1)
    if layout.planes == 2:
        groups = x.view(len(x), -1, 1, layout.group)
        x = torch.cat((groups * layout.base, groups), 2).flatten(1)
    missing = layout.stored_columns(0) - x.shape[1]
    return F.pad(x, (0, missing)) if missing > 0 else x


def _merge(layout: CpuLayout, stored: Tensor, inputs: int) -> Tensor:
    """The weights of columns from those of stored columns. stored: [rows, stored columns] → [rows, inputs]"""
    stored = stored[:, : layout.planes * inputs]
    if layout.planes == 1:
        return stored
    if layout.group == GROUP:
        high, low = stored.chunk(2, 1)
        return high + low
    halves = stored.view(len(stored), -1, 2, layout.group)
    return (halves[:, :, 0] * layout.base + halves[:, :, 1]).flatten(1)


def _packed(code: Tensor, scale: Tensor) -> Tensor:
    """code: [rows, columns] uint8; scale: [rows, columns / GROUP] bfloat16 → [bytes] uint8"""
    words = code.contiguous().view(torch.int16)
    pairs = (words | (words >> 4)).to(torch.uint8)  # the low bytes
    rows, columns = code.shape
    return pack_four_bits(pairs, scale, GROUP, columns, rows)


@cache
def _ones(count: int) -> Tensor:
    return torch.ones(count)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where codes and scales are in the packed bytes of a block of rows.

    The library has no function that unpacks, and its order depends on the processor. So it packs values that show
    where each of them went: codes whose scales are all 0, then scales whose codes are all 0.
    """

    code: Tensor
    """[rows of a block, columns] int64, in bytes"""
    shift: Tensor
    """[rows of a block, columns] uint8: of the code within its byte"""
    flip: int
    """What nibbles are combined with by xor to become unsigned codes."""
    scale: Tensor
    """[rows of a block, groups] int64, in pairs of bytes"""
    unit: float
    """The scale that is stored as 1."""

    @classmethod
    @cache
    def of(cls, columns: int) -> _Places:
        shape, groups = (_LOOKUP_ROWS, columns), columns // GROUP
        no_scale = torch.zeros(_LOOKUP_ROWS, groups, dtype=torch.bfloat16)
        zero, ones = (_nibbles(_packed(torch.full(shape, digit, dtype=torch.uint8), no_scale)) for digit in (0, 15))
        is_code = (zero ^ ones) == 15
        flip = int(zero[is_code][0])
        number = torch.arange(_LOOKUP_ROWS * columns).view(shape)
        found = torch.zeros(int(is_code.sum()), dtype=torch.int64)
        for shift in range(0, number.numel().bit_length(), 4):
            digits = _packed(((number >> shift) & 15).to(torch.uint8), no_scale)
            found |= (_nibbles(digits)[is_code] ^ flip).long() << shift
        code = is_code.nonzero()[:, 0][found.argsort()].view(shape)

        no_code = torch.full(shape, 8, dtype=torch.uint8)
        plain = _words(_packed(no_code, torch.ones_like(no_scale)))
        is_scale = plain != _words(_packed(no_code, no_scale))
        number = torch.arange(_LOOKUP_ROWS * groups).view(no_scale.shape)
        found = torch.zeros(int(is_scale.sum()), dtype=torch.int64)
        for shift in range(number.numel().bit_length()):
            doubled = ((number >> shift) & 1).bfloat16() + 1
            found |= (_words(_packed(no_code, doubled)) != plain)[is_scale].long() << shift
        scale = is_scale.nonzero()[:, 0][found.argsort()].view(no_scale.shape)
        unit = 1 / float(plain[is_scale][0].view(torch.bfloat16))
        return cls(code // 2, (code % 2 * 4).to(torch.uint8), flip, scale, unit)

    def codes(self, blocks: Tensor, within: Tensor) -> Tensor:
        """[n, columns] float32, of row `within[i]` of `blocks[i]`"""
        code = blocks.gather(1, self.code[within]) >> self.shift[within]
        return ((code & 15) ^ self.flip).float().sub_(8)

    def scales(self, blocks: Tensor, within: Tensor) -> Tensor:
        """[n, groups] float32"""
        return _words(blocks).gather(1, self.scale[within]).view(torch.bfloat16).float().mul_(self.unit)


def _nibbles(packed: Tensor) -> Tensor:
    """[..., bytes] → [..., 2 · bytes]: the low nibble of each byte, then the high one."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _words(packed: Tensor) -> Tensor:
    """[..., bytes] → [..., bytes / 2] int16"""
    return packed.view(torch.int16)
