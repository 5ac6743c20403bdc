"""The gated feed-forward block."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.layers.configs import MLPConfig
from cortex.neuron.layers.linear import GatedLinear, RowParallelLinear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters


class MLP:
    def __init__(self, parameters: Parameters, config: MLPConfig, prefix: str) -> None:
        hidden, inner = config.hidden, config.inner
        gate, up = f"{prefix}.gate_proj", f"{prefix}.up_proj"
        self.gate_up = GatedLinear(parameters, hidden, inner, gate, up, bias=config.bias)
        self.down = RowParallelLinear(parameters, inner, {f"{prefix}.down_proj": hidden}, bias=config.output_bias)

    def __call__(self, hidden: Tensor, norm: RMSNorm) -> Tensor:
        """hidden: [tokens, hidden] → hidden + mlp(norm(hidden))"""
        inner = self.gate_up.fused(hidden, norm)
        if inner is not None:
            return self.down(inner, residual=hidden)
        return self.down.activated(self.gate_up.gate_up(hidden, norm=norm), hidden, self.gate_up.activation)
