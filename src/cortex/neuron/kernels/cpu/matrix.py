"""What all forms of quantised matrices on CPUs share."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cortex.neuron.kernels.cpu.layout import CpuLayout
from cortex.neuron.kernels.matrix import KeptForm, StoredMatrix
from cortex.neuron.kernels.quantised.quantise import quantised


class CpuMatrix(StoredMatrix):
    keeps: ClassVar[KeptForm] = "codes"
    takes_float32: ClassVar[bool] = True

    def __init__(self, layout: CpuLayout, outputs: int, inputs: int, device: torch.device) -> None:
        super().__init__(outputs, inputs, device)
        self.layout = layout

    def put_values(self, first_row: int, values: Tensor) -> None:
        self.put_codes(first_row, *quantised(values, self.layout.codes))

    def values(self, rows: slice = slice(None)) -> Tensor:
        return self.rows(torch.arange(self.outputs)[rows], torch.float32)

    def gates(self, x: Tensor) -> bool:  # noqa: ARG002
        return False
