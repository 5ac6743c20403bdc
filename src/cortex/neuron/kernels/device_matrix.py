"""A quantised matrix in the memory of a GPU: integers with scales per group, or eight-bit floating-point numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.float8.layout import Float8Layout
from cortex.neuron.kernels.float8.matrix import Float8Matrix, empty_float8_matrix, widened
from cortex.neuron.kernels.quantised.packing import PackedMatrix, empty_matrix, unpacked
from cortex.neuron.kernels.quantised.recipes import DeviceLayout

DeviceMatrix = PackedMatrix | Float8Matrix


def empty_device_matrix(layout: DeviceLayout, outputs: int, inputs: int, device: torch.device) -> DeviceMatrix:
    """Memory for a matrix, contents undefined until all rows are put."""
    if isinstance(layout, Float8Layout):
        return empty_float8_matrix(layout, outputs, inputs, device)
    return empty_matrix(layout, outputs, inputs, device)


def numbers_of(matrix: DeviceMatrix) -> Tensor:
    """Its weights in float32: [outputs, inputs]"""
    return widened(matrix) if isinstance(matrix, Float8Matrix) else unpacked(matrix)
