"""Norms of the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.norm import layer_norm, rms_norm
from cortex.neuron.layers.configs import NormConfig
from cortex.neuron.layers.parameters import Parameters


class RMSNorm:
    """Root-mean-square normalisation. A layer norm is one of what `centred` returns."""

    def __init__(self, parameters: Parameters, size: int, config: NormConfig, source: str) -> None:
        self.eps = config.eps
        self._subtracts_mean = config.subtracts_mean
        if config.weightless:
            self.weight = torch.ones(size, dtype=parameters.dtype, device=parameters.device)
        elif config.is_float32:
            shift, factor = float(config.zero_centred), config.scale
            self.weight = parameters.empty(size, dtype=torch.float32)
            parameters.bind(source, self.weight, lambda weight: (weight.float() + shift) * factor)
        else:
            self.weight = parameters.load(source, size)

    def __call__(self, x: Tensor, *, residual: Tensor | None = None, factor: Tensor | None = None) -> Tensor:
        """x: [..., size], normalised over the last dimension → the same, added to `residual`, times `factor`"""
        return rms_norm(x, self.weight, self.eps, residual, factor)

    def centred(self, x: Tensor) -> Tensor:
        """x: [rows, size] → without its mean, if this is a layer norm: the input of the GEMMs that apply the norm"""
        if not self._subtracts_mean:
            return x
        return (x - x.mean(-1, keepdim=True, dtype=torch.float32)).to(x.dtype)


class LayerNorm:
    def __init__(self, parameters: Parameters, size: int, eps: float, source: str, *, bias: bool) -> None:
        """`source`: the tensors of the checkpoint, without `.weight`."""
        self._eps = eps
        self._weight = parameters.load(f"{source}.weight", size)
        self._bias = parameters.load(f"{source}.bias", size) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size] → the same, normalised over the last dimension"""
        return layer_norm(x, self._weight, self._bias, self._eps)
