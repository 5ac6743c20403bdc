"""How one gated delta net layer mixes tokens, and what it remembers of each row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

L2_EPS = 1e-6
"""Under the root where queries and keys are brought to length one."""
CHUNK = 64
"""Tokens of a prefill row whose corrections are solved together."""


@dataclass(frozen=True, slots=True)
class DeltaRules:
    """What is fixed for all tokens of a layer.

    A projected token is laid out as queries, keys, values (the channels that are convolved), gate, write strengths,
    decay inputs. Each key head serves `value_heads / key_heads` value heads in a row.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_weight: Tensor
    """[taps, channels]: the last tap is the token itself"""
    decay_rate: Tensor
    """[value heads] float32, positive"""
    decay_bias: Tensor
    """[value heads] float32"""
    norm_weight: Tensor
    """[value dim]: the gain of the norm on every output head"""
    eps: float

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def projected_size(self) -> int:
        return self.channels + self.value_size + 2 * self.value_heads


@dataclass(frozen=True, slots=True)
class DeltaState:
    """One layer's memory of every row. A row that starts at position 0 does not read what its slot held before."""

    recent: Tensor
    """[slots, taps, channels]: the latest inputs of the convolution, that of position p at p mod taps. The token being
    computed writes its own place and reads the others, so programs that share a row never wait for each other."""
    memory: Tensor
    """[slots, value heads, key dim, value dim] float32: what the delta rule has stored"""
