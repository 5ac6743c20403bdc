"""How a quantised matrix lies in a CPU's memory, and how many bytes it takes. Needs no torch.

The low-bit GEMM of torch takes signed codes of four bits, in groups of 32 columns with one scale. Every format
is mapped onto it without a change of its weights (scales are rounded to bfloat16):

- Codes of more than four bits become two planes, `code = base · high + low`. The matrix has twice the columns, first
  the high halves and then the low ones, and the input is repeated.
- A group of 16 columns becomes one of 32: the high halves of its codes, then the low ones. Both have the scale of the
  group, so the input of the high halves is multiplied by `base`.
- A constant per group is multiplied by the sum of the group's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cortex.neuron.kernels.quantised.layout import IQ4, Layout

GROUP: Final = 32
"""Columns that share a scale in memory."""
ROW_BLOCK: Final = 64
"""torch packs at most this many rows together on any processor. Rows are padded to whole blocks."""
TILE_ROWS: Final = 16
"""Rows that are multiplied at a time in the native form."""
_NIBBLE_ZERO: Final = 8


class CpuForm(StrEnum):
    """What multiplies with the matrix."""

    DYNAMIC = "dynamic"
    """torch's own, on ARM (KleidiAI). Inputs are quantised too, to eight bits with one scale per row."""
    NATIVE = "native"
    """Our own, on hosts with a C compiler. Takes codes of any width."""


@dataclass(frozen=True, slots=True)
class CpuLayout:
    """A weight is `scale · code + minimum`; where `zero` is given, the minimum is `-zero · scale`."""

    form: CpuForm
    bits: int
    group: int = GROUP
    """Columns that share a scale in the checkpoint: 32 or 16."""
    zero: int | None = None
    codebook: tuple[int, ...] = ()
    """The only codes that occur, in order, if they are 16: four bits suffice for their indices."""

    @property
    def row_block(self) -> int:
        """Rows that are packed together."""
        return ROW_BLOCK

    @property
    def codes(self) -> Layout:
        """The same codes and scales as `quantise.py` makes them from dense weights."""
        return Layout(self.bits, group=self.group, zero=self.zero)

    @property
    def planes(self) -> int:
        """Stored columns per column of the matrix."""
        return 2 if self.bits > 4 or self.group < GROUP else 1

    def stored_columns(self, inputs: int) -> int:
        """At least two groups: the library takes a single one for a scale per row, which lies differently."""
        return max(self.planes * inputs, 2 * GROUP)

    @property
    def base(self) -> int:
        """What the high half of a code counts."""
        return 1 << max(0, self.bits - 4)

    @property
    def center(self) -> int:
        """The code that becomes 0."""
        return 1 << (self.bits - 1) if self.zero is None else self.zero

    @property
    def low_offset(self) -> int:
        """Subtracted from the low half where it would not fit into four bits with a sign."""
        return _NIBBLE_ZERO if self.base > _NIBBLE_ZERO else 0

    @property
    def has_constants(self) -> bool:
        """Whether groups have a constant of their own."""
        return self.zero is None or self.low_offset > 0

    @property
    def has_short_scales(self) -> bool:
        """Whether scales and minimums have four bits, in units that two tiles share (native form): those of Q2_K."""
        return self.bits == 2

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """The size of a matrix with `outputs` rows and `inputs` columns."""
        rows, columns = padded_rows(outputs), self.stored_columns(inputs)
        if self.form is CpuForm.NATIVE:
            return rows // TILE_ROWS * num_tiles(self, inputs) * tile_bytes(self)
        constants = 4 * (inputs // self.group) if self.has_constants else 0
        return rows * (dynamic_row_bytes(columns) + constants)


def dynamic_row_bytes(columns: int) -> int:
    """Codes, a bfloat16 scale per group, and a sum and a bias in float32."""
    return columns // 2 + columns // GROUP * 2 + 8


def tile_bytes(layout: CpuLayout) -> int:
    """The size of a tile of 16 rows and 32 columns (native form): codes, and per group a scale and perhaps a minimum in
    float16; or, if those have four bits, their unit: the first tile of two has that of the scales, the second that of
    the minimums."""
    if layout.has_short_scales:
        return TILE_ROWS * (GROUP * layout.bits // 8 + 2 + 2)
    num_scales = GROUP // layout.group * (2 if layout.zero is None else 1)
    return TILE_ROWS * (GROUP * (4 if layout.codebook else layout.bits) // 8 + 2 * num_scales)


def num_tiles(layout: CpuLayout, inputs: int) -> int:
    """The length of a row of tiles (native form)."""
    tiles = inputs // GROUP
    return tiles + tiles % 2 if layout.has_short_scales else tiles


def padded_rows(rows: int) -> int:
    return -(-rows // ROW_BLOCK) * ROW_BLOCK


_FORMATS: Final[Mapping[str, tuple[int, int, int | None]]] = {
    "Q2_K": (2, 16, None),
    "Q3_K": (3, 16, 4),
    "Q4_0": (4, 32, 8),
    "Q4_1": (4, 32, None),
    "Q4_K": (4, 32, None),
    "Q5_0": (5, 32, 16),
    "Q5_1": (5, 32, None),
    "Q5_K": (5, 32, None),
    "Q6_K": (6, 16, 32),
    "Q8_0": (8, 32, 128),
    "IQ4_NL": (8, 32, 128),
    "IQ4_XS": (8, 32, 128),
}
"""Quantised types of GGUF files → bits, columns of a group, zero; as `weights/gguf/quants.py` decodes them."""
_CODEBOOK: Final = tuple(128 + value for value in IQ4.codebook)
"""The codes of IQ4_NL and IQ4_XS."""


def cpu_layout(stored: str, form: CpuForm) -> CpuLayout | None:
    """The layout of a matrix that a GGUF file stores in this type; None: no form has such codes."""
    if stored not in _FORMATS:
        return None
    return CpuLayout(form, *_FORMATS[stored], _CODEBOOK if stored.startswith("IQ4") else ())
