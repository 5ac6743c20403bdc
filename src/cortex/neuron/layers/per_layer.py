"""Inputs that every layer of a model has of its own: a part of a second, wide embedding of the token, and a projection
of the first one."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.layers.configs import PerLayerInputConfig, PerLayerInputsConfig
from cortex.neuron.layers.embedding import Embedding
from cortex.neuron.layers.linear import Linear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters


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
    """What one layer does with its input. Small, and whole on every rank of a divided model."""

    def __init__(self, parameters: Parameters, config: PerLayerInputConfig, prefix: str) -> None:
        self._gate = Linear(parameters, config.hidden, {f"{prefix}.per_layer_input_gate": config.size})
        self._projection = Linear(parameters, config.size, {f"{prefix}.per_layer_projection": config.hidden})
        self._norm = RMSNorm(parameters, config.hidden, config.norm, f"{prefix}.post_per_layer_input_norm.weight")

    def __call__(self, hidden: Tensor, own: Tensor, factor: Tensor | None) -> Tensor:
        """hidden: [tokens, hidden], own: [tokens, size] → [tokens, hidden], times `factor`"""
        gated = F.gelu(self._gate(hidden), approximate="tanh").mul_(own)
        return self._norm(self._projection(gated), residual=hidden, factor=factor)
