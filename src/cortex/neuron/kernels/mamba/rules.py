"""The parameters of one Mamba-2 layer, and its state of each row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

CHUNK = 64
"""Tokens of a prefill row that are mixed in one piece."""


@dataclass(frozen=True, slots=True)
class MambaRules:
    """The parameters that all tokens of a layer share.

    The layout of a projected token: gate, values, keys (B), queries (C), time steps. Values, keys and queries are
    convolved. Each group has one key and one query for its consecutive heads.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_weight: Tensor
    """[taps, channels]: the last tap is for the token itself"""
    conv_bias: Tensor | None
    """[channels] float32"""
    decay_rate: Tensor
    """[heads] float32, positive"""
    step_bias: Tensor
    """[heads] float32: added to the time step of a token"""
    skip: Tensor
    """[heads] float32: the weight of a token's own value in its output"""

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The size of the keys of all groups, which is that of the queries."""
        return self.groups * self.state_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution."""
        return self.inner + 2 * self.keys


@dataclass(frozen=True, slots=True)
class MambaState:
    """The state of one layer for every row. A row that starts at position 0 ignores the old contents of its slot."""

    recent: Tensor
    """[slots, taps, channels]: the latest inputs of the convolution, with position p at p mod taps"""
    memory: Tensor
    """[slots, heads, state dim, head dim] float32"""
