"""The shape of matrices in four bits (`four_bit.py`), without torch: a node reckons with their size."""

from __future__ import annotations

GROUP = 32
"""Inputs that share a scale and a minimum."""
ROW_BLOCK = 64
"""torch packs so many rows together on any processor, or a part of them: what is packed apart must be whole blocks."""
_SCALE_BYTES = 4
"""A scale and a minimum in bfloat16."""


def four_bit_bytes(rows: int, inputs: int, bits: int) -> int:
    """What a matrix takes whose numbers are stored in `bits`, 4 or 8 as two planes of four; 0 where it cannot be."""
    if not bits or inputs % GROUP or rows % ROW_BLOCK:
        return 0
    planes = bits // 4
    return planes * rows * (inputs // 2 + inputs // GROUP * _SCALE_BYTES)
