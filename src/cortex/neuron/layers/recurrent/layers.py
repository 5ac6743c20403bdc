"""Recurrent layers: mixers that keep a state of fixed size for every sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.delta.gated_delta import gated_delta
from cortex.neuron.kernels.delta.rules import DeltaRules, DeltaState
from cortex.neuron.kernels.mamba.norm import group_norm
from cortex.neuron.kernels.mamba.rules import MambaRules, MambaState
from cortex.neuron.kernels.mamba.scan import mamba
from cortex.neuron.kernels.recurrent.short_conv import short_conv
from cortex.neuron.layers.linear import Linear, RowParallelLinear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.recurrent.configs import GatedDeltaConfig, MambaConfig, RecurrentConfig, ShortConvConfig


class RecurrentLayer(ABC):
    """Projects tokens, mixes them with the state of their row, and projects the result back. Reads and updates the
    states in `state`, which the engine sets before the first step."""

    state: tuple[Tensor, ...]
    """A tensor for each part of the config's state, [slots, *shape], each slot dense. A row that starts at position 0
    ignores the old contents of its slot."""

    def __init__(self, parameters: Parameters, config: RecurrentConfig, prefix: str) -> None:
        """`prefix`: of the layer's tensors in the checkpoint."""
        self.config = config
        self.input = Linear(parameters, config.hidden, config.input_rows(prefix))
        ((name, columns),) = config.output_columns(prefix).items()
        self.output = RowParallelLinear(parameters, columns, {name: config.hidden})

    def __call__(self, x: Tensor, norm: RMSNorm | None, batch: Batch, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] → residual + layer(norm(x)). `residual` may be overwritten: use the result."""
        return self.output(self.mix(self.input(x, norm=norm), batch), residual=residual)

    @abstractmethod
    def mix(self, projected: Tensor, batch: Batch) -> Tensor:
        """projected: [tokens, input rows] → [tokens, output columns]. Advances the state of the rows."""


def load_conv_weight(parameters: Parameters, taps: int, channels: int, source: str) -> Tensor:
    """The weight of a causal convolution: [taps, channels]"""
    weight = parameters.empty(taps, channels)
    parameters.bind(source, weight, lambda stored: stored[:, 0].t(), shape=(channels, 1, taps))
    return weight


class GatedDelta(RecurrentLayer):
    """The gated delta net: a recurrent state of fixed size, updated token by token, replaces attention."""

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


class Mamba(RecurrentLayer):
    """Mamba-2: a state-space layer whose state every token decays, writes to and reads."""

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


class ShortConv(RecurrentLayer):
    """The gated short convolution: a mixer whose state is the latest few tokens."""

    def __init__(self, parameters: Parameters, config: ShortConvConfig, prefix: str) -> None:
        super().__init__(parameters, config, prefix)
        self.weight = load_conv_weight(parameters, config.conv_taps, config.channels, f"{prefix}.conv.weight")

    def mix(self, projected: Tensor, batch: Batch) -> Tensor:
        (recent,) = self.state
        return short_conv(projected, self.weight, batch, recent)
