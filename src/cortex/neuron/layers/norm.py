"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.norm import rms_norm
from cortex.neuron.layers.parameters import Parameters


class RMSNorm:
    def __init__(
        self, parameters: Parameters, size: int, eps: float, source: str, *, zero_centred: bool = False
    ) -> None:
        """`zero_centred`: the checkpoint stores the scale minus one."""
        self.eps = eps
        if zero_centred:
            self.weight = parameters.empty(size, dtype=torch.float32)
            parameters.bind(source, self.weight, lambda scale: scale.float() + 1)
        else:
            self.weight = parameters.load(source, size)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size], normalised over the last dimension."""
        return rms_norm(x, self.weight, self.eps)
