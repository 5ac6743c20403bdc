"""Matrices of four-bit codes whose products take bfloat16 inputs (`_weight_int4pack_mm_for_cpu`, fast on x86)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.products.cpu_layout import GROUP, ROW_BLOCK, CpuLayout, padded_rows
from cortex.neuron.kernels.products.nibbles import merge, split, spread
from cortex.neuron.kernels.quantised.quantise import quantised

MAX_ROWS = 16
"""With more rows, the product with unpacked weights is faster: matrix instructions beat vector instructions."""
_STRETCH_ELEMENTS = 1 << 20
"""Weights that are unpacked at a time."""


@dataclass(frozen=True, slots=True)
class WeightOnlyMatrix:
    """[outputs, inputs]"""

    layout: CpuLayout
    outputs: int
    inputs: int
    packed: Tensor
    """[padded rows, stored columns / 2] uint8, in the order of torch's kernel"""
    scales: Tensor
    """[stored columns / GROUP, padded rows, 2] bfloat16: the scale of each group, and what it adds"""

    @classmethod
    def empty(cls, layout: CpuLayout, outputs: int, inputs: int, device: torch.device) -> WeightOnlyMatrix:
        rows, columns = padded_rows(outputs), layout.stored_columns(inputs)
        packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(columns // GROUP, rows, 2, dtype=torch.bfloat16, device=device)
        return cls(layout, outputs, inputs, packed, scales)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.packed, self.scales

    @property
    def rounds_products(self) -> bool:
        return True

    def put(self, first_row: int, code: Tensor, scale: Tensor, minimum: Tensor) -> None:
        nibbles = split(self.layout, code, scale, minimum)
        missing = -len(code) % ROW_BLOCK
        q, plane_scale, constant = (F.pad(part, (0, 0, 0, missing)) if missing else part for part in nibbles)
        if self.layout.planes == 2 and self.layout.group == GROUP:
            constant = torch.cat((constant, torch.zeros_like(constant)), 1)
        elif self.layout.planes == 2:
            constant = constant / (self.layout.base + 1)  # the inputs of a group are its own, `base` times and once
        rows = slice(first_row, first_row + len(q))
        self.packed[rows] = _packed(q)
        constant = F.pad(constant, (0, plane_scale.shape[1] - constant.shape[1]))
        self.scales[:, rows] = torch.stack((plane_scale, constant), -1).transpose(0, 1).bfloat16()

    def put_numbers(self, first_row: int, numbers: Tensor) -> None:
        self.put(first_row, *quantised(numbers, self.layout.codes))

    def product(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if scale != 1:
            x = x * scale
        if len(x) > MAX_ROWS:
            return self._large_product(x)
        stored = spread(self.layout, x.bfloat16()).contiguous()
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(stored, self.packed, GROUP, self.scales)
        return y[:, : self.outputs].to(x.dtype)

    def rows(self, numbers: Tensor) -> Tensor:
        blocks, index = torch.unique(numbers // ROW_BLOCK, return_inverse=True)
        parts = [
            self._unpacked(block, block + 1)[numbers[index == i] % ROW_BLOCK] for i, block in enumerate(blocks.tolist())
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
        columns = 2 * self.packed.shape[1]
        places = _places(columns)
        q = _nibbles(self.packed[rows]).view(stop - first, -1)[:, places].view(-1, columns // GROUP, GROUP)
        scales = self.scales[:, rows].float().transpose(0, 1)
        numbers = (q.float() - 8) * scales[..., :1] + scales[..., 1:]
        return merge(self.layout, numbers.flatten(1), self.inputs)


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
    numbers, which tell where each of them went.
    """
    count = ROW_BLOCK * columns
    number = torch.arange(count)
    found = torch.zeros(count, dtype=torch.int64)
    for shift in range(0, count.bit_length(), 4):
        digit = ((number >> shift) & 15).view(ROW_BLOCK, columns)
        found |= _nibbles(_packed(digit)).long() << shift
    return found.argsort()
