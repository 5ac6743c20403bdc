"""The attention parameters of one layer, the same for all its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionRules:
    scale: float
    """The factor of the scores before the softmax."""
    rope: Tensor
    """[positions, rotated dims] float32: cosines, then sines. Dimensions of no pair are unchanged."""
    q_scale: Tensor | None = None
    """[dim]: the weight of the norm on every query head; `k_scale` is that of the key heads."""
    k_scale: Tensor | None = None
    eps: float = 0.0
    window: int | None = None
    """Positions that a token attends to, including itself; None: all."""
    sinks: Tensor | None = None
    """[heads] float32: a score of each head that takes part in the softmax and stands for no value; None: none"""
    norms_values: bool = False
    """Whether each value head is normalised too, without a weight."""
    pair_distance: int = 0
    """From the first dimension of a pair to the second; 0: the number of pairs, so that all pairs lie side by side."""
    softcap: float | None = None
    """Scores x become softcap · tanh(x / softcap); None: they are not capped."""
    whole_pictures: bool = False
    """Whether tokens of a picture see those after them, up to `Batch.reach`."""
    is_causal: bool = True
    """As in `AttentionConfig`. This and `rotates` are only for texts without pages."""
    rotates: bool = True

    @property
    def half(self) -> int:
        return self.pair_distance or self.rope.shape[1] // 2
