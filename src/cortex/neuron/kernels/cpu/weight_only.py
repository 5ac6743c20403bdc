"""Matrices of four-bit codes whose GEMMs take bfloat16 inputs (`_weight_int4pack_mm_for_cpu`, fast on x86)."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.cpu.layout import GROUP, ROW_BLOCK, CpuLayout, padded_rows
from cortex.neuron.kernels.cpu.matrix import LibraryMatrix
from cortex.neuron.kernels.cpu.nibbles import merge, split, spread

MAX_ROWS = 16
"""With more rows, a GEMM with unpacked weights is faster: matrix instructions beat vector instructions."""
_STRETCH_ELEMENTS = 1 << 20
"""Weights that are unpacked at a time."""


class WeightOnlyMatrix(LibraryMatrix):
    def __init__(self, layout: CpuLayout, outputs: int, inputs: int, device: torch.device) -> None:
        super().__init__(layout, outputs, inputs, device)
        rows, columns = padded_rows(outputs), layout.stored_columns(inputs)
        self._packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
        """In the order of torch's kernel."""
        self._scales = torch.empty(columns // GROUP, rows, 2, dtype=torch.bfloat16, device=device)
        """The scale of each group, and what it adds."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._packed, self._scales

    def rounds(self, dtype: torch.dtype) -> bool:  # noqa: ARG002
        return True

    def put_codes(self, first_row: int, code: Tensor, scale: Tensor, minimum: Tensor) -> None:
        nibbles = split(self.layout, code, scale, minimum)
        missing = -len(code) % ROW_BLOCK
        q, plane_scale, constant = (F.pad(part, (0, 0, 0, missing)) if missing else part for part in nibbles)
        if self.layout.planes == 2 and self.layout.group == GROUP:
            constant = torch.cat((constant, torch.zeros_like(constant)), 1)
        elif self.layout.planes == 2:
            constant = constant / (self.layout.base + 1)  # the inputs of a group are its own, `base` times and once
        rows = slice(first_row, first_row + len(q))
        self._packed[rows] = _packed(q)
        constant = F.pad(constant, (0, plane_scale.shape[1] - constant.shape[1]))
        self._scales[:, rows] = torch.stack((plane_scale, constant), -1).transpose(0, 1).bfloat16()

    def _scaled_product(self, x: Tensor, scale: float) -> Tensor:
        if scale != 1:
            x = x * scale
        if len(x) > MAX_ROWS:
            return self._large_product(x)
        stored = spread(self.layout, x.bfloat16()).contiguous()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(stored, self._packed, GROUP, self._scales)
        return y[:, : self.outputs].to(x.dtype)

    def _rows(self, ids: Tensor) -> Tensor:
        blocks, index = torch.unique(ids // ROW_BLOCK, return_inverse=True)
        parts = [
            self._unpacked(block, block + 1)[ids[index == i] % ROW_BLOCK] for i, block in enumerate(blocks.tolist())
        ]
        order = torch.cat([(index == i).nonzero()[:, 0] for i in range(len(blocks))])
        return torch.cat(parts)[order.argsort()]

    def _large_product(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), padded_rows(self.outputs), dtype=x.dtype)
        step = max(1, _STRETCH_ELEMENTS // (ROW_BLOCK * self.inputs))
        last = padded_rows(self.outputs) // ROW_BLOCK
        for first in range(0, last, step):
            stop = min(first + step, last)
            weight = self._unpacked(first, stop).to(x.dtype)
            out[:, first * ROW_BLOCK : stop * ROW_BLOCK] = F.linear(x, weight)
        return out[:, : self.outputs]

    def _unpacked(self, first: int, stop: int) -> Tensor:
        """The weights of blocks of rows. → [rows, inputs] float32"""
        rows = slice(first * ROW_BLOCK, stop * ROW_BLOCK)
        columns = 2 * self._packed.shape[1]
        places = _places(columns)
        q = _nibbles(self._packed[rows]).view(stop - first, -1)[:, places].view(-1, columns // GROUP, GROUP)
        scales = self._scales[:, rows].float().transpose(0, 1)
        weights = (q.float() - 8) * scales[..., :1] + scales[..., 1:]
        return merge(self.layout, weights.flatten(1), self.inputs)


def _packed(code: Tensor) -> Tensor:
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(code.int(), 1)
    return packed


def _nibbles(packed: Tensor) -> Tensor:
    """[rows, bytes] → [rows · bytes · 2]: the low nibble of each byte, then the high one."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten()


@cache
def _places(columns: int) -> Tensor:
    """Where the code of each row and column of a block of rows is among the block's packed nibbles.

    Every processor has its own order. The library has no function that unpacks, so it packs the digits of the codes'
    indices, which show where each of them went.
    """
    count = ROW_BLOCK * columns
    number = torch.arange(count)
    found = torch.zeros(count, dtype=torch.int64)
    for shift in range(0, count.bit_length(), 4):
        digit = ((number >> shift) & 15).view(ROW_BLOCK, columns)
        found |= _nibbles(_packed(digit)).long() << shift
    return found.argsort()
