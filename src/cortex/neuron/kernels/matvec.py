"""Matrix times a few vectors: what decoding is made of. Bound by the bytes of the matrix, so everything around it
(the norm before, the gate or the addition after) rides along in the same pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import jit, tl, triton
from cortex.neuron.kernels.norm import rms_norm_reference
from cortex.neuron.kernels.silu import silu_mul_reference

MATVEC_ROWS = 1
"""Up to this many rows these kernels are faster than a matrix product."""


def matvec(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
) -> Tensor:
    """norm(x) Wᵀ + bias + residual. x: [1, in], weight: [out, in] → [1, out]"""
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    block_in, block_out = _blocks(inputs)
    _matvec_kernel[(triton.cdiv(outputs, block_out),)](
        x,
        weight,
        bias if bias is not None else x,
        norm_weight if norm_weight is not None else x,
        residual if residual is not None else x,
        out,
        inputs,
        outputs,
        eps,
        BIAS=bias is not None,
        NORM=norm_weight is not None,
        RESIDUAL=residual is not None,
        GATED=False,
        BLOCK_IN=block_in,
        BLOCK_OUT=block_out,
        num_warps=4,
    )
    return out


def matvec_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
) -> Tensor:
    if norm_weight is not None:
        x = rms_norm_reference(x, norm_weight, eps)
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


def gated_matvec(x: Tensor, gate_up: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """silu(norm(x) Gᵀ) · norm(x) Uᵀ. x: [1, in], gate_up: [2 · out, in] → [1, out]"""
    outputs, inputs = gate_up.shape[0] // 2, gate_up.shape[1]
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    block_in, block_out = _blocks(inputs)
    _matvec_kernel[(triton.cdiv(outputs, block_out),)](
        x,
        gate_up,
        x,
        norm_weight,
        x,
        out,
        inputs,
        outputs,
        eps,
        BIAS=False,
        NORM=True,
        RESIDUAL=False,
        GATED=True,
        BLOCK_IN=block_in,
        BLOCK_OUT=block_out,
        num_warps=4,
    )
    return out


def gated_matvec_reference(x: Tensor, gate_up: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    return silu_mul_reference(F.linear(rms_norm_reference(x, norm_weight, eps), gate_up))


def _blocks(inputs: int) -> tuple[int, int]:
    """Columns and rows of the matrix that one program reads at a time."""
    block_in = min(2048, triton.next_power_of_2(inputs))
    return block_in, max(1, 4096 // block_in)


@jit
def _matvec_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    inputs,
    outputs,
    eps,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):
    """One program per BLOCK_OUT rows. The norm's scale is a common factor of the dot product, applied at the end."""
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_inside = row < outputs
    total = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    total_up = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    squares = tl.zeros((BLOCK_IN,), tl.float32)
    line = weight + row.to(tl.int64)[:, None] * inputs
    for start in range(0, inputs, BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        column_inside = column < inputs
        inside = row_inside[:, None] & column_inside[None, :]
        tile = tl.load(line + column[None, :], mask=inside, other=0.0)
        if GATED:
            tile_up = tl.load(line + outputs.to(tl.int64) * inputs + column[None, :], mask=inside, other=0.0)
        value = tl.load(x + column, mask=column_inside, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm_weight + column, mask=column_inside, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * value[None, :]
        if GATED:
            total_up += tile_up.to(tl.float32) * value[None, :]
    y = tl.sum(total, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
        y *= scale
    if GATED:
        y = y * tl.sigmoid(y) * (tl.sum(total_up, 1) * scale)
    if BIAS:
        y += tl.load(bias + row, mask=row_inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(residual + row, mask=row_inside, other=0.0).to(tl.float32)
    tl.store(out + row, y.to(out.dtype.element_ty), mask=row_inside)
