"""The parameters of one gated delta net layer, and its state of each row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cortex.neuron.delta_sizes import DeltaSizes

L2_EPS = 1e-6
"""Added under the root where queries and keys are normalised to unit length."""
CHUNK = 64
"""Tokens of a prefill row whose corrections are solved in one system."""


@dataclass(frozen=True, slots=True)
class DeltaRules(DeltaSizes):
    """The parameters that all tokens of a layer share.

    The layout of a projected token: queries, keys, values (the convolved channels), gate, write strengths, decay
    inputs.
    """

    conv_weight: Tensor
    """[taps, channels]: the last tap is for the token itself"""
    decay_rate: Tensor
    """[value heads] float32, positive"""
    decay_bias: Tensor
    """[value heads] float32"""
    norm_weight: Tensor
    """[value dim]: the weight of the norm on every output head"""
    eps: float

    @property
    def projected_size(self) -> int:
        return self.channels + self.value_size + 2 * self.value_heads


@dataclass(frozen=True, slots=True)
class DeltaState:
    """The state of one layer for every row. A row that starts at position 0 ignores the old contents of its slot."""

    recent: Tensor
    """[slots, taps, channels]: the latest inputs of the convolution, with position p at p mod taps. A token writes its
    own entry and reads only the others, so programs that share a row need no synchronisation."""
    memory: Tensor
    """[slots, value heads, key dim, value dim] float32: the matrix M of the delta rule"""
