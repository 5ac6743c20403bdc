"""Mamba-2: a state-space layer whose state every token decays, writes to and reads."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.mamba.norm import group_norm
from cortex.neuron.kernels.mamba.rules import MambaRules, MambaState
from cortex.neuron.kernels.mamba.scan import mamba
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.recurrent.configs import MambaConfig
from cortex.neuron.layers.recurrent.layer import RecurrentLayer, load_conv_weight


class Mamba(RecurrentLayer):
    def __init__(self, parameters: Parameters, config: MambaConfig, prefix: str) -> None:
        super().__init__(parameters, config, prefix)
        self._group = parameters.group
        self._norm_size, self._eps = config.norm_size, config.norm_eps
        self.norm_weight = parameters.load(f"{prefix}.norm.weight", config.inner)
        decay_rate = parameters.empty(config.heads, dtype=torch.float32)
        parameters.bind(f"{prefix}.A_log", decay_rate, lambda logarithm: logarithm.float().exp())
        conv_bias = None
        if config.conv_bias:
            conv_bias = parameters.load(f"{prefix}.conv1d.bias", config.channels, dtype=torch.float32)
        self.rules = MambaRules(
            heads=config.heads,
            head_dim=config.head_dim,
            groups=config.groups,
            state_dim=config.state_dim,
            conv_weight=load_conv_weight(parameters, config.conv_taps, config.channels, f"{prefix}.conv1d.weight"),
            conv_bias=conv_bias,
            decay_rate=decay_rate,
            step_bias=parameters.load(f"{prefix}.dt_bias", config.heads, dtype=torch.float32),
            skip=parameters.load(f"{prefix}.D", config.heads, dtype=torch.float32),
        )

    def mix(self, projected: Tensor, batch: Batch) -> Tensor:
        mixed = mamba(projected, self.rules, batch, MambaState(*self.state))
        if self._norm_size <= self.rules.inner:
            return group_norm(mixed, self.norm_weight, self._norm_size, self._eps, projected.dtype)
        return self._divided_norm(mixed).to(projected.dtype)

    def _divided_norm(self, mixed: Tensor) -> Tensor:
        """The norm of a group of values that this rank has a part of."""
        shard, inner = self._group.shard, self.rules.inner
        sums = mixed.new_zeros(len(mixed), shard.size * inner // self._norm_size)
        own = sums[:, shard.rank * inner // self._norm_size, None]
        own.copy_(mixed.square().sum(-1, keepdim=True))
        sums = self._group.all_reduce(sums)
        own = sums[:, shard.rank * inner // self._norm_size, None]
        scale = torch.rsqrt(own / self._norm_size + self._eps)
        return mixed * scale * self.norm_weight.float()
