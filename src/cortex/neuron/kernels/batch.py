"""The tensors of one step, as layers and kernels read them.

The tokens of the decode rows come first, one per row. The tokens of the prefill rows follow, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")

PREFILL_TILE = 128
"""Tokens of one prefill row that one program of the attention kernel processes."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """The host's view of a prefill row: `count` tokens from position `start`, at `offset` in the step."""

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
    """[tokens] int64: the KV slot of each token, page · page_tokens + offset. Discarded tokens write to page 0."""
    rows: Tensor
    """[rows] int64: the index of each row in the page table"""
    lengths: Tensor
    """[rows] int32: number of positions each row attends to, including its own tokens"""
    page_table: Tensor
    """[max rows, max pages] int32"""
    num_decodes: int
    max_length: int
    """The length of the longest row, or an upper bound of it in a captured graph, which serves many steps."""
    prefills: tuple[PrefillRow, ...] = ()
    prefill_offsets: Tensor | None = None
    """[prefills + 1] int32: the first token of each prefill row, relative to the first prefill token"""
    prefill_tiles: Tensor | None = None
    """[tiles, 2] int32: the prefill row and the first token of each tile of PREFILL_TILE tokens"""
    uniform: bool = False
    """Whether a token's result may depend only on its own sequence: then all rows are prefill rows, and no kernel adds
    in an order that follows the batch. A captured graph gives no `prefills`: its rows have one token each."""
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, which runs once per step and key. All layers of the step share the result.

        Only for eager execution: a captured graph would keep the tensors of the first step.
        """
        if key not in self._shared:
            self._shared[key] = make()
        value: T = self._shared[key]
        return value


def prefill_tiles(counts: Sequence[int]) -> NDArray[np.int32]:
    """(prefill row, first token) of every tile, the later ones of each row first: they are the longest to compute."""
    tiles = [(row, first) for row, count in enumerate(counts) for first in range(0, count, PREFILL_TILE)]
    return np.array(tiles[::-1], dtype=np.int32).reshape(-1, 2)
