"""The tensors of one step, as layers and kernels read them.

The tokens of the decode rows come first, one per row. The tokens of the prefill rows follow, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
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
    cut: int = 0
    """After this many tokens, recurrent layers also save the state of the row in `slot`; 0: nowhere."""
    slot: int = 0


@dataclass(frozen=True, slots=True)
class PictureVectors:
    """The vectors that replace token embeddings at the positions of pictures."""

    index: Tensor
    """[vectors] int64: the tokens of the step, ascending"""
    vectors: Tensor
    """[vectors, parts, hidden]: the first part is the embedding; each further one is added after one of the first
    layers"""

    def within(self, first: int, end: int) -> PictureVectors | None:
        """Those of some of the step's tokens, as a step of their own."""
        start, stop = torch.searchsorted(self.index, torch.tensor((first, end), device=self.index.device)).tolist()
        return PictureVectors(self.index[start:stop] - first, self.vectors[start:stop]) if start < stop else None


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
    """[prefill rows + 1] int32: the first token of each prefill row, relative to the first prefill token"""
    prefill_tiles: Tensor | None = None
    """[tiles, 2] int32: the prefill row and the first token of each tile of PREFILL_TILE tokens"""
    prefill_cuts: Tensor | None = None
    """[prefill rows, 2] int32: `cut` and `slot` of each prefill row, which only recurrent layers read"""
    batch_invariant: bool = False
    """Whether a token's result may depend only on its own sequence: then all rows are prefill rows, and no kernel adds
    in an order that follows the batch. A captured graph gives no `prefills`: its rows have one token each."""
    is_padded: bool = False
    """Whether tokens after those of the last row belong to none, in a graph that serves many steps: it gives no
    `prefills`, and some of its prefill rows and tiles may be empty. The results of such tokens are finite."""
    shares_rows: bool = False
    """Whether several decode rows may be consecutive tokens of one sequence, which attend to each other."""
    has_pages: bool = True
    """False for whole texts: no KV is kept, all rows are prefill rows from position 0, and `slots`, `rows` and
    `page_table` are empty."""
    rope: Tensor | None = None
    """[tokens] int64: the row of the rotations' tables for each token, where that is not its position"""
    pictures: PictureVectors | None = None
    reach: Tensor | None = None
    """[tokens] int32: how many positions of its row each token sees, where tokens of pictures see later ones"""
    groups: tuple[Batch, ...] = ()
    """The step as the layers of each KV group after the first see it; empty: all layers see the same."""
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    _kept: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def rope_positions(self) -> Tensor:
        """[tokens] int64: the row of the rotations' tables for each token."""
        return self.positions if self.rope is None else self.rope

    @property
    def num_prefills(self) -> int:
        """The prefill rows, with those of a graph that are empty."""
        return 0 if self.prefill_offsets is None else len(self.prefill_offsets) - 1

    def empty(self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for values of each token, which kernels fill row by row; finite where tokens belong to no row.

        All layers of a padded step share what has the same name and shape, because one fill serves them all: a layer
        must have read it before the next one writes.
        """
        size, kind = tuple(shape), dtype or like.dtype
        if not self.is_padded:
            return torch.empty(size, dtype=kind, device=like.device)
        return self.once((name, size, kind), lambda: torch.zeros(size, dtype=kind, device=like.device))

    def with_groups(self, slots: Sequence[Tensor], page_tables: Sequence[Tensor]) -> Batch:
        """The same step for a model with more KV groups, which have these slots and page tables."""
        if not slots:
            return self
        pairs = zip(slots, page_tables, strict=True)
        return replace(self, groups=tuple(replace(self, slots=own, page_table=table) for own, table in pairs))

    def of_group(self, group: int) -> Batch:
        """The step as the layers of a KV group see it, with their slots and their page table."""
        return self.groups[group - 1] if group and self.groups else self

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, which runs once per step and key. All layers of the step share the result: what depends
        on the pages needs the window in its key, because each KV group has another.

        A captured graph keeps what was computed before its capture, and computes the rest in each replay.
        """
        if key not in self._shared:
            self._shared[key] = make()
        value: T = self._shared[key]
        return value

    @property
    def kept(self) -> dict[Hashable, Any]:
        """Values that a layer leaves for later ones of the same pass, by layer. Each pass writes before it reads."""
        return self._kept


def prefill_tiles(counts: Sequence[int]) -> NDArray[np.int32]:
    """(prefill row, first token) of every tile, the later ones of each row first: they are the longest to compute."""
    tiles = [(row, first) for row, count in enumerate(counts) for first in range(0, count, PREFILL_TILE)]
    return np.array(tiles[::-1], dtype=np.int32).reshape(-1, 2)
