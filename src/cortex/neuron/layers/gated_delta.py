"""The gated delta net: a recurrent state of fixed size, updated token by token, replaces attention."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.delta.gated_delta import gated_delta
from cortex.neuron.kernels.delta.rules import DeltaRules, DeltaState
from cortex.neuron.layers.configs import GatedDeltaConfig
from cortex.neuron.layers.linear import Linear, RowParallelLinear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters


class GatedDelta:
    """Reads and updates the recurrent states in `state`, which the engine sets before the first step."""

    state: DeltaState

    def __init__(self, parameters: Parameters, config: GatedDeltaConfig, prefix: str) -> None:
        self.config = config
        self.input = Linear(parameters, config.hidden, config.input_rows(prefix))
        self.output = RowParallelLinear(parameters, config.value_size, {f"{prefix}.out_proj": config.hidden})
        conv_weight = parameters.empty(config.conv_taps, config.channels)
        parameters.bind(
            f"{prefix}.conv1d.weight",
            conv_weight,
            lambda weight: weight[:, 0].t(),
            shape=(config.channels, 1, config.conv_taps),
        )
        decay_rate = parameters.empty(config.value_heads, dtype=torch.float32)
        parameters.bind(f"{prefix}.A_log", decay_rate, lambda logarithm: logarithm.float().exp())
        self.rules = DeltaRules(
            key_heads=config.key_heads,
            value_heads=config.value_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            conv_weight=conv_weight,
            decay_rate=decay_rate,
            decay_bias=parameters.load(f"{prefix}.dt_bias", config.value_heads, dtype=torch.float32),
            norm_weight=parameters.load(f"{prefix}.norm.weight", config.value_dim),
            eps=config.norm_eps,
        )

    def __call__(self, x: Tensor, norm: RMSNorm | None, batch: Batch, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] → residual + gated delta net(norm(x)). `residual` may be overwritten: use the result."""
        projected = self.input(x, norm=norm)
        return self.output(gated_delta(projected, self.rules, batch, self.state), residual=residual)
