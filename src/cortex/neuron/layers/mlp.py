"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.layers.linear import GatedLinear, Linear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters


class MLP:
    def __init__(self, parameters: Parameters, hidden: int, inner: int, prefix: str, *, bias: bool = False) -> None:
        self.gate_up = GatedLinear(parameters, hidden, inner, f"{prefix}.gate_proj", f"{prefix}.up_proj", bias=bias)
        self.down = Linear(parameters, inner, {f"{prefix}.down_proj": hidden}, bias=bias)

    def __call__(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden: [tokens, hidden] → hidden + mlp(norm(hidden))"""
        return self.down(self.gate_up(hidden, norm=norm), residual=hidden)
