"""The layout of an FP8 matrix in device memory. Needs no torch.

The weights lie as in a checkpoint, row by row. They have one scale for each block of 128 x 128, or one for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

GROUP: Final = 128
"""Columns of a block, and columns of an input row that share a scale where the matrix has blocks."""


@dataclass(frozen=True, slots=True)
class Float8Layout:
    block: int
    """Rows and columns that share a scale; 0: the columns of one row do."""

    @property
    def row_block(self) -> int:
        """Rows that are packed together."""
        return self.block or 1

    def num_scales(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Down and across."""
        return (-(-outputs // self.block), -(-inputs // self.block)) if self.block else (outputs, 1)

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """The size of a matrix with `outputs` rows and `inputs` columns."""
        down, across = self.num_scales(outputs, inputs)
        return outputs * inputs + 4 * down * across


FLOAT8_BLOCKS = Float8Layout(GROUP)
FLOAT8_ROWS = Float8Layout(0)


def float8_layout(shape: tuple[int, ...], scaled: tuple[int, int] | None) -> Float8Layout | None:
    """The layout of a matrix of which `scaled` rows and columns share a scale; None if there is no such layout."""
    outputs, inputs = shape
    if scaled is None or inputs % GROUP or outputs % 16:
        return None
    rows, columns = scaled
    if (rows, columns) == (GROUP, GROUP) and outputs % GROUP == 0:
        return FLOAT8_BLOCKS
    return FLOAT8_ROWS if columns >= inputs and (rows == 1 or rows >= outputs) else None
