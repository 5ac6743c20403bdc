"""The experts of one layer, as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cortex.neuron.kernels.matrix import ExpertMatrix
from cortex.neuron.kernels.moe.rule import DEFAULT_RULE, RouterRule


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts, one below the other in two matrices: first the routed ones, then the shared, which every token uses.

    A shared expert that is several times as wide as the others is stored as several experts: the sum is the same. A
    rank of a divided model holds a run of the routed experts, and routes over all of them.
    """

    router: Tensor
    """[routed (+ 1), hidden]: a score for each routed expert; with gated shared experts, the last row is their gate"""
    gate_up: ExpertMatrix
    """[held experts · 2 · inner, hidden]: the gate's rows of an expert, then those of up"""
    down: ExpertMatrix
    """[held experts · hidden, inner]"""
    top_k: int
    """Routed experts per token."""
    renormalise: bool
    """Whether the weights of the selected experts are scaled to sum to one."""
    num_shared: int = 0
    first: int = 0
    """The first routed expert that is held."""
    activation: str = "silu"
    """One of `ACTIVATIONS`."""
    gated: bool = True
    """Otherwise `gate_up` has only the rows of up, and an expert is down(relu(up)²)."""
    rule: RouterRule = DEFAULT_RULE
    bias: Tensor | None = None
    """[routed] float32: added to the weights for the choice of experts, not to the weights of the chosen ones"""
    router_bias: Tensor | None = None
    """Added to the scores, one value for each row of the router."""
    gate_up_bias: Tensor | None = None
    """One value for each row of `gate_up`; `down_bias` has one for each row of `down`."""
    down_bias: Tensor | None = None
    router_norm: Tensor | None = None
    """[hidden]: the weight of the norm before the router; None: that of the norm before the experts"""
    scales: Tensor | None = None
    """[routed] float32: factors of the weights of the chosen experts"""
    aligned_router: Tensor | None = None
    """The router and rows after it that do not count, a multiple of eight in all; None: there are none"""

    slot_of: Tensor | None = None
    """[routed] int32: where the matrices have each routed expert, below 0: nowhere; None: a run from `first` on"""
    expert_on: Tensor | None = None
    """[held] int64: the expert of each of those places"""

    @property
    def num_experts(self) -> int:
        return self.num_routed + self.num_shared

    @property
    def num_routed(self) -> int:
        return len(self.router) - (self.rule.gates_shared and self.num_shared > 0)

    @property
    def num_held(self) -> int:
        """The number of routed experts that are held; the shared ones always are."""
        return self.down.outputs // self.gate_up.inputs - self.num_shared

    @property
    def slots(self) -> int:
        """Experts per token, including the shared ones."""
        return self.top_k + self.num_shared

    @property
    def inner(self) -> int:
        return self.down.inputs
