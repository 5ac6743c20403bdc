"""Layer norms as encoders have them, with a bias where the model has one."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.layer_norm import layer_norm
from cortex.neuron.layers.parameters import Parameters


class LayerNorm:
    def __init__(self, parameters: Parameters, size: int, eps: float, source: str, *, bias: bool) -> None:
        """`source`: the tensors of the checkpoint, without `.weight`."""
        self._eps = eps
        self._weight = parameters.load(f"{source}.weight", size)
        self._bias = parameters.load(f"{source}.bias", size) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size] → the same, normalised over the last dimension"""
        return layer_norm(x, self._weight, self._bias, self._eps)
