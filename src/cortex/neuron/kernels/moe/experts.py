"""The experts of one layer, as tensors for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cortex.neuron.kernels.moe.rule import DEFAULT_RULE, RouterRule


class RoutedExperts(Protocol):
    """What routing has to know of a layer's experts, however their weights are stored."""

    @property
    def router(self) -> Tensor: ...

    @property
    def top_k(self) -> int: ...

    @property
    def renormalise(self) -> bool: ...

    @property
    def rule(self) -> RouterRule: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def num_shared(self) -> int: ...

    @property
    def num_experts(self) -> int: ...

    @property
    def num_routed(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def first(self) -> int:
        """The first of the routed experts that are held."""
        ...

    @property
    def num_held(self) -> int:
        """The number of routed experts that are held; the shared ones always are."""
        ...


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts stacked in one tensor per matrix: first the routed experts, then the shared ones, which every token uses.

    A shared expert that is several times as wide as the others is stored as several experts: the sum is the same. A
    rank of a divided model holds a run of the routed experts, and routes over all of them.
    """

    router: Tensor
    """[routed (+ 1), hidden]: a score for each routed expert; with gated shared experts, the last row is their gate"""
    gate_up: Tensor
    """[held experts, 2 · inner, hidden]"""
    down: Tensor
    """[held experts, hidden, inner]"""
    top_k: int
    """Routed experts per token."""
    renormalise: bool
    """Whether the weights of the selected experts are scaled to sum to one."""
    num_shared: int = 0
    first: int = 0
    """The first routed expert that is held."""
    rule: RouterRule = DEFAULT_RULE
    bias: Tensor | None = None
    """[routed] float32: added to the weights for the choice of experts, not to the weights of the chosen ones"""

    @property
    def num_experts(self) -> int:
        return self.num_routed + self.num_shared

    @property
    def num_routed(self) -> int:
        return len(self.router) - (self.rule.gates_shared and self.num_shared > 0)

    @property
    def num_held(self) -> int:
        return len(self.gate_up) - self.num_shared

    @property
    def slots(self) -> int:
        """Experts per token, including the shared ones."""
        return self.top_k + self.num_shared

    @property
    def inner(self) -> int:
        return self.down.shape[2]
