"""The feed-forward block of encoders: with a gate or without, and any activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.layers.configs import MLPConfig
from cortex.neuron.layers.linear import Linear
from cortex.neuron.layers.parameters import Parameters

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
