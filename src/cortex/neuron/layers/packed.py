"""Projections of one input whose weights stay quantised in memory. Each may have a different format."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.products.cpu_matrix import CpuMatrix
from cortex.neuron.kernels.quantised.one_row import gated_one_row_product, one_row_product
from cortex.neuron.kernels.quantised.packing import PackedMatrix
from cortex.neuron.kernels.quantised.product import packed_product
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import QuantisedMatrix


class PackedProjections:
    """`y = norm(x) Wᵀ + b + residual` over vertically concatenated matrices."""

    def __init__(self, matrices: Sequence[PackedMatrix]) -> None:
        self.matrices = matrices
        self.outputs = sum(matrix.outputs for matrix in matrices)

    def __call__(self, x: Tensor, bias: Tensor | None, norm: RMSNorm | None, residual: Tensor | None) -> Tensor:
        """x: [tokens, in] → [tokens, out]"""
        fuses_norm = len(x) == 1 and has_kernels(x)
        if norm is not None and not fuses_norm:
            x = norm(x)
        x = x.contiguous()
        out = torch.empty(len(x), self.outputs, dtype=x.dtype, device=x.device)
        first = 0
        for matrix in self.matrices:
            rows = slice(first, first + matrix.outputs)
            first += matrix.outputs
            part_bias = None if bias is None else bias[rows]
            part_residual = None if residual is None else residual[:, rows]
            if fuses_norm:
                weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
                one_row_product(x, matrix, out[:, rows], part_bias, weight, eps, part_residual)
            else:
                packed_product(x, matrix, out[:, rows], part_bias, part_residual)
        return out

    def gated(self, x: Tensor, norm: RMSNorm) -> Tensor | None:
        """`silu(norm(x) Gᵀ) · (norm(x) Uᵀ)` in one pass; None if that is not possible: several rows, or two formats."""
        if len(x) != 1 or len(self.matrices) != 1 or not has_kernels(x):
            return None
        out = torch.empty(1, self.outputs // 2, dtype=x.dtype, device=x.device)
        gated_one_row_product(x.contiguous(), self.matrices[0], out, norm.weight, norm.eps)
        return out


class CpuProjections:
    """The same in a CPU's memory."""

    def __init__(self, matrices: Sequence[CpuMatrix]) -> None:
        self.matrices = matrices

    def __call__(self, x: Tensor, bias: Tensor | None, norm: RMSNorm | None, residual: Tensor | None) -> Tensor:
        """x: [tokens, in] → [tokens, out]"""
        x, scale = (x, 1.0) if norm is None else norm.in_two(x)
        out = self.matrices[0].product(x, scale)
        if len(self.matrices) > 1:
            out = torch.cat((out, *(matrix.product(x, scale) for matrix in self.matrices[1:])), 1)
        if bias is not None:
            out = out.add_(bias)
        return out if residual is None else out.add_(residual)

    def gated(self, x: Tensor, norm: RMSNorm) -> Tensor | None:  # noqa: ARG002
        """None: no library product has the activation in it."""
        return None


def projections(matrices: Sequence[QuantisedMatrix]) -> PackedProjections | CpuProjections:
    """`matrices`: all of one device."""
    packed = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix)]
    if packed:
        return PackedProjections(packed)
    return CpuProjections([matrix for matrix in matrices if not isinstance(matrix, PackedMatrix)])
