"""One layer's experts as the kernels see them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts stacked in one tensor per matrix: first those that are chosen among, then those that every token takes.

    A shared expert that is several times as wide as the others is several experts here: the sum is the same.
    """

    router: Tensor
    """[routed (+ 1), hidden]: a score for each routed expert; with shared ones a last row, their gate"""
    gate_up: Tensor
    """[experts, 2 · inner, hidden]"""
    down: Tensor
    """[experts, hidden, inner]"""
    top_k: int
    """Routed experts that each token takes."""
    renormalise: bool
    """Whether the weights of the chosen add up to one; else they are what the softmax over all gave them."""
    num_shared: int = 0

    @property
    def num_experts(self) -> int:
        return len(self.gate_up)

    @property
    def num_routed(self) -> int:
        return len(self.gate_up) - self.num_shared

    @property
    def slots(self) -> int:
        """Experts that each token takes, shared ones included."""
        return self.top_k + self.num_shared

    @property
    def inner(self) -> int:
        return self.down.shape[2]
