"""The codes and scales of an FP8 matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortex.neuron.kernels.float8.layout import Float8Layout
from cortex.neuron.kernels.products.small_batch import COUNTED_ROWS

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest value of this type."""
SMALLEST_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class Float8Codes:
    """[outputs, inputs]. The tensors are allocated once and filled by the methods that put rows."""

    layout: Float8Layout
    codes: Tensor
    """[outputs, inputs] float8"""
    scales: Tensor
    """[blocks of rows, blocks of columns] or [outputs, 1], float32"""
    counters: Tensor
    """[blocks of COUNTED_ROWS rows] int32, all 0 between products: how many parts of a sum are done"""

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        return self.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the weights."""
        return self.codes, self.scales

    def put_float8(self, first_row: int, codes: Tensor, scales: Tensor) -> None:
        """Fill rows from `first_row` on. codes: [rows, inputs]; scales: [rows, blocks of columns], one for each row"""
        self.codes[first_row : first_row + len(codes)] = codes
        step = self.layout.block or 1
        first, last = first_row // step, (first_row + len(codes) - 1) // step
        self.scales[first : last + 1] = scales[
            torch.arange(first, last + 1, device=scales.device).mul_(step).sub_(first_row).clamp_min_(0)
        ]

    def put_values(self, first_row: int, values: Tensor) -> None:
        """Round dense rows, and fill rows from `first_row` on with them: whole blocks. values: [rows, inputs]"""
        rows, columns = self.layout.block or 1, self.layout.block or self.inputs
        blocks = values.float().view(len(values) // rows, rows, -1, columns)
        scales = (blocks.abs().amax((1, 3)) / LARGEST).clamp_min_(SMALLEST_SCALE)
        codes = (blocks / scales[:, None, :, None]).view_as(values).to(FLOAT8)
        self.put_float8(first_row, codes, scales.repeat_interleave(rows, 0))


def empty_float8_codes(layout: Float8Layout, outputs: int, inputs: int, device: torch.device) -> Float8Codes:
    """Memory for a matrix, contents undefined until all rows are put."""
    return Float8Codes(
        layout,
        torch.empty(outputs, inputs, dtype=FLOAT8, device=device),
        torch.empty(layout.num_scales(outputs, inputs), device=device),
        torch.zeros(-(-outputs // COUNTED_ROWS), dtype=torch.int32, device=device),
    )


def widened(codes: Float8Codes, rows: Tensor | slice = slice(None)) -> Tensor:
    """The rows' weights in float32. → [rows, inputs]"""
    values = codes.codes.view(torch.uint8)[rows].view(FLOAT8).float()
    block = codes.layout.block
    if not block:
        return values * codes.scales[rows]
    row_ids = torch.arange(codes.outputs, device=values.device)[rows]
    return values * codes.scales[row_ids // block].repeat_interleave(block, 1)[:, : codes.inputs]
