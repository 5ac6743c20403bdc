"""What all forms of quantised matrices on CPUs share."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from cortex.neuron.kernels.cpu.layout import CpuLayout
from cortex.neuron.kernels.matrix import Epilogue, KeptForm, Prologue, StoredMatrix
from cortex.neuron.kernels.norm import rms_norm_in_two
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


class LibraryMatrix(CpuMatrix):
    """A matrix that a GEMM of torch multiplies with, which has no epilogue."""

    def fuses(self, prologue: Prologue, x: Tensor) -> bool:  # noqa: ARG002
        """The factor of a norm is multiplied into the result of the GEMM."""
        return prologue.activation is None

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return self._rows(ids).to(dtype)

    def _product(self, x: Tensor, prologue: Prologue, epilogue: Epilogue, out: Tensor | None) -> Tensor:
        scale = 1.0
        if prologue.norm is not None:
            x, scale = rms_norm_in_two(x, prologue.norm, prologue.eps)
        y = self._scaled_product(x, scale)
        for added in (epilogue.bias, epilogue.residual):
            if added is not None:
                y = y.add_(added)
        return y if out is None else out.copy_(y)

    @abstractmethod
    def _scaled_product(self, x: Tensor, scale: float) -> Tensor:
        """`scale` · x Wᵀ. x: [rows, inputs] → [rows, outputs], of the dtype of x"""

    @abstractmethod
    def _rows(self, ids: Tensor) -> Tensor:
        """ids: [n] → [n, inputs] float32"""
