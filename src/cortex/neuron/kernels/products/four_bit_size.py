"""The sizes of four-bit matrices (`four_bit.py`), without torch: a node computes the size of a model from them."""

from __future__ import annotations

GROUP = 32
"""Inputs that share a scale and a minimum."""
ROW_BLOCK = 64
"""torch packs at most this many rows together on any processor. Rows packed separately must be whole blocks."""
_SCALE_BYTES = 4
"""A scale and a minimum in bfloat16."""


def four_bit_bytes(rows: int, inputs: int, bits: int) -> int:
    """The bytes of a matrix with elements of `bits` (4, or 8 as two planes of four); 0 if its shape is unsupported."""
    if not bits or inputs % GROUP or rows % ROW_BLOCK:
        return 0
    planes = bits // 4
    return planes * rows * (inputs // 2 + inputs // GROUP * _SCALE_BYTES)
