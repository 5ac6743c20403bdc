"""One step's tensors, as layers and kernels read them.

Tokens of decode rows come first, one each; then the prefill rows' tokens, row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

PREFILL_TILE = 128
"""Tokens of one prefill row that one program of the attention kernel takes."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A prefill row as the host knows it: `count` tokens from position `start`, beginning at `offset` in the step."""

    row: int
    start: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor
    """[tokens] int64"""
    positions: Tensor
    """[tokens] int64"""
    slots: Tensor
    """[tokens] int64: where each token's KV goes, page · page_tokens + offset; what must not be kept goes to page 0"""
    rows: Tensor
    """[rows] int64: each row's place in the page table"""
    lengths: Tensor
    """[rows] int32: positions each row attends to, its own tokens included"""
    page_table: Tensor
    """[max rows, max pages] int32"""
    num_decodes: int
    max_length: int
    """No row is longer; an upper bound where a captured graph serves many steps."""
    prefills: tuple[PrefillRow, ...] = ()
    prefill_offsets: Tensor | None = None
    """[prefills + 1] int32: where each prefill row's tokens begin, counted from the first prefill token"""
    prefill_tiles: Tensor | None = None
    """[tiles, 2] int32: prefill row and first token of each PREFILL_TILE"""
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives: made by the first layer of the step that asks for it, shared by all others.

        For what runs operation by operation; a captured graph would keep the first step's tensors.
        """
        if key not in self._shared:
            self._shared[key] = make()
        value: T = self._shared[key]
        return value
