"""Descriptions of tensors in files. They need no torch and read no weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cortex.neuron.weights.mapping import MappedFile


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where the bytes of a tensor are, and how to decode them (`decode.py`).

    The bytes form `num_groups` groups of equal size. Each group decodes independently into `group_rows` whole rows. So
    a tensor of any size and format can be read in pieces.
    """

    file: MappedFile = field(repr=False)
    offset: int
    shape: tuple[int, ...]
    format: str
    """`"BF16"`, `"F32"`, `"Q4_K"` …: one namespace for dense and quantised formats."""
    num_bytes: int
    interleaved_rows: int = 0
    """Rows of one head whose rotary halves are interleaved; decoding separates them. 0: not interleaved."""

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def group_rows(self) -> int:
        # A vector is one group: its "rows" are single elements, and its blocks span many of them.
        return self.num_rows if len(self.shape) < 2 else self.interleaved_rows or 1

    @property
    def num_groups(self) -> int:
        return self.num_rows // self.group_rows if self.num_rows else 0

    @property
    def group_bytes(self) -> int:
        return self.num_bytes // self.num_groups if self.num_groups else 0


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that is not read yet. `dtype` names the stored format: `"BF16"`, `"F32"`, `"Q4_K"` …"""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """As stored; a quantised tensor is larger once it is read."""

    @classmethod
    def of(cls, stored: StoredTensor) -> TensorInfo:
        return cls(stored.shape, stored.format, stored.num_bytes)
