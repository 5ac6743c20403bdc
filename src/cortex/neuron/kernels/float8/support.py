"""What a device and torch's libraries multiply in eight-bit floating point."""

from __future__ import annotations

import torch

from cortex.neuron.kernels.device_properties import properties_of
from cortex.neuron.kernels.float8.layout import Float8Layout

_LIBRARY_GROUPS = 4
"""It reads the scales of this many blocks of columns at a time."""
_CUDA = tuple(map(int, (torch.version.cuda or "0").split(".")))


def capability_of(device: torch.device) -> tuple[int, int]:
    return properties_of(device).capability


def has_float8_products(device: torch.device) -> bool:
    """Whether the tensor cores of this device multiply FP8: Ada, Hopper and later."""
    return capability_of(device) >= (8, 9)


def has_library_product(
    layout: Float8Layout, inputs: int, capability: tuple[int, int], cuda: tuple[int, ...] = _CUDA
) -> bool:
    """Whether torch multiplies such a matrix: with a scale for each block only on Hopper, from CUDA 12.9 on. There it
    gives wrong results, without an error, if a row of scales is not a multiple of `_LIBRARY_GROUPS`."""
    if layout.block:
        return capability[0] == 9 and cuda >= (12, 9) and inputs % (_LIBRARY_GROUPS * layout.block) == 0
    return capability >= (8, 9)
