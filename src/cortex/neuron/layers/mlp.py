"""The feed-forward block, with a gate or without."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.relu_squared import relu_squared_
from cortex.neuron.layers.configs import MLPConfig
from cortex.neuron.layers.linear import GatedLinear, Linear, RowParallelLinear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters


class MLP:
    def __init__(self, parameters: Parameters, config: MLPConfig, prefix: str) -> None:
        hidden, inner = config.hidden, config.inner
        self.gate_up: GatedLinear | None = None
        if config.gated:
            gate, up = config.input_rows(prefix)
            self.gate_up = GatedLinear(
                parameters, hidden, inner, gate, up, bias=config.bias, activation=config.activation
            )
        else:
            self.up = Linear(parameters, hidden, config.input_rows(prefix), bias=config.bias)
        self.down = RowParallelLinear(parameters, inner, {f"{prefix}.down_proj": hidden}, bias=config.output_bias)

    def __call__(self, x: Tensor, norm: RMSNorm | None, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] → residual + mlp(norm(x)). `residual` may be overwritten: use the result."""
        if self.gate_up is None:
            return self.down(relu_squared_(self.up(x, norm=norm)), residual=residual)
        inner = self.gate_up.fused(x, norm)
        if inner is not None:
            return self.down(inner, residual=residual)
        return self.down.activated(self.gate_up.gate_up(x, norm=norm), residual, self.gate_up.activation)
