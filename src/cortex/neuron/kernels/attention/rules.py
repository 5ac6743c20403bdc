"""How one layer attends: what is fixed for all its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRules:
    scale: float
    """What scores are multiplied by before the softmax."""
    rope: Tensor
    """[positions, rotated dims] float32: cosines, then sines. Dimensions past the rotated ones pass through."""
    q_scale: Tensor | None = None
    """[dim]: the gain of a norm on every query head; keys have theirs in `k_scale`."""
    k_scale: Tensor | None = None
    eps: float = 0.0
    window: int | None = None
    """Positions a token looks back on, itself included; None: all."""
