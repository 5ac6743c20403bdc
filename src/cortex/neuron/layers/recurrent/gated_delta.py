"""The gated delta net: a recurrent state of fixed size, updated token by token, replaces attention."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.delta.gated_delta import gated_delta
from cortex.neuron.kernels.delta.rules import DeltaRules, DeltaState
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.recurrent.configs import GatedDeltaConfig
from cortex.neuron.layers.recurrent.layer import RecurrentLayer, load_conv_weight


class GatedDelta(RecurrentLayer):
    def __init__(self, parameters: Parameters, config: GatedDeltaConfig, prefix: str) -> None:
        super().__init__(parameters, config, prefix)
        decay_rate = parameters.empty(config.value_heads, dtype=torch.float32)
        parameters.bind(f"{prefix}.A_log", decay_rate, lambda logarithm: logarithm.float().exp())
        self.rules = DeltaRules(
            key_heads=config.key_heads,
            value_heads=config.value_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            conv_weight=load_conv_weight(parameters, config.conv_taps, config.channels, f"{prefix}.conv1d.weight"),
            decay_rate=decay_rate,
            decay_bias=parameters.load(f"{prefix}.dt_bias", config.value_heads, dtype=torch.float32),
            norm_weight=parameters.load(f"{prefix}.norm.weight", config.value_dim),
            eps=config.norm_eps,
        )

    def mix(self, projected: Tensor, batch: Batch) -> Tensor:
        return gated_delta(projected, self.rules, batch, DeltaState(*self.state))
