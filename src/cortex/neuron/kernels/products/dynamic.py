"""Matrices of four-bit codes for ARM processors, whose products quantise the input to eight bits (KleidiAI)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.products.cpu_layout import (
    GROUP,
    ROW_BLOCK,
    CpuLayout,
    dynamic_row_bytes,
    padded_rows,
)
from cortex.neuron.kernels.products.nibbles import split, spread

_LOOKUP_ROWS = 8
"""Rows that the library packs together: the fewest that can be multiplied with on their own."""
_LOOKUP_BLOCKS = 64
"""Blocks of rows that are looked up at once."""


@dataclass(frozen=True, slots=True)
class DynamicMatrix:
    """[outputs, inputs]. The library's packed form does not depend on how many rows are packed at once, as long as they
    are whole blocks: so it is filled, and looked up, in parts."""

    layout: CpuLayout
    outputs: int
    inputs: int
    packed: Tensor
    """[padded rows · row bytes] uint8, in the order of the library"""
    constants: Tensor | None
    """[inputs / group, padded rows] float32"""

    @classmethod
    def empty(cls, layout: CpuLayout, outputs: int, inputs: int, device: torch.device) -> DynamicMatrix:
        rows = padded_rows(outputs)
        packed = torch.empty(rows * dynamic_row_bytes(layout.stored_columns(inputs)), dtype=torch.uint8, device=device)
        constants = torch.empty(inputs // layout.group, rows, device=device) if layout.has_constants else None
        return cls(layout, outputs, inputs, packed, constants)

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.packed,) if self.constants is None else (self.packed, self.constants)

    @property
    def rounds_products(self) -> bool:
        return False

    def put(self, first_row: int, code: Tensor, scale: Tensor, minimum: Tensor) -> None:
        nibbles = split(self.layout, code, scale, minimum)
        missing = -len(code) % ROW_BLOCK
        q, plane_scale, constant = (F.pad(part, (0, 0, 0, missing)) if missing else part for part in nibbles)
        rows, columns = q.shape
        pairs = q[:, 0::2] | (q[:, 1::2] << 4)
        packed = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, plane_scale.bfloat16(), None, GROUP, columns, rows)
        row_bytes = dynamic_row_bytes(columns)
        self.packed[first_row * row_bytes : (first_row + rows) * row_bytes] = packed.view(torch.uint8).flatten()
        if self.constants is not None:
            self.constants[:, first_row : first_row + rows] = constant.t()

    def put_numbers(self, first_row: int, numbers: Tensor) -> None:
        raise NotImplementedError("dense tensors stay dense on a CPU")

    def product(self, x: Tensor) -> Tensor:
        rows = padded_rows(self.outputs)
        y = self._product(x.float(), self.packed, self.constants, rows)
        if rows != self.outputs:
            y = y[:, : self.outputs]
        return y.to(x.dtype)

    def rows(self, numbers: Tensor) -> Tensor:
        """The products of the rows' blocks with the unit vectors: the library has no function that unpacks."""
        units = torch.eye(self.inputs)
        blocks, index = torch.unique(numbers // _LOOKUP_ROWS, return_inverse=True)
        packed = self.packed.view(padded_rows(self.outputs) // _LOOKUP_ROWS, -1)
        parts = []
        for some in blocks.split(_LOOKUP_BLOCKS):
            constants = None
            if self.constants is not None:
                constants = self.constants.view(-1, len(packed), _LOOKUP_ROWS)[:, some].flatten(1)
            y = self._product(units, packed[some].flatten(), constants, len(some) * _LOOKUP_ROWS)
            parts.append(y.t().reshape(len(some), _LOOKUP_ROWS, self.inputs))
        return torch.cat(parts)[index, numbers % _LOOKUP_ROWS]

    def _product(self, x: Tensor, packed: Tensor, constants: Tensor | None, rows: int) -> Tensor:
        stored = spread(self.layout, x)
        y: Tensor = torch.ops.aten._dyn_quant_matmul_4bit.default(
            stored.contiguous(), packed, GROUP, stored.shape[1], rows
        )
        if constants is None:
            return y
        group = self.layout.group
        if len(x) == 1:  # vector products have the lowest fixed cost of the ways to add
            y[0].addmv_(constants.t(), x.reshape(-1, group).mv(_ones(group)))
            return y
        return y.addmm_(x.view(len(x), -1, group).sum(-1), constants)


@cache
def _ones(count: int) -> Tensor:
    return torch.ones(count)
