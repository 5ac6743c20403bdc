"""The layout of a quantised matrix in device memory, and its size. Needs no torch.

Every format becomes one of a few layouts: unsigned codes in one or two bit planes, and bfloat16 scales per group of
columns. A weight is `scale · code + minimum`, or `scale · (code - zero)` where a group has no minimum of its own, or
`scale · codebook[code]` where the layout has a codebook. Published integers have a zero per group, and their scales
keep the upper 24 bits of a float32: all that float16 and bfloat16 have.

The unit is eight columns of one row: 32 bits of a 4-bit plane, 16 bits of a 2-bit plane, 8 bits of a 1-bit plane. Codes
of eight bits take two planes of 32 bits. A chunk is 128 columns, sixteen units. Which columns share a unit follows from
the operand that tensor cores read: unit 4·t + v of a chunk holds, in the slot h·4 + j1·2 + j0, column
32·v + 16·j1 + 8·j0 + 2·t + h. So a thread's 16-byte load unpacks in registers to the very fragment it has to supply,
and nothing passes through shared memory. Codes of a codebook are in another order: those of even j0 first, in the low
half of a word, because they are looked up for half a word at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

UNIT: Final = 8
OWN_ZERO: Final = -2
"""`Layout.zero_option` of groups that have zeros."""
CHUNK: Final = 128
SCALED_COLUMNS: Final = 32
"""Columns that one word of scales serves."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of codes and scales. Hashable: kernels are compiled for each."""

    low_bits: int
    """8, 4 or 2: the plane with the codes' low bits. 8: both planes hold whole codes, of even and of odd j."""
    high_bits: int = 0
    """0, 1 or 2: the plane with the bits above those."""
    group: int = 32
    """Columns that share a scale: 32 or 16."""
    zero: int | None = None
    """The code that stands for 0; None: each group has a minimum. Only with groups of 16, or a codebook."""
    has_zeros: bool = False
    """Each group has the code that stands for 0, below 256, in the low 8 bits of the word of its scale. Only with
    groups of 32."""
    codebook: tuple[int, ...] = ()
    """Sixteen signed bytes that codes of four bits stand for; empty: codes are the values themselves. Only with groups
    of 32. Codes arrive as `zero + value`."""

    @property
    def row_block(self) -> int:
        """Rows that are packed together."""
        return 1

    @property
    def bits(self) -> int:
        return self.low_bits + self.high_bits

    @property
    def zero_option(self) -> int:
        """The zero as kernels take it; below 0: groups have minimums, or zeros of their own."""
        if self.has_zeros:
            return OWN_ZERO
        return -1 if self.zero is None else self.zero

    @property
    def scale_words(self) -> int:
        """Words of scales per 32 columns: scale and minimum or zero, two scales, two of the former, or one scale."""
        return 2 if self.group == 16 and self.zero is None else 1

    @property
    def scale_bytes(self) -> int:
        """The size of one word of scales. Half a word is enough where there is one scale and no minimum."""
        return 2 if self.codebook else 4

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """The size of a matrix with `outputs` rows and `inputs` columns."""
        columns = padded(inputs)
        return outputs * (columns * self.bits // 8 + columns // SCALED_COLUMNS * self.scale_words * self.scale_bytes)


@dataclass(frozen=True, slots=True)
class OrderedLayout:
    """A matrix whose columns are sorted by the groups that share a scale; its inputs are read in the same order."""

    codes: Layout
    order: str = field(repr=False)
    """Names the order. Rows of matrices with the same order can be parts of one. Kernels do not depend on it."""

    @property
    def row_block(self) -> int:
        """Rows that are packed together."""
        return self.codes.row_block

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """The size of a matrix with `outputs` rows and `inputs` columns, without the order."""
        return self.codes.num_bytes(outputs, inputs)


ORDER_BYTES: Final = 2
"""The size of one column's entry in an order of columns."""


def padded(inputs: int) -> int:
    """Columns that are stored: whole chunks."""
    return -(-inputs // CHUNK) * CHUNK


Q2 = Layout(2, group=16)
Q3 = Layout(2, 1, group=16, zero=4)
Q4 = Layout(4)
Q5 = Layout(4, 1)
Q6 = Layout(4, 2, group=16, zero=32)
Q8 = Layout(8)
INT4 = Layout(4, has_zeros=True)
INT8 = Layout(8, has_zeros=True)
IQ4 = Layout(4, zero=128, codebook=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
FP4 = Layout(4, zero=12, codebook=(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))

GGML_LAYOUTS: Final = {
    "Q2_K": Q2,
    "Q3_K": Q3,
    "Q4_0": Q4,
    "Q4_1": Q4,
    "Q4_K": Q4,
    "Q5_0": Q5,
    "Q5_1": Q5,
    "Q5_K": Q5,
    "Q6_K": Q6,
    "Q8_0": Q8,
    "IQ4_NL": IQ4,
    "IQ4_XS": IQ4,
    "MXFP4": FP4,
}
"""The layout of each quantised type of a GGUF file."""

PUBLISHED_LAYOUTS: Final = {"FP8": Q8, "INT8": INT8, "INT4": INT4, "INT_ORDERED": Q8, "MXFP4": FP4}
"""The layout of each quantised type of a published checkpoint in safetensors.

FP8 without a layout of its own (`float8/layout.py`) has no groups of 32 columns, and neither have integers whose
columns were quantised in another order where they cannot be sorted: on a rank that has only some columns of each group,
in experts whose gate and up have different orders, and in layers with experts in host memory. Their weights are
quantised in eight bits, which adds a sixth of the error that FP8 has, a twentieth of that of GPTQ in four bits, and as
much as GPTQ in eight bits has.
"""
