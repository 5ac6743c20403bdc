"""From a layout to the memory of a matrix: the one place that knows which storage has which layout."""

from __future__ import annotations

import torch

from cortex.neuron.kernels.cpu.layout import CpuLayout
from cortex.neuron.kernels.cpu.native import NativeMatrix
from cortex.neuron.kernels.float8.layout import Float8Layout
from cortex.neuron.kernels.float8.matrix import Float8Matrix
from cortex.neuron.kernels.layouts import DeviceLayout, MatrixLayout, StackLayout
from cortex.neuron.kernels.matrix import ExpertMatrix, StoredMatrix
from cortex.neuron.kernels.quantised.layout import OrderedLayout
from cortex.neuron.kernels.quantised.matrix import OrderedMatrix, PackedMatrix


def empty_matrix(layout: MatrixLayout, outputs: int, inputs: int, device: torch.device) -> StoredMatrix:
    """Memory for a quantised matrix, contents undefined until all rows are put."""
    if isinstance(layout, CpuLayout):
        return NativeMatrix(layout, outputs, inputs, device)
    return empty_stack(layout, outputs, inputs, device, num_experts=1)


def empty_stack(
    layout: StackLayout, outputs: int, inputs: int, device: torch.device, *, num_experts: int
) -> ExpertMatrix:
    """The same for the rows of several experts. `outputs`: of all of them."""
    if isinstance(layout, OrderedLayout):
        return OrderedMatrix(layout.codes, outputs, inputs, device, num_experts)
    return empty_device_matrix(layout, outputs, inputs, device)


def empty_device_matrix(layout: DeviceLayout, outputs: int, inputs: int, device: torch.device) -> ExpertMatrix:
    """The same in a layout for GPUs."""
    if isinstance(layout, Float8Layout):
        return Float8Matrix(layout, outputs, inputs, device)
    return PackedMatrix(layout, outputs, inputs, device)
