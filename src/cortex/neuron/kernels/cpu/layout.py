"""The layout of a quantised matrix in a CPU's memory, and its size. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cortex.neuron.kernels.quantised.layout import IQ4, Layout

GROUP: Final = 32
"""Columns that share a scale in memory."""
ROW_BLOCK: Final = 64
"""Rows are padded to whole blocks."""
TILE_ROWS: Final = 16
"""Rows that are multiplied at a time."""


@dataclass(frozen=True, slots=True)
class CpuLayout:
    """A weight is `scale · code + minimum`; where `zero` is given, the minimum is `-zero · scale`."""

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
    def has_short_scales(self) -> bool:
        """Whether scales and minimums have four bits, in units that two tiles share: those of Q2_K."""
        return self.bits == 2

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """The size of a matrix with `outputs` rows and `inputs` columns."""
        return padded_rows(outputs) // TILE_ROWS * num_tiles(self, inputs) * tile_bytes(self)


def tile_bytes(layout: CpuLayout) -> int:
    """The size of a tile of 16 rows and 32 columns: codes, and per group a scale and perhaps a minimum in
    float16; or, if those have four bits, their unit: the first tile of two has that of the scales, the second that of
    the minimums."""
    if layout.has_short_scales:
        return TILE_ROWS * (GROUP * layout.bits // 8 + 2 + 2)
    num_scales = GROUP // layout.group * (2 if layout.zero is None else 1)
    return TILE_ROWS * (GROUP * (4 if layout.codebook else layout.bits) // 8 + 2 * num_scales)


def num_tiles(layout: CpuLayout, inputs: int) -> int:
    """The length of a row of tiles."""
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


def cpu_layout(stored: str) -> CpuLayout | None:
    """The layout of a matrix that a GGUF file stores in this type; None: CPUs keep it dense."""
    if stored not in _FORMATS:
        return None
    return CpuLayout(*_FORMATS[stored], _CODEBOOK if stored.startswith("IQ4") else ())
