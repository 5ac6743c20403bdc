"""Short convolutions and Mamba-2 in GGUF: the tensors of a layer, as the hub has them.

Converters rename them, drop the dimension of one of the convolution, and give the tensors of the heads two dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from cortex.neuron.weights.errors import Malformed
from cortex.neuron.weights.stored import Adjustment, StoredTensor


def recurrent_tensor(mixer: str, part: str, stored: StoredTensor) -> tuple[str, StoredTensor] | None:
    """The tensor's name in the hub's layer, and the tensor with the hub's shape; None: another tensor.

    `part`: its name in the layer, `"ssm_a"`. Raises CheckpointError for a shape that cannot be.
    """
    found = _TENSORS.get(mixer, {}).get(part)
    if found is None:
        return None
    name, arranged = found
    return name, arranged(stored)


def _as_it_is(stored: StoredTensor) -> StoredTensor:
    return stored


def _flat(stored: StoredTensor) -> StoredTensor:
    return replace(stored, shape=(math.prod(stored.shape),))


def _logarithms(stored: StoredTensor) -> StoredTensor:
    return replace(_flat(stored), adjustment=Adjustment.NEGATIVE_EXPONENTIAL)


def _convolution(stored: StoredTensor) -> StoredTensor:
    if len(stored.shape) != 2:
        raise Malformed(f"{stored.file.path}: {stored.name} has the shape {stored.shape}; convert the model again")
    return replace(stored, shape=(stored.shape[0], 1, stored.shape[1]))


_Arranged = Callable[[StoredTensor], StoredTensor]
_SHORT_CONVOLUTION: Final[Mapping[str, tuple[str, _Arranged]]] = {
    "shortconv.in_proj.weight": ("conv.in_proj.weight", _as_it_is),
    "shortconv.conv.weight": ("conv.conv.weight", _convolution),
    "shortconv.out_proj.weight": ("conv.out_proj.weight", _as_it_is),
}
_MAMBA: Final[Mapping[str, tuple[str, _Arranged]]] = {
    "ssm_in.weight": ("mamba.in_proj.weight", _as_it_is),
    "ssm_conv1d.weight": ("mamba.conv1d.weight", _convolution),
    "ssm_conv1d.bias": ("mamba.conv1d.bias", _as_it_is),
    "ssm_a": ("mamba.A_log", _logarithms),
    "ssm_d": ("mamba.D", _flat),
    "ssm_dt.bias": ("mamba.dt_bias", _as_it_is),
    "ssm_norm.weight": ("mamba.norm.weight", _flat),
    "ssm_out.weight": ("mamba.out_proj.weight", _as_it_is),
}
_TENSORS: Final[Mapping[str, Mapping[str, tuple[str, _Arranged]]]] = {
    "mamba": _MAMBA,
    "short_convolution": _SHORT_CONVOLUTION,
}
