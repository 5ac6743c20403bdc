"""Matrices of four-bit codes for ARM processors, whose GEMMs quantise the input to eight bits (KleidiAI)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
from cortex.neuron.kernels.cpu.matrix import LibraryMatrix
from cortex.neuron.kernels.cpu.nibbles import merge, split, spread

_LOOKUP_ROWS = 8
"""Rows whose packed bytes are independent of other rows, on every processor."""


class DynamicMatrix(LibraryMatrix):
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
        nibbles = split(self.layout, code, scale, minimum)
        missing = -len(code) % ROW_BLOCK
        q, plane_scale, constant = (F.pad(part, (0, 0, 0, missing)) if missing else part for part in nibbles)
        rows, columns = q.shape
        row_bytes = dynamic_row_bytes(columns)
        packed = _packed(q, plane_scale.bfloat16())
        self._packed[first_row * row_bytes : (first_row + rows) * row_bytes] = packed
        if self._constants is not None:
            self._constants[first_row : first_row + rows] = constant

    def _scaled_product(self, x: Tensor, scale: float) -> Tensor:
        """Uses few operations: each has a fixed cost, which is most of the time of a small model."""
        if x.dtype != torch.float32:
            return self._scaled_product(x.float(), scale).to(x.dtype)
        stored = (x if self._stored_columns == self.inputs else spread(self.layout, x)).contiguous()
        y = torch._dyn_quant_matmul_4bit(stored, self._packed, GROUP, self._stored_columns, self._stored_rows)
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
        layout = self.layout
        places = _Places.of(self._stored_columns)
        blocks = self._packed.view(-1, _LOOKUP_ROWS * dynamic_row_bytes(self._stored_columns))[ids // _LOOKUP_ROWS]
        within = ids % _LOOKUP_ROWS
        q, scale = places.codes(blocks, within), places.scales(blocks, within)
        weights = (q.view(len(q), -1, GROUP) * scale[..., None]).flatten(1)
        if self._constants is None:
            return merge(layout, weights, self.inputs)
        groups = merge(layout, weights, self.inputs).view(len(q), -1, layout.group)
        return (groups + self._constants[ids][..., None]).flatten(1)


def _packed(code: Tensor, scale: Tensor) -> Tensor:
    """code: [rows, columns] uint8; scale: [rows, columns / GROUP] bfloat16 → [bytes] uint8"""
    words = code.contiguous().view(torch.int16)
    pairs = (words | (words >> 4)).to(torch.uint8)  # the low bytes
    packed: Tensor = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scale, None, GROUP, *code.shape[::-1])
    return packed.view(torch.uint8).flatten()


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
