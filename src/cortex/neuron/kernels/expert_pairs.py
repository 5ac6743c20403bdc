"""Pairs: one token with one of its experts each; pair = token · slots + slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The experts and weights of each token, by pair."""

    experts: Tensor
    """[tokens, slots] int32"""
    weights: Tensor
    """[tokens, slots] float32"""


@dataclass(frozen=True, slots=True)
class PairLists:
    """The pairs of each expert."""

    weights: Tensor
    """[tokens, slots] float32"""
    counts: Tensor
    """[experts] int32: pairs of each expert"""
    members: Tensor
    """[experts, tokens] int32: the pairs, valid up to the count of the expert"""


class ExpertPairs(NamedTuple):
    """Pairs of small batches, each a GEMV of its own.

    Without `weights` the rows of an expert's matrix are gate and up, and the result is silu(norm(x) Gᵀ) · norm(x) Uᵀ.
    With them it is weight · x Wᵀ.
    """

    chosen: Tensor
    """[pairs] int32"""
    weights: Tensor | None
    """[pairs] float32"""
    per_row: int
    """Consecutive pairs that have the same row of the input."""
