"""Projections of one input whose weights stay quantised in memory. Each may have a different format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cortex.neuron.kernels.device_matrix import DeviceMatrix
from cortex.neuron.kernels.float8.matrix import Float8Matrix
from cortex.neuron.kernels.float8.one_row import one_row_float8_product
from cortex.neuron.kernels.float8.product import MAX_SMALL_ROWS as MAX_SMALL_FLOAT8_ROWS
from cortex.neuron.kernels.float8.product import float8_product, gated_float8_product, widened_product
from cortex.neuron.kernels.float8.rows import float8_rows
from cortex.neuron.kernels.float8.support import has_float8_products
from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.products.cpu_matrix import CpuMatrix
from cortex.neuron.kernels.products.native import NativeMatrix
from cortex.neuron.kernels.quantised.few_rows import few_rows_product, gated_few_rows_product, max_few_rows
from cortex.neuron.kernels.quantised.one_row import gated_one_row_product, one_row_product
from cortex.neuron.kernels.quantised.packing import PackedMatrix
from cortex.neuron.kernels.quantised.product import MAX_SMALL_ROWS, gated_product, packed_product
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import QuantisedMatrix


class PackedProjections:
    """`y = norm(x) Wᵀ + b + residual` over vertically concatenated matrices. `residual` may be overwritten."""

    def __init__(self, matrices: Sequence[DeviceMatrix]) -> None:
        self.matrices = matrices
        self.outputs = sum(matrix.outputs for matrix in matrices)
        only = matrices[0] if len(matrices) == 1 else None
        self._float8 = only if isinstance(only, Float8Matrix) else None
        self._max_normed_rows = min(
            max_few_rows(matrix.layout) if isinstance(matrix, PackedMatrix) else 1 for matrix in matrices
        )

    def rounds_inputs(self, x: Tensor) -> bool:
        """Whether the rows of x are rounded to eight bits: `activated` does that together with the activation."""
        return self._float8 is not None and x.shape[0] > 1 and has_float8_products(x.device)

    def __call__(self, x: Tensor, bias: Tensor | None, norm: RMSNorm | None, residual: Tensor | None) -> Tensor:
        """x: [tokens, in] → [tokens, out]"""
        if self.rounds_inputs(x):
            return self._rounded(x, bias, residual, norm=norm)
        fuses_norm = len(x) <= self._max_normed_rows and has_kernels(x)
        if norm is not None and not fuses_norm:
            x = norm(x)
        x = x.contiguous()
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        if residual is None or len(x) <= MAX_SMALL_ROWS:
            out = torch.empty(len(x), self.outputs, dtype=x.dtype, device=x.device)
        else:
            out = residual  # the library adds to what it overwrites
        for matrix, part, part_bias, part_residual in self._parts(out, bias, residual):
            if isinstance(matrix, Float8Matrix):
                if fuses_norm:
                    one_row_float8_product(x, matrix, part, part_bias, weight, eps, part_residual)
                else:
                    widened_product(x, matrix, part, part_bias, part_residual)
            elif fuses_norm:
                product = one_row_product if len(x) == 1 else few_rows_product
                product(x, matrix, part, part_bias, weight, eps, part_residual)
            else:
                packed_product(x, matrix, part, part_bias, part_residual)
        return out

    def activated(self, gate_up: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """`(silu(gate) · up) Wᵀ + b + residual`. Requires `rounds_inputs`. gate_up: [tokens, 2 · in] → [tokens, out]"""
        return self._rounded(gate_up, bias, residual, gated=True)

    def gated(self, x: Tensor, norm: RMSNorm) -> Tensor | None:
        """`silu(norm(x) Gᵀ) · (norm(x) Uᵀ)` without storing gate and up; None if that is not possible: many rows, two
        formats, or several rows and eight-bit floating-point numbers with scales of blocks."""
        if len(self.matrices) != 1 or not has_kernels(x):
            return None
        (matrix,) = self.matrices
        if isinstance(matrix, Float8Matrix) and self.rounds_inputs(x):
            if matrix.layout.block or len(x) > MAX_SMALL_FLOAT8_ROWS:
                return None
            rows = float8_rows(x, grouped=False, norm_weight=norm.weight, eps=norm.eps)
            return gated_float8_product(rows, matrix)
        if len(x) > self._max_normed_rows:
            if isinstance(matrix, Float8Matrix) or len(x) > MAX_SMALL_ROWS:
                return None
            return gated_product(norm(x), matrix)
        if len(x) > 1 and isinstance(matrix, PackedMatrix):
            return gated_few_rows_product(x.contiguous(), matrix, norm.weight, norm.eps)
        out = torch.empty(1, self.outputs // 2, dtype=x.dtype, device=x.device)
        if isinstance(matrix, Float8Matrix):
            one_row_float8_product(x.contiguous(), matrix, out, None, norm.weight, norm.eps, None, gated=True)
        else:
            gated_one_row_product(x.contiguous(), matrix, out, norm.weight, norm.eps)
        return out

    def _rounded(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        *,
        norm: RMSNorm | None = None,
        gated: bool = False,
    ) -> Tensor:
        assert self._float8 is not None
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        grouped = self._float8.layout.block > 0
        rows = float8_rows(x, grouped=grouped, norm_weight=weight, eps=eps, gated=gated)
        return float8_product(rows, self._float8, bias, residual)

    def _parts(
        self, out: Tensor, bias: Tensor | None, residual: Tensor | None
    ) -> Iterator[tuple[DeviceMatrix, Tensor, Tensor | None, Tensor | None]]:
        """Each matrix with the columns of the others that are its rows."""
        first = 0
        for matrix in self.matrices:
            rows = slice(first, first + matrix.outputs)
            first += matrix.outputs
            yield (
                matrix,
                out[:, rows],
                *(
                    None if bias is None else bias[rows],
                    None if residual is None else residual[:, rows],
                ),
            )


class CpuProjections:
    """The same in a CPU's memory."""

    def __init__(self, matrices: Sequence[CpuMatrix]) -> None:
        self.matrices = matrices
        self._native = [matrix for matrix in matrices if isinstance(matrix, NativeMatrix)]

    def __call__(self, x: Tensor, bias: Tensor | None, norm: RMSNorm | None, residual: Tensor | None) -> Tensor:
        """x: [tokens, in] → [tokens, out]"""
        if self._native:
            return self._fused(x, bias, residual, norm=norm)
        x, scale = (x, 1.0) if norm is None else norm.in_two(x)
        out = self.matrices[0].product(x, scale)
        if len(self.matrices) > 1:
            out = torch.cat((out, *(matrix.product(x, scale) for matrix in self.matrices[1:])), 1)
        if bias is not None:
            out = out.add_(bias)
        return out if residual is None else out.add_(residual)

    def rounds_inputs(self, x: Tensor) -> bool:  # noqa: ARG002
        """Whether `activated` rounds and multiplies in one pass."""
        return bool(self._native)

    def activated(self, gate_up: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        """`(silu(gate) · up) Wᵀ + b + residual`. Requires `rounds_inputs`. gate_up: [tokens, 2 · in] → [tokens, out]"""
        return self._fused(gate_up, bias, residual, is_gated=True)

    def _fused(
        self,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        *,
        norm: RMSNorm | None = None,
        is_gated: bool = False,
    ) -> Tensor:
        weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
        if len(self._native) == 1:
            return self._native[0].fused(x, norm=weight, eps=eps, is_gated=is_gated, bias=bias, residual=residual)
        out = torch.empty(len(x), sum(matrix.outputs for matrix in self._native), dtype=x.dtype)
        first = 0
        for matrix in self._native:
            rows = slice(first, first + matrix.outputs)
            first += matrix.outputs
            part_bias, part_residual = (None if part is None else part[..., rows] for part in (bias, residual))
            matrix.fused(
                x, norm=weight, eps=eps, is_gated=is_gated, bias=part_bias, residual=part_residual, out=out[:, rows]
            )
        return out

    def gated(self, x: Tensor, norm: RMSNorm) -> Tensor | None:  # noqa: ARG002
        """None: no library product has the activation in it."""
        return None


def projections(matrices: Sequence[QuantisedMatrix]) -> PackedProjections | CpuProjections:
    """`matrices`: all of one device."""
    packed = [matrix for matrix in matrices if isinstance(matrix, DeviceMatrix)]
    if packed:
        return PackedProjections(packed)
    return CpuProjections([matrix for matrix in matrices if not isinstance(matrix, DeviceMatrix)])
