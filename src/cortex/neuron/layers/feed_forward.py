"""The blocks of a layer besides its mixer: feed-forward blocks, and the inputs of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.activations import relu_squared_
from cortex.neuron.kernels.moe.host_layers import HostBlock
from cortex.neuron.kernels.moe.hosted import hosted_block
from cortex.neuron.kernels.quantised.matrix import in_order
from cortex.neuron.layers.configs import MLPConfig, PerLayerInputConfig, PerLayerInputsConfig
from cortex.neuron.layers.embedding import Embedding
from cortex.neuron.layers.linear import GatedLinear, Linear, RowParallelLinear, prologue_of
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


class HostedMLP:
    """An `MLP` whose matrices are in host memory."""

    def __init__(self, parameters: Parameters, config: MLPConfig, prefix: str) -> None:
        assert parameters.host is not None
        inputs, down = config.input_rows(prefix), f"{prefix}.down_proj"
        self._team, self._group = parameters.host, parameters.group
        gate_up = parameters.hosted_matrix({f"{name}.weight": rows for name, rows in inputs.items()}, config.hidden)
        self._order = gate_up.order
        self.host = HostBlock(
            gate_up,
            parameters.hosted_matrix({f"{down}.weight": config.hidden}, config.inner),
            self._team.dtype,
            gated=config.gated,
            activation=config.activation,
        )
        gate_up_bias = parameters.empty(sum(inputs.values())) if config.bias else None
        if gate_up_bias is not None:
            for name, part in zip(inputs, gate_up_bias.split(list(inputs.values())), strict=True):
                parameters.bind(f"{name}.bias", part)
        down_bias = parameters.load(f"{down}.bias", config.hidden) if config.output_bias else None
        self.host.biases = (gate_up_bias, down_bias)
        self._team.layers.append(self.host)

    def __call__(self, x: Tensor, norm: RMSNorm | None, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] → residual + mlp(norm(x)). `residual` may be overwritten: use the result."""
        own_residual, prologue = residual if self._group.shard.is_first else None, prologue_of(norm)
        x = prologue.applied(x) if self._order is None else in_order(x, self._order, prologue)
        return self._group.all_reduce(hosted_block(x, self.host, self._team, own_residual))


ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "identity": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class FeedForward:
    def __init__(self, parameters: Parameters, config: MLPConfig, prefix: str) -> None:
        self._is_gated = config.gated
        self._activation = ACTIVATIONS[config.activation]
        self._up = Linear(parameters, config.hidden, config.input_rows(prefix), bias=config.bias)
        down = {f"{prefix}.down_proj": config.hidden}
        self._down = Linear(parameters, config.inner, down, bias=config.output_bias)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """x: [tokens, hidden] → residual + block(x). `residual` may be overwritten: use the result."""
        inner = self._up(x)
        if self._is_gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self._activation(gate) * up
        else:
            inner = self._activation(inner)
        return self._down(inner, residual=residual)


class PerLayerInputs:
    """Makes the inputs of all layers. On the ranks of a divided model the embedding is divided by token, the projection
    is on all of them."""

    def __init__(self, parameters: Parameters, config: PerLayerInputsConfig, prefix: str) -> None:
        self._config = config
        name = f"{prefix}.embed_tokens_per_layer.weight"
        self._embedding = Embedding(parameters, config.vocab, config.width, name)
        self._projection = Linear(parameters, config.hidden, {f"{prefix}.per_layer_model_projection": config.width})
        self._norm = RMSNorm(parameters, config.size, config.norm, f"{prefix}.per_layer_projection_norm.weight")

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """tokens: [tokens], hidden: their scaled embeddings [tokens, hidden] → [tokens, layers, size]"""
        shape = (len(tokens), self._config.num_layers, self._config.size)
        projected = self._norm(self._projection(hidden).view(shape))
        return projected.add_(self._embedding(tokens).view(shape), alpha=self._config.embedding_scale)


class PerLayerInput:
    """Applies one layer's own input. Small, and whole on every rank of a divided model."""

    def __init__(self, parameters: Parameters, config: PerLayerInputConfig, prefix: str) -> None:
        self._gate = Linear(parameters, config.hidden, {f"{prefix}.per_layer_input_gate": config.size})
        self._projection = Linear(parameters, config.size, {f"{prefix}.per_layer_projection": config.hidden})
        self._norm = RMSNorm(parameters, config.hidden, config.norm, f"{prefix}.post_per_layer_input_norm.weight")

    def __call__(self, hidden: Tensor, own: Tensor, factor: Tensor | None) -> Tensor:
        """hidden: [tokens, hidden], own: [tokens, size] → [tokens, hidden], times `factor`"""
        gated = F.gelu(self._gate(hidden), approximate="tanh").mul_(own)
        return self._norm(self._projection(gated), residual=hidden, factor=factor)
